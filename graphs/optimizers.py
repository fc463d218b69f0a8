"""Optimizers with known memory. To add one, add a line."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The memory of an optimizer's state, and the classes of PyTorch that it describes.

    Attributes:
        copies: copies of the trained parameters in its state.
        counter_bytes: size of the step counter of each parameter, a tensor on the CPU.
        temporaries: copies of the trained parameters that it holds while it runs, with the kernels that are the default on CUDA
            (``foreach``): square roots of the second moments.
        classes: names in ``torch.optim``.
        switches: values of their boolean options.
    """

    copies: int
    counter_bytes: int = 0
    temporaries: int = 0
    classes: tuple[str, ...] = ()
    switches: Mapping[str, bool] = field(default_factory=dict)

    def describes(self, class_name: str, options: Mapping[str, object]) -> bool:
        """Return True if this is ``torch.optim.<class_name>`` with these options of a parameter group."""
        return class_name in self.classes and all(bool(options[name]) is on for name, on in self.switches.items())


# By name, as in the settings of a trace.
OPTIMIZERS: dict[str, Optimizer] = {
    "none": Optimizer(0),
    "sgd": Optimizer(0, classes=("SGD",), switches={"momentum": False}),
    "momentum": Optimizer(1, classes=("SGD",), switches={"momentum": True}),
    "adamw": Optimizer(2, counter_bytes=4, temporaries=1, classes=("Adam", "AdamW"), switches={"amsgrad": False}),
}


def optimizer_of(provenance: Mapping[str, object]) -> Optimizer:
    """Return the optimizer that a graph of this provenance was traced for; one without memory if it is none of ``OPTIMIZERS``."""
    return OPTIMIZERS.get(str(provenance.get("optimizer")), OPTIMIZERS["none"])
