"""The least budget of schedules that first execute the ops in program order, bracketed: by proofs and by schedules."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from graphs.ir import Graph
from graphs.schedule import Schedule
from graphs.simulate import simulate
from solvers.bounds import least_budget_bound
from solvers.eviction.least_peak import least_evicting_schedule
from solvers.policies.store_all import store_all
from solvers.windows.driver import run
from solvers.windows.incumbent import Search

# Share of the bracket at which the solver is asked next: nearer to what is known to be possible.
_NEXT = 0.6
_SLICE = 0.25  # of the time that is left, for each of them; and of all of it, for rules of eviction


@dataclass(frozen=True, slots=True)
class LeastBudgetBracket:
    """Bounds on the least feasible budget.

    Attributes:
        proved_bytes: no schedule (of the class the windows solver searches) needs less.
        found_bytes: peak of `schedule`.
        schedule: runs within `found_bytes`.
    """

    proved_bytes: int
    found_bytes: int
    schedule: Schedule

    @property
    def exact(self) -> bool:
        """Whether the least feasible budget is known to the byte."""
        return self.proved_bytes == self.found_bytes


def least_budget(
    graph: Graph,
    *,
    time_limit_s: float = 30.0,
    precision: float = 0.005,
    should_stop: Callable[[], bool] | None = None,
) -> LeastBudgetBracket:
    """Bracket the least feasible budget of `graph`, to `precision` if time allows.

    Args:
        graph: the training step.
        time_limit_s: seconds to spend.
        precision: stop when the bracket's width is at most this part of its upper end.
        should_stop: polled; once True, the bracket so far is the answer.
    """
    end = time.monotonic() + time_limit_s
    proved = least_budget_bound(graph).budget_bytes
    evicting = least_evicting_schedule(graph, time_limit_s=_SLICE * time_limit_s, should_stop=should_stop, proved_bytes=proved)
    best = min((s for s in (store_all(graph), evicting) if s), key=lambda s: simulate(graph, s).peak_bytes)
    found = simulate(graph, best).peak_bytes
    refused = proved  # nothing was found here, though it is not proved that there is nothing
    while found - proved > precision * found and time.monotonic() < end and not (should_stop and should_stop()):
        if found - refused <= precision * found:
            refused = proved  # all has been asked for a short while: with the time left, again
        budget = int(refused + _NEXT * (found - refused))
        search = _first_schedule(graph, budget, max(1.0, (end - time.monotonic()) * _SLICE), should_stop)
        if search.least is not None and search.least.peak_bytes < found:
            best, found = search.least.schedule, search.least.peak_bytes
        if search.best is None:
            refused = budget + 1
        if search.infeasible:
            proved = refused
    return LeastBudgetBracket(proved, found, best)


def _first_schedule(graph: Graph, budget_bytes: int, time_limit_s: float, should_stop: Callable[[], bool] | None) -> Search:
    """A search until there is a schedule, however slow, or the proof that there is none."""

    def enough() -> bool:
        return search.best is not None or (should_stop is not None and should_stop())

    search = Search(graph, budget_bytes, 1.0, time_limit_s, None, enough)
    run(search)
    return search
