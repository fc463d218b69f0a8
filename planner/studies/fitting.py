"""Whether something fits, with as little work as will do: few numbers are asked for, and a solve ends once it is known."""

from collections.abc import Callable
from dataclasses import dataclass

from solvers.result import Result, SolveProgress


def largest(fits: Callable[[int], bool], *, first: int, limit: int, low: int = 0) -> int:
    """The largest number from `low` + 1 to `limit` that fits; `low` if none does.

    If one fits, all smaller ones must. Asks near `first` first, then in steps that double, then bisects.
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
    """What a solver said, and whether that means that it fits; None: it does not mean either."""

    fits: bool | None
    result: Result


@dataclass(slots=True)
class Enough:
    """Ends a solve as soon as it is known whether a schedule takes at most `cap_s` (or any time at all)."""

    cap_s: float
    any_time: bool
    should_stop: Callable[[], bool]
    known: bool = False

    def __call__(self, progress: SolveProgress) -> None:
        """Look at the progress of the solve."""
        fast_enough = progress.best_s is not None and (self.any_time or progress.best_s <= self.cap_s)
        self.known = self.known or fast_enough or self.refuted(progress.bound_s)

    def refuted(self, bound_s: float | None) -> bool:
        """Whether the bound leaves no schedule that is fast enough."""
        return bound_s is not None and not self.any_time and bound_s > self.cap_s

    def reached(self) -> bool:
        """Whether to end the solve."""
        return self.known or self.should_stop()
