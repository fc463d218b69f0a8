"""The memory of optimizers: by the name of a usual one, or as measured from an optimizer."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The memory of a usual optimizer, whatever the parameters.

    Attributes:
        copies: copies of the trained parameters in its state.
        counter_bytes: size of the step counter of each parameter, a tensor on the CPU.
        temporaries: copies of the trained parameters that it holds while it runs, with the kernels that are the default on CUDA
            (``foreach``): square roots of the second moments.
    """

    copies: int
    counter_bytes: int = 0
    temporaries: int = 0

    def list_state_sizes(self, parameters: Sequence[int], *, is_cpu: bool) -> tuple[int, ...]:
        """Return the bytes of each tensor in its state, given those of the trained parameters."""
        return (*tuple(parameters) * self.copies, *[self.counter_bytes] * (is_cpu * len(parameters)))

    def list_temporary_sizes(self, parameters: Sequence[int]) -> tuple[int, ...]:
        """Return the bytes of the tensors that it holds at once while it runs."""
        return tuple(parameters) * self.temporaries


@dataclass(frozen=True, slots=True)
class MeasuredOptimizer:
    """The memory of an optimizer with its own parameters, on their device.

    Attributes:
        name: its class, for people.
        state: bytes of each tensor in its state.
        temporaries: bytes of the tensors that it holds at once while it runs.
    """

    name: str
    state: tuple[int, ...]
    temporaries: tuple[int, ...]

    def list_state_sizes(self, parameters: Sequence[int], *, is_cpu: bool) -> tuple[int, ...]:
        """Return the bytes of each tensor in its state."""
        del parameters, is_cpu
        return self.state

    def list_temporary_sizes(self, parameters: Sequence[int]) -> tuple[int, ...]:
        """Return the bytes of the tensors that it holds at once while it runs."""
        del parameters
        return self.temporaries

    @property
    def recorded(self) -> dict[str, object]:
        """It as in the provenance of a graph."""
        return {"name": self.name, "state": list(self.state), "temporaries": list(self.temporaries)}


# By name, as in the settings of a trace.
OPTIMIZERS: dict[str, Optimizer] = {
    "none": Optimizer(0),
    "sgd": Optimizer(0),
    "momentum": Optimizer(1),
    "adamw": Optimizer(2, counter_bytes=4, temporaries=1),
}


def get_optimizer_memory(optimizer: str | MeasuredOptimizer) -> Optimizer | MeasuredOptimizer:
    """Return the memory of an optimizer, given by a name in ``OPTIMIZERS`` or measured."""
    return OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
