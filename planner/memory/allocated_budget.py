"""A solve for a budget of allocated bytes, by the settings: the solver, and the order of the ops. Never imports torch."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from planner.capture.options import order_as_executed
from planner.graphs.ir import Graph
from planner.graphs.reordering import Reordering, keep_program_order, permute
from planner.graphs.schedule import Schedule
from planner.graphs.simulate import simulate
from planner.memory.arena_rules import build_arena_rules
from planner.memory.reserved import is_on_cuda
from planner.settings.plan import PlanSettings
from planner.solvers.arena.solve import solve_in_arena
from planner.solvers.order.reorder import reorder_by
from planner.solvers.order.solve import OrderSearch, SolvedOrder, solve_in, solve_in_best_order, solve_reordered
from planner.solvers.registry import Solver, get_solver
from planner.solvers.request import Request
from planner.solvers.result import Result

# Other solvers are baselines: in program order, unless requested otherwise.
REORDERED = frozenset({"windows"})


def build_solver(settings: PlanSettings, graph: Graph) -> Callable[[Request], SolvedOrder]:
    """Return the function that solves requests for `graph` in the requested order of ops, or in the best of several orders.

    The order that is not to change is that of the request's start, if it has one. The schedules are as a step runs them.
    """
    return partial(_solve_in_order, settings, _choose_solver(settings, graph), OrderSearch())


def _solve_in_order(settings: PlanSettings, run: Solver, search: OrderSearch, request: Request) -> SolvedOrder:
    graph = request.graph
    as_executed = partial(map_schedule_to_step, graph, budget_bytes=request.budget_bytes)
    asked = request.map_to(graph, as_executed, lambda schedule: schedule)
    if settings.reorder:
        solved = solve_reordered(run, asked)
    elif settings.reorder is None and settings.solver in REORDERED:
        solved = solve_in_best_order(run, asked, search)
    else:
        start = asked.start if graph.plain else None
        order = keep_program_order(graph) if start is None else reorder_by(graph, start.schedule)
        solved = solve_in(order, run, asked)
    return replace(solved, result=map_result_to_step(graph, solved.result))


def map_result_to_step(graph: Graph, result: Result) -> Result:
    """Return `result` with its schedule as a step runs it, judged on `graph` if that is another schedule."""
    if result.schedule is None or (found := map_schedule_to_step(graph, result.schedule, result.budget_bytes)) is result.schedule:
        return result
    return replace(result, graph=graph, schedule=found)


def build_solver_in_order(order: Reordering, solver: str = "windows") -> Callable[[Request], SolvedOrder]:
    """Return the solve of a graph like the source of `order` with its ops in that order, for a budget of allocated bytes."""
    return lambda request: solve_in(permute(request.graph, order.original), get_solver(solver), request)


def _choose_solver(settings: PlanSettings, graph: Graph) -> Solver:
    """Return the solver, in an arena if the step runs in one; on CUDA that is part of what is reserved for a schedule."""
    run = get_solver(settings.solver)
    if not settings.arena or is_on_cuda(graph):
        return run
    return lambda request: solve_in_arena(run, request, build_arena_rules(request.graph))


def map_schedule_to_step(graph: Graph, schedule: Schedule, budget_bytes: int) -> Schedule:
    """Return `schedule` as a step runs it, if that fits a budget of allocated bytes."""
    if (found := order_as_executed(graph, schedule)) is schedule:
        return schedule
    return found if simulate(graph, found).peak_bytes <= budget_bytes else schedule
