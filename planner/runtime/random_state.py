"""The state of a random generator, saved and compared without memory from PyTorch's allocator, which the budget counts."""

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from planner.passes.draws import LOCK
from planner.torch_private.core import disable_current_modes, is_in_torch_dispatch_mode


@dataclass(frozen=True, slots=True)
class RandomState:
    """A saved state.

    Attributes:
        copy: a generator that nobody draws from; ``Generator.get_state`` would allocate a tensor.
    """

    copy: torch.Generator

    @classmethod
    def of(cls, generator: torch.Generator) -> "RandomState":
        """Return the state in which `generator` is now."""
        return cls(generator.clone_state())

    def restore(self, generator: torch.Generator) -> None:
        """Set `generator` to this state."""
        with LOCK:
            generator.set_state(self.copy.get_state())

    def __eq__(self, other: object) -> bool:
        """Return True if all that is drawn from both states is the same."""
        if not isinstance(other, RandomState):
            return NotImplemented
        if self.copy.device.type != "cpu":  # its state is a tensor on the CPU, which is not what the budget counts
            return torch.equal(self.copy.get_state(), other.copy.get_state())
        with disable_current_modes() if is_in_torch_dispatch_mode() else nullcontext():  # it is no part of the step
            return self._next_numbers() == other._next_numbers()

    __hash__ = None  # type: ignore[assignment]

    def _next_numbers(self) -> bytes:
        """Return numbers that depend on all of the state: beside the engine, a normal number of each type may wait."""
        generator = self.copy.clone_state()
        drawn = np.empty(4, dtype=np.int64)
        floats, doubles, integers = (
            torch.from_numpy(part) for part in (drawn[:1].view(np.float32)[:1], drawn[1:2].view(float), drawn[2:])
        )
        drawn[:] = 0
        floats.normal_(generator=generator)
        doubles.normal_(generator=generator)
        integers.random_(generator=generator)
        return drawn.tobytes()
