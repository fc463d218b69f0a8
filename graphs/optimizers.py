"""Optimizers whose memory is known. Adding one is adding a line here."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What an optimizer keeps from its first step on, and which of PyTorch's it is.

    Attributes:
        copies: of the trained parameters.
        counter_bytes: of the number of steps, kept for each parameter in a tensor on the CPU.
        classes: names in ``torch.optim``.
        switches: of these, options that are on or off.
    """

    copies: int
    counter_bytes: int = 0
    classes: tuple[str, ...] = ()
    switches: Mapping[str, bool] = field(default_factory=dict)

    def describes(self, class_name: str, options: Mapping[str, object]) -> bool:
        """Whether it is ``torch.optim.<class_name>`` with these options of a group of parameters."""
        return class_name in self.classes and all(bool(options[name]) is on for name, on in self.switches.items())


# By what users call them.
OPTIMIZERS: dict[str, Optimizer] = {
    "none": Optimizer(0),
    "sgd": Optimizer(0, classes=("SGD",), switches={"momentum": False}),
    "momentum": Optimizer(1, classes=("SGD",), switches={"momentum": True}),
    "adamw": Optimizer(2, counter_bytes=4, classes=("Adam", "AdamW"), switches={"amsgrad": False}),
}
