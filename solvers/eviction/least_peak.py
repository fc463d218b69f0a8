"""The least peak that rules of eviction come to."""

import time
from collections.abc import Callable

from graphs.errors import ScheduleError
from graphs.ir import Graph
from graphs.schedule import Schedule, schedule_of
from graphs.simulate import simulate
from solvers.bounds import least_budget_bound
from solvers.eviction.engine import evicting_order
from solvers.eviction.rules import RULES, TIGHT_RULES

_PRECISION = 0.005  # of the peak


def least_evicting_schedule(
    graph: Graph, *, time_limit_s: float, should_stop: Callable[[], bool] | None = None, proved_bytes: int | None = None
) -> Schedule | None:
    """The schedule of least peak that some rule finds in time, or until `should_stop`; None if none finds any.

    It looks for none below `proved_bytes`, by default what single ops need (``solvers.bounds``).
    """
    until = time.monotonic() + time_limit_s

    def enough() -> bool:
        return time.monotonic() > until or (should_stop is not None and should_stop())

    bound = least_budget_bound(graph).budget_bytes if proved_bytes is None else proved_bytes
    best: Schedule | None = None
    least = simulate(graph, schedule_of(graph, range(len(graph.ops)))).peak_bytes
    for rule in (*RULES, *TIGHT_RULES):
        low = bound
        # Most rules end where the first did: ask of them whether they get any further, before how far.
        budget = (low + least) // 2 if best is None else int((1 - _PRECISION) * least)
        asked = best is not None
        while low < budget and least - low > _PRECISION * least and not enough():
            order = evicting_order(graph, budget, rule, should_stop=enough)
            schedule = None if order is None else schedule_of(graph, order)
            peak = None if schedule is None else _peak_bytes(graph, schedule)
            if peak is None or peak >= least:
                if asked:
                    break
                low = budget + 1
            else:
                best, least = schedule, peak
            asked = False
            budget = (low + least) // 2
    return best


def _peak_bytes(graph: Graph, schedule: Schedule) -> int | None:
    try:
        return simulate(graph, schedule).peak_bytes
    except ScheduleError:  # it reads what has been written over: eviction does not look at that
        return None
