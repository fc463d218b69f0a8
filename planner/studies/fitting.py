"""Feasibility tests with little work: few sizes are tried, and a solve ends once the answer is known."""

from collections.abc import Callable
from dataclasses import dataclass

from solvers.result import Result, SolveProgress


def largest(fits: Callable[[int], bool], *, first: int, limit: int, low: int = 0) -> int:
    """Return the largest number from `low` + 1 to `limit` that fits; `low` if none does.

    If a number fits, all smaller ones must. The search starts near `first`, doubles its steps, then bisects.
    """
    high, asked, step = limit + 1, min(max(first, low + 1), limit), 1
    begin = low
    while high - low > 1:
        if fits(asked):
            low = asked
        else:
            high = asked
        if low == begin:
            asked = max(low + 1, high - step)
        elif high > limit:
            asked = min(limit, low + step)
        else:
            asked = (low + high) // 2
        step *= 2
    return low


@dataclass(frozen=True, slots=True)
class Decision:
    """The result of a solver, and whether it proves feasibility; `fits` is None if it proves neither."""

    fits: bool | None
    result: Result


@dataclass(slots=True)
class Enough:
    """A callback that ends a solve as soon as it is known whether a schedule takes at most `cap_s` (or any time at all)."""

    cap_s: float
    any_time: bool
    should_stop: Callable[[], bool]
    known: bool = False

    def __call__(self, progress: SolveProgress) -> None:
        """Update the answer from the progress of the current solve."""
        fast_enough = progress.best_s is not None and (self.any_time or progress.best_s <= self.cap_s)
        self.known = fast_enough or self.refuted(progress.bound_s)

    def refuted(self, bound_s: float | None) -> bool:
        """Return whether the bound excludes every schedule that is fast enough."""
        return bound_s is not None and not self.any_time and bound_s > self.cap_s

    def reached(self) -> bool:
        """Return whether to end the solve."""
        return self.known or self.should_stop()
