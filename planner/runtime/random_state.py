"""The state of a random generator, saved and compared without allocations that the budget counts."""

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from planner.capture.program.draws import LOCK
from planner.torch_private.core import disable_current_modes, is_in_torch_dispatch_mode


@dataclass(frozen=True, slots=True)
class RandomState:
    """A saved state.

    Attributes:
        copy: a generator without draws; ``Generator.get_state`` would allocate a tensor.
    """

    copy: torch.Generator

    @classmethod
    def of(cls, generator: torch.Generator) -> "RandomState":
        """Return the current state of `generator`."""
        return cls(generator.clone_state())

    def restore(self, generator: torch.Generator) -> None:
        """Set `generator` to this state."""
        with LOCK:
            generator.set_state(self.copy.get_state())

    def __eq__(self, other: object) -> bool:
        """Return True if both states give the same random numbers."""
        if not isinstance(other, RandomState):
            return NotImplemented
        if self.copy.device.type != "cpu":  # its state is a tensor on the CPU, which the budget does not count
            return torch.equal(self.copy.get_state(), other.copy.get_state())
        with disable_current_modes() if is_in_torch_dispatch_mode() else nullcontext():  # it is not part of the step
            return self._draw_numbers() == other._draw_numbers()

    __hash__ = None  # type: ignore[assignment]

    def _draw_numbers(self) -> bytes:
        """Return numbers that depend on the whole state, including cached normal numbers of each type."""
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
