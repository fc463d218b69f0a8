"""One search: solve for fewer allocated bytes until a second measure of the schedule is within its budget.

The measure is what an allocator reserves, what the pool of CUDA graphs keeps, or what the graphs of a step reserve together. It
is known only once there is a schedule, and is no monotonous function of what is allocated, as whole segments are reserved.
Bisection alone takes twice the solves: the excess is mostly what is to be freed. Steps that double overshoot, and the schedules
then recompute for bytes that stay free. Never imports torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from planner.graphs.errors import BudgetError
from planner.settings.budget import Bytes

Found = TypeVar("Found")

_INSIDE = 0.1  # of an interval of budgets: the next one is no closer to its ends


@dataclass(slots=True)
class Bracket:
    """The budgets of allocated bytes from one that is too small to one whose schedule takes too much of the measure.

    Attributes:
        floor_bytes: nothing was found for this budget of allocated bytes.
        fits: the largest budget whose schedule fits, and what that takes.
        misses: the smallest budget whose schedule does not fit, and what that takes.
        missed: the number of budgets whose schedules did not fit.
        is_news: the last schedule is another than those of `fits` and `misses`, by what it takes.
    """

    budget_bytes: int
    floor_bytes: int = 0
    fits: tuple[int, int] | None = None
    misses: tuple[int, int] | None = None
    missed: int = 0
    is_news: bool = True

    def learn(self, asked_bytes: int, peak_bytes: int | None, taken_bytes: int = 0) -> None:
        """Learn from a solve for `asked_bytes`: the peak of its schedule, if it has one, and what that takes of the measure."""
        known = (self.fits, self.misses)
        self.is_news = peak_bytes is not None and all(one is None or one[1] != taken_bytes for one in known)
        if peak_bytes is None:
            self.floor_bytes = asked_bytes
        elif taken_bytes <= self.budget_bytes:
            self.fits = asked_bytes, taken_bytes
        else:
            self.misses = min(asked_bytes, peak_bytes), taken_bytes
            self.missed += 1

    def choose_next_bytes(self, close_bytes: float, excess_bytes: int = 0) -> int | None:
        """Return the budget of allocated bytes to solve for; None if the ends are within `close_bytes`, or nothing missed.

        At least `excess_bytes` are to be freed, or the excess of the measure if that is more.
        """
        if self.misses is None:
            return None
        high_bytes, high_taken = self.misses
        low_bytes, low_taken = self.fits or (self.floor_bytes, 0)
        if high_bytes - low_bytes <= close_bytes:
            return None
        if self.fits is None:
            asked_bytes = high_bytes - max(high_taken - self.budget_bytes, excess_bytes)
        else:
            share = (self.budget_bytes - low_taken) / max(1, high_taken - low_taken)
            asked_bytes = low_bytes + int(share * (high_bytes - low_bytes))
        margin_bytes = int((_INSIDE if self.is_news else 0.5) * (high_bytes - low_bytes))
        return max(low_bytes + margin_bytes, min(high_bytes - margin_bytes if self.fits else high_bytes - 1, asked_bytes))


def fit(
    found: Found,
    solve: Callable[[Bytes], Found],
    measure: Callable[[Found], int],
    bracket: Bracket,
    *,
    allocated: Callable[[Found], int],
    tries: int,
) -> tuple[Found, int]:
    """Return the first plan within the budget of the measure, or the one that takes least of it; and what it takes.

    Args:
        solve: a plan for a budget of allocated bytes; it raises BudgetError if there is none.
        bracket: the budget of the measure, and the least of allocated bytes.
        allocated: the allocated bytes of a plan, or those that it was solved for.
        tries: the most solves.
    """
    least, least_bytes = found, measure(found)
    bracket.learn(allocated(found), allocated(found), least_bytes)
    while tries and bracket.fits is None and (asked_bytes := bracket.choose_next_bytes(1)) is not None:
        tries -= 1
        try:
            found = solve(Bytes(asked_bytes))
        except BudgetError:
            bracket.learn(asked_bytes, None)
            continue
        taken_bytes = measure(found)
        bracket.learn(asked_bytes, allocated(found), taken_bytes)
        if taken_bytes < least_bytes:
            least, least_bytes = found, taken_bytes
    return least, least_bytes


def find_largest(attempt: Callable[[float], Found | None], low: float, high: float, *, halvings: int) -> Found | None:
    """Return what `attempt` finds at the largest number between `low` and `high` at which it finds something, by bisection."""
    best = None
    for _ in range(halvings):
        middle = (low + high) / 2
        if (found := attempt(middle)) is None:
            high = middle
        else:
            best, low = found, middle
    return best
