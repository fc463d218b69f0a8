"""The best schedule of a graph with optional ops, with some of it chosen anew at a time: how it is computed, when, how often.

What a solution commits to says for each op in which way it is executed at all. Here that is chosen together with the rest, in
a few windows or of a few ops (``neighbourhoods.py``).
"""

from collections.abc import Iterator

from solvers.clock import left
from solvers.windows.decoding.decode import Trial
from solvers.windows.relaxation.discretization import Discretization
from solvers.windows.search import Search
from solvers.windows.strategies.neighbourhoods import Neighbourhoods
from solvers.windows.strategies.turns import take_turns


class Anew:
    """The search for what is better near the best schedule, which others may change meanwhile."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.near = Neighbourhoods(search, Discretization((search.problem.ops - 1,), places=search.problem.places.last))
        # What is executed at all is chosen first, and what of the program is executed again once that leads no further.
        self.near.choose_from(i for i, sure in enumerate(search.problem.places.sure) if not sure)
        self.ways: list[Iterator[None]] = []
        self._from: Trial | None = None  # the best when it last began
        self._none_left = False

    def go_on(self, limit: float) -> bool:
        """Go on for so long by the clock; whether there is anything left to do then."""
        search = self.search
        if search.incumbent.best is None or (self._none_left and search.incumbent.best is self._from):
            return False
        clock, before = search.clock.part(limit), search.incumbent.best

        def stop() -> bool:
            return search.stopping.enough() or left(clock) <= 0

        self._none_left = False
        while not (stop() or self._none_left):
            if not self.ways:
                self._begin()
            take_turns(self.ways, lambda: search.incumbent.best_s, stop, search.clock, search.params.portfolio)
            if not stop():  # all has been chosen anew together
                self.ways = []
                self._none_left = search.incumbent.best is self._from and not self.near.more_choices()
        if limit > 0 and search.incumbent.best is before:
            self.near.choose_from(range(search.problem.ops))
        return not (self._none_left or search.stopping.enough())

    def _begin(self) -> None:
        """From the best schedule: from now on windows end where it takes much memory."""
        self._from = best = self.search.incumbent.best_trial
        self.near.choose_from(op for op, first in zip(best.order.computed, best.order.first, strict=True) if not first)
        self.near.look_closer([best])
        self.ways = [self.near.reopenings(), self.near.exchanges()]
