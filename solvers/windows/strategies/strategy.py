"""The interface of strategies, and the sharing of time between several."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from planner.solvers.problem import Problem
from planner.solvers.windows.search import Search

_END = object()
EVEN_SHARE = 0.25  # of the time for a strategy that gains nothing, relative to 1 for the one that gains most
_SLOW = 1e-4  # relative gain in a unit of time below which all strategies get about the same time
_MEMORY = 0.95  # factor to past gains and durations per unit of time


class Strategy(ABC):
    """A way to find schedules or to prove bounds; results go to the incumbent, which all strategies share."""

    def __init__(self, search: Search) -> None:
        self.search = search

    @staticmethod
    def applies(problem: Problem) -> bool:
        """Return True if the driver may run it on the problem: by default, if transfers to the host are its only options."""
        return problem.places.plain

    @abstractmethod
    def step(self, limit: float) -> bool:
        """Work for about `limit` by the clock, or by limits of its own; return False once nothing is left to do."""


class SteppedStrategy(Strategy):
    """A strategy whose steps are those of a generator: each is short, whatever the limit."""

    def __init__(self, search: Search) -> None:
        super().__init__(search)
        self._steps = self.take_steps()

    @abstractmethod
    def take_steps(self) -> Iterator[None]:
        """Work, and yield after each step."""

    def step(self, limit: float = 0.0) -> bool:
        """Take one step of the generator; return False after its end."""
        return next(self._steps, _END) is not _END


@dataclass(slots=True, eq=False)
class Share:
    """A strategy and its share of the time of a portfolio.

    Attributes:
        idle: its share while it gains nothing, relative to 1 for the strategy that gains most.
        spent: its time so far; earlier time counts less.
        gained: its relative gain in the objective per unit of time; earlier gains count less.
    """

    strategy: SteppedStrategy
    idle: float
    spent: float = 0.0
    gained: float = 0.0


def share_evenly(strategies: Iterable[SteppedStrategy]) -> list[Share]:
    """Return a share for each strategy, equal while none of them gains anything."""
    return [Share(strategy, EVEN_SHARE) for strategy in strategies]


def share_time(search: Search, shares: Iterable[Share], *, should_stop: Callable[[], bool]) -> None:
    """Take steps of several strategies until all have ended; those with larger recent gains get more of the time.

    The principle is that of adaptive large-neighbourhood search (Ropke and Pisinger, Transportation Science 2006).
    """
    incumbent, clock, active = search.incumbent, search.clock, list(shares)
    while active and not should_stop():
        most = max(share.gained for share in active) + _SLOW
        chosen = min(active, key=lambda share: share.spent / (share.idle + share.gained / most))
        before_s, began = incumbent.best_s, clock.now
        is_open = chosen.strategy.step()
        took = clock.now - began
        gain = (before_s - incumbent.best_s) / before_s if before_s > 0 else 0.0
        fading = _MEMORY**took
        for share in active:
            share.gained *= fading
            share.spent *= fading
        chosen.gained += gain / took if np.isfinite(gain) and took > 0 else 0.0
        chosen.spent += took
        if not is_open:
            active.remove(chosen)
