"""The least peak that eviction rules reach."""

from collections.abc import Callable
from functools import partial

from planner.graphs.errors import ScheduleError
from planner.graphs.ir import Graph
from planner.graphs.schedule import Schedule, schedule_of
from planner.graphs.simulate import simulate
from planner.solvers.bounds import bound_least_budget
from planner.solvers.clock import Clock, poll
from planner.solvers.eviction.engine import WORK_PER_EVICTION, find_evicting_order
from planner.solvers.eviction.rules import RULES, TIGHT_RULES, EvictionSettings
from planner.solvers.problem import build_problem

_PRECISION = 0.005  # of the peak


def find_least_evicting_schedule(
    graph: Graph, clock: Clock, *, should_stop: Callable[[], bool] | None = None, proved_bytes: int | None = None
) -> Schedule | None:
    """Return the schedule of least peak that a rule finds before the clock's limit or `should_stop`; None if there is none.

    The search stops at `proved_bytes`, by default the bound of ``planner.solvers.bounds``.
    """
    has_ended = partial(poll, clock, WORK_PER_EVICTION, should_stop)
    problem = build_problem(graph, graph.static_bytes)
    bound = bound_least_budget(graph).budget_bytes if proved_bytes is None else proved_bytes
    best: Schedule | None = None
    least = simulate(graph, schedule_of(graph, range(len(graph.ops)))).peak_bytes
    for rule in (*RULES, *TIGHT_RULES):
        low = bound
        # Most rules end where the first did: ask first if they get any further, then how far.
        budget = (low + least) // 2 if best is None else int((1 - _PRECISION) * least)
        asked = best is not None
        while low < budget and least - low > _PRECISION * least and not has_ended():
            settings = EvictionSettings(capacity_bytes=budget - graph.static_bytes, should_stop=has_ended)
            order = find_evicting_order(problem, rule, settings)
            schedule = None if order is None else schedule_of(graph, order.computed)
            peak = None if schedule is None else _compute_peak_bytes(graph, schedule)
            if peak is None or peak >= least:
                if asked:
                    break
                low = budget + 1
            else:
                best, least = schedule, peak
            asked = False
            budget = (low + least) // 2
    return best


def _compute_peak_bytes(graph: Graph, schedule: Schedule) -> int | None:
    try:
        return simulate(graph, schedule).peak_bytes
    except ScheduleError:  # it reads an overwritten tensor: eviction ignores overwriting
        return None
