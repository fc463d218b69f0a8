"""Overhead against budget: a grid of budgets, solved in parallel, each result used for all of them. Never imports torch.

Known weakness: the whole curve is of one order of the ops; a schedule in another order is shown only where none in this order
fits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from planner.capture.options import apply_options
from planner.graphs.errors import BudgetError
from planner.graphs.ir import Graph
from planner.memory.least_budget import LeastBudget, find_least_budget
from planner.memory.reserved import choose_memory, predict_eager_bytes
from planner.plans.select_attributes import select_attributes
from planner.plans.solve import order_for
from planner.plans.summary import summarize
from planner.settings.budget import read_budget
from planner.solvers.clock import Clock, WallClock, measure_rest
from planner.solvers.registry import get_solver
from planner.solvers.result import Status, decide_status
from planner.studies.curve import Curve
from planner.studies.frontier import Frontier, Point, Turns, divide_evenly
from planner.studies.settings import StudySettings
from planner.studies.workers import ignore, return_false

if TYPE_CHECKING:
    pass

_ORDER_SHARE = 0.25  # share of the time for an order of the ops
_LEAST_SHARE = 0.25  # likewise, at most, for the least feasible budget, where the grid begins
_DEFAULTS = StudySettings()
_WITH_OPTIONS = 0.6  # share of the time with options; the same budgets are then solved without them


def solve_curve(
    graph: Graph,
    budgets: int | Sequence[str | int] = 10,
    settings: StudySettings = _DEFAULTS,
    *,
    solver: str = "windows",
    reorder: bool | None = None,
    on_activity: Callable[[str], object] = ignore,
    should_stop: Callable[[], bool] = return_false,
) -> Curve:
    """Solve `graph` at several budgets.

    A schedule for one budget serves all larger ones, a bound at one holds at all smaller ones, and so
    does a proof that nothing fits; a budget that is settled by the others is not solved.

    Args:
        budgets: number of budgets, evenly spaced from the least feasible one to the bytes of plain eager PyTorch; or the budgets
            themselves, in bytes or as text (``8GB``, ``60%`` of the latter).
        settings: settings of all solves, with time limits for each budget and for all. Every budget is solved for a short time
            first, and those with a gap again for longer, until the time is over. With options, the budgets are solved without
            them too, and the better schedule counts.
        solver: a name in ``planner.solvers.registry``.
        reorder: True: in the best order of the ops that is found; False: in program order; None: with the solver ``windows`` in
            the best order if its peak is lower. All budgets are solved in the same order.
        should_stop: polled; once True, the results so far are returned.

    Raises:
        BudgetError: a budget cannot be read, or there is none.
        PlannerError: no such solver, or it takes no options; settings out of range, a solve failed, or its process was lost.
    """
    get_solver(solver)
    clock, options = WallClock(settings.total_time_limit_s), settings.options
    how = _How(settings, solver, reorder, on_activity, should_stop)
    program = apply_options(graph, ())
    options.check_solver(solver)
    if not options.names:
        return _solve_curve(program, budgets, how, clock)
    found = _solve_curve(options.apply(graph), budgets, how, clock.start_part(_WITH_OPTIONS * clock.limit))
    again = tuple(point.budget_bytes for point in found.points)
    without = _solve_curve(program, again, how, clock.start_part(measure_rest(clock)), finds_least=isinstance(budgets, int))
    points = tuple(_choose_better(*pair, settings.tolerance) for pair in zip(found.points, without.points, strict=True))
    return replace(found, points=points, options=options.names, without=without, seconds=clock.seconds)


@dataclass(frozen=True, slots=True)
class _How:
    """The arguments of ``solve_curve``, except the graph and the budgets."""

    settings: StudySettings
    solver: str
    reorder: bool | None
    on_activity: Callable[[str], object]
    should_stop: Callable[[], bool]


def _solve_curve(
    graph: Graph, budgets: int | Sequence[str | int], how: _How, clock: Clock, *, finds_least: bool = False
) -> Curve:
    """Return the curve of a graph whose options are applied already; see ``solve_curve``.

    Args:
        finds_least: True to look for the least feasible budget where budgets are given, too.
    """
    memory = choose_memory(graph, how.settings.memory)
    whole_bytes = predict_eager_bytes(graph, memory)
    how.on_activity("looking for an order of the ops that needs less memory")
    order = order_for(graph, how.solver, reorder=how.reorder, clock=clock.start_part(_ORDER_SHARE * clock.limit))
    known = Frontier(order, how.settings.tolerance, memory)
    least: LeastBudget | None = None
    if isinstance(budgets, int):
        if budgets < 1:
            raise BudgetError(f"{budgets} budgets were asked for: must be at least 1")
        least = _find_least(known, how, clock.start_part(_LEAST_SHARE * clock.limit))
        wanted = divide_evenly(least.found_bytes, max(least.found_bytes, whole_bytes), budgets)
    else:
        wanted = tuple(sorted({read_budget(budget).resolve(whole_bytes) for budget in budgets}))
        if not wanted:
            raise BudgetError("there is no budget to solve for: name at least one")
        if finds_least:
            least = _find_least(known, how, clock.start_part(_LEAST_SHARE * clock.limit))
    plan = Turns(
        known, wanted, clock=clock, time_limit_s=how.settings.time_limit_s, jobs=how.settings.jobs, on_activity=how.on_activity
    )
    plan.run(how.should_stop, solver=how.solver, cluster=how.settings.cluster)
    points, finished = tuple(map(plan.get_point, wanted)), plan.finished
    if least is None and any(point.schedule is None for point in points):
        least = _find_least(known, how, clock.start_part(measure_rest(clock)))
    return Curve(
        summarize(graph),
        memory,
        whole_bytes,
        points,
        least,
        finished,
        order.changed,
        name=graph.provenance.model,
        seconds=clock.seconds,
    )


def _find_least(known: Frontier, how: _How, clock: Clock) -> LeastBudget:
    """Return the least budget of the graph that is found before the limit, and add its schedule to what is known."""
    how.on_activity("looking for the least feasible budget")
    graph, reorders = known.order.source, how.reorder is not False
    least = find_least_budget(
        graph, known.memory, reorders=reorders, should_stop=lambda: measure_rest(clock) <= 0 or how.should_stop()
    )
    known.learn_least(least)
    return least


def _choose_better(point: Point, other: Point, tolerance: float) -> Point:
    """Return `point` with the schedule of `other`, which uses fewer options, if that is faster."""
    if other.time_s is None or point.bound_s is None or (point.time_s is not None and point.time_s <= other.time_s):
        return point
    status = decide_status(other.time_s, point.bound_s, tolerance)
    ended = point.ended if status is Status.FEASIBLE else None
    better = select_attributes(other, "schedule", "peak_bytes", "time_s", "reserved_bytes")
    return replace(point, status=status, ended=ended, **better)
