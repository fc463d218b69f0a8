"""The least peak that rules of eviction come to where ops that take less memory stand for others."""

from collections.abc import Callable

from graphs.ir import Graph
from graphs.schedule import Schedule
from solvers.clock import Clock
from solvers.eviction.least_peak import least_evicting_schedule
from solvers.problem import problem_of
from solvers.windows.formulation.granularity import Discretization
from solvers.windows.heuristics.commitments import lean_stand_ins
from solvers.windows.solution.decode import decoded, late_writers, try_out
from solvers.windows.solution.expand import Choice
from solvers.windows.solution.plain import plain_graph


def least_instead(graph: Graph, clock: Clock, *, should_stop: Callable[[], bool] | None = None) -> Schedule | None:
    """A schedule of `graph`, which has no round trips, with the leanest op in place of others wherever one can be.

    None if no op can stand for others.
    """
    problem = problem_of(graph, graph.static_bytes)
    instead = lean_stand_ins(problem)
    if not instead:
        return None
    choice = Choice((frozenset(),), (frozenset(), frozenset()), instead=instead)
    order = decoded(problem, Discretization((problem.ops - 1,), places=problem.places.last), choice)
    if late_writers(problem, order):
        return None
    plain = plain_graph(problem, order.computed)
    found = least_evicting_schedule(plain.graph, clock, should_stop=should_stop)
    return try_out(problem, order).schedule if found is None else plain.schedule_of_whole(problem, found)
