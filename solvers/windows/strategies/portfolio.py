"""Portfolios of strategies for plain graphs, which share the time by their gains."""

from collections.abc import Iterator

from planner.solvers.problem import Problem
from planner.solvers.windows.decoding.refinement import split_evenly
from planner.solvers.windows.search import Search
from planner.solvers.windows.strategies.first_schedules import OFFLOADING_RULES_LIMIT
from planner.solvers.windows.strategies.neighbourhoods import FixAndOptimizeOps, FixAndOptimizeWindows, Restarts, RestrictedModel
from planner.solvers.windows.strategies.offloading import Polishing
from planner.solvers.windows.strategies.random_keys import RandomKeys
from planner.solvers.windows.strategies.strategy import EVEN_SHARE, Share, SteppedStrategy, Strategy, share_evenly, share_time

_IDLE_RUNS = 200  # evictions without improvement before random keys end
_RESTARTS_SHARE = 0.05  # of the time, as ``EVEN_SHARE``, for restarts
_EVEN_WINDOWS = 12  # windows of equal time in graphs with transfers to the host
_GUIDED_LIMIT, _RUNS = 2.0, 4  # of the clock, for rules with guides, and the number of others at a time


class Portfolio(Strategy):
    """The portfolio for graphs without transfers to the host; it ends when the restricted model is solved."""

    def __init__(self, search: Search) -> None:
        super().__init__(search)
        self.restricted = RestrictedModel(search, search.models.coarse)

    @staticmethod
    def applies(problem: Problem) -> bool:
        """Return True if the problem has no transfers to the host."""
        return not problem.round_trips

    def step(self, limit: float) -> bool:
        """Run the portfolio to its end; return False."""
        search = self.search
        began = search.clock.now
        self.restricted.begin()  # the first of the restarts
        began_with = search.clock.now - began
        restarts = Restarts(search, self.restricted)
        if search.incumbent.best is None:
            share_time(search, [Share(restarts, 1.0)], should_stop=lambda: is_found_or_enough(search))
        shares = (
            Share(FixAndOptimizeWindows(search, self.restricted), EVEN_SHARE),
            Share(FixAndOptimizeOps(search, self.restricted), EVEN_SHARE),
            Share(restarts, _RESTARTS_SHARE, spent=began_with),
        )
        share_time(search, shares, should_stop=search.stopping.is_enough)
        return False


class OffloadingPortfolio(Strategy):
    """The portfolio for graphs with transfers to the host."""

    def __init__(self, search: Search) -> None:
        super().__init__(search)
        self.restricted = RestrictedModel(search, search.models.coarse)

    @staticmethod
    def applies(problem: Problem) -> bool:
        """Return True if the problem has transfers to the host."""
        return bool(problem.round_trips)

    def step(self, limit: float) -> bool:
        """Run the portfolio to its end; return False."""
        search, restricted = self.search, self.restricted
        # Transfers overlap with computation in windows of equal time.
        restricted.discretization = split_evenly(search.models.coarse, search.problem.time_s, _EVEN_WINDOWS)
        evicting, restarts = RandomEviction(search), Restarts(search, restricted)
        stop = search.stopping.make_enough_after(OFFLOADING_RULES_LIMIT)
        while evicting.step() and not stop():
            pass
        # Not before: with a good schedule without offloading as the incumbent, rough ones with offloading, which may become
        # better, would be given up.
        search.incumbent.release()
        strategies: list[SteppedStrategy] = [evicting, restarts]
        if search.incumbent.best is None:
            restricted.begin()
            shares = share_evenly(strategies)
            share_time(search, shares, should_stop=lambda: is_found_or_enough(search))
        if search.incumbent.best is not None:
            strategies += [Polishing(search), FixAndOptimizeWindows(search, restricted), FixAndOptimizeOps(search, restricted)]
            share_time(search, share_evenly(strategies), should_stop=search.stopping.is_enough)
        return False


class RandomEviction(SteppedStrategy):
    """Eviction with random keys until that gains nothing more; its best schedule is polished."""

    def take_steps(self) -> Iterator[None]:
        """Try some evictions per step."""
        search, keys = self.search, RandomKeys(self.search)
        idle = 0
        while idle < _IDLE_RUNS:
            best, before = search.incumbent.best, keys.runs
            keys.repair_solutions(search.stopping.make_enough_after(_GUIDED_LIMIT))
            yield
            keys.vary(_RUNS, search.stopping.is_enough)
            yield
            idle += keys.runs - before
            if search.incumbent.best is not best and search.incumbent.best is keys.found:
                idle = 0
                yield from Polishing(search).take_steps()


def is_found_or_enough(search: Search) -> bool:
    """Return True if there is a schedule, or the search should end."""
    return search.incumbent.best is not None or search.stopping.is_enough()
