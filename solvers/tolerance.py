"""Tolerances on the gap of a schedule at the end of a solve, which may widen with the duration of the solve."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from planner.graphs.errors import PlannerError


@dataclass(frozen=True, slots=True)
class Tolerance:
    """A tolerance on the gap, relative to the whole step, that may widen with time.

    Attributes:
        steps: seconds since the solve began, and the tolerance from then on; the first from 0 s on.
    """

    steps: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, given: "float | Tolerance") -> "Tolerance":
        """Return the tolerance that a user gives; a number holds all the time.

        Raises:
            PlannerError: it is no number, or negative or not finite.
        """
        if isinstance(given, Tolerance):
            return given
        if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given) or given < 0:
            raise PlannerError(f"tolerance is {given!r}: must be a fraction of the step time, 0 or more, such as 0.001")
        return cls(((0.0, given),))

    @property
    def first(self) -> float:
        """The tolerance at the start."""
        return self.steps[0][1]

    def limit(self, most: float) -> "Tolerance":
        """Return the same tolerance, which widens to no more than `most`."""
        return Tolerance(tuple((begins_s, max(self.first, min(value, most))) for begins_s, value in self.steps))

    def list_begun(self, seconds: float) -> tuple[tuple[float, float], ...]:
        """Return the steps that have begun after `seconds` of the solve."""
        return self.steps[:1] + tuple(step for step in self.steps[1:] if step[0] <= seconds)

    def compute_at(self, seconds: float) -> float:
        """Return the tolerance after `seconds` of the solve."""
        return self.list_begun(seconds)[-1][1]

    def compute_settled(self, seconds: float, is_within: Callable[[float], bool]) -> float:
        """Return the least tolerance that has begun and that `is_within` accepts; the current one if there is none."""
        begun = [tolerance for _, tolerance in self.list_begun(seconds)]
        return next(filter(is_within, begun), begun[-1])


DEFAULT = Tolerance(((0.0, 1e-3),))
# The last half percent may take as long as all before, and more than it ever saves.
WIDENING = Tolerance(((0.0, 1e-3), (20.0, 5e-3), (120.0, 2e-2)))
