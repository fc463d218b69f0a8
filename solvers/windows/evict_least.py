"""The least peak that rules of eviction come to."""

from collections.abc import Callable

from graphs.errors import ScheduleError
from graphs.ir import Graph
from graphs.schedule import Schedule, schedule_of
from graphs.simulate import simulate
from solvers.bounds import least_budget_bound
from solvers.windows.evict import RULES, TIGHT_RULES, evicting_order


def least_evicting_schedule(graph: Graph, *, should_stop: Callable[[], bool] | None = None) -> Schedule | None:
    """The schedule of least peak that some rule finds until `should_stop`; None if none finds any."""
    best: Schedule | None = None
    least = simulate(graph, schedule_of(graph, range(len(graph.ops)))).peak_bytes
    for rule in (*RULES, *TIGHT_RULES):
        low = least_budget_bound(graph).budget_bytes
        while least - low > 0.005 * least:
            budget = (low + least) // 2
            order = evicting_order(graph, budget, rule, should_stop=should_stop)
            schedule = None if order is None else schedule_of(graph, order)
            peak = None if schedule is None else _peak_bytes(graph, schedule)
            if peak is None or peak >= least:
                low = budget + 1
            else:
                best, least = schedule, peak
    return best


def _peak_bytes(graph: Graph, schedule: Schedule) -> int | None:
    try:
        return simulate(graph, schedule).peak_bytes
    except ScheduleError:  # it reads what has been written over: eviction does not look at that
        return None
