"""The interface of strategies, and the sharing of time between several."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from solvers.problem import Problem
from solvers.windows.params import PortfolioParams
from solvers.windows.search import Search

_END = object()


class Strategy(ABC):
    """A way to find schedules or to prove bounds; results go to the incumbent, which all strategies share."""

    def __init__(self, search: Search) -> None:
        self.search = search

    @staticmethod
    def applies(problem: Problem) -> bool:
        """Return True if the driver may run it on the problem: by default, if that has no optional ops."""
        return problem.places.plain

    @abstractmethod
    def step(self, limit: float) -> bool:
        """Work for about `limit` by the clock; return False once nothing is left to do."""


class SteppedStrategy(Strategy):
    """A strategy whose steps are those of a generator: each is short, whatever the limit."""

    def __init__(self, search: Search) -> None:
        super().__init__(search)
        self._steps = self.steps()

    @abstractmethod
    def steps(self) -> Iterator[None]:
        """Work, and yield after each step."""

    def step(self, limit: float = 0.0) -> bool:
        """Take one step of the generator; return False after its end."""
        return next(self._steps, _END) is not _END


def share_time(
    search: Search,
    strategies: Sequence[SteppedStrategy],
    params: PortfolioParams,
    *,
    should_stop: Callable[[], bool],
    least: Sequence[float] | None = None,
    spent: Sequence[float] | None = None,
) -> None:
    """Take steps of several strategies until all have ended; those with larger recent gains get more of the time.

    The principle is that of adaptive large-neighbourhood search (Ropke and Pisinger, Transportation Science 2006).

    Args:
        least: for each strategy its share if it gains nothing, relative to 1 for the one that gains most; by default even.
        spent: initial time of each; by default none.
    """
    incumbent, clock = search.incumbent, search.clock
    strategies, shares_of_idle = list(strategies), list(least or [params.even_share] * len(strategies))
    gained, took_so_far = [0.0] * len(strategies), list(spent or [0.0] * len(strategies))
    while strategies and not should_stop():
        shares = [few + gain / (max(gained) + params.slow) for few, gain in zip(shares_of_idle, gained, strict=True)]
        chosen = min(range(len(strategies)), key=lambda i: took_so_far[i] / shares[i])
        before_s, began = incumbent.best_s, clock.now
        is_open = strategies[chosen].step()
        took = clock.now - began
        gain = (before_s - incumbent.best_s) / before_s if before_s > 0 else 0.0
        fading = params.memory**took
        gained = [fading * g for g in gained]
        took_so_far = [fading * s for s in took_so_far]
        gained[chosen] += gain / took if np.isfinite(gain) and took > 0 else 0.0
        took_so_far[chosen] += took
        if not is_open:
            del strategies[chosen], shares_of_idle[chosen], gained[chosen], took_so_far[chosen]
