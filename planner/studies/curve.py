"""Overhead against budget: a grid of budgets solved side by side, each answer used for all of them. Never imports torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from graphs.errors import BudgetError
from graphs.ir import Graph
from graphs.options import with_options
from graphs.plan import GraphSummary
from planner.choices import Choices
from planner.solving import budget_in_bytes, offered_to, order_for, summarize
from planner.studies.frontier import Frontier, Point, Turns, evenly
from planner.studies.jobs import run
from solvers.clock import WallClock
from solvers.least import LeastBudgetBracket, least_budget
from solvers.order.reorder import Reordering
from solvers.registry import get_solver
from solvers.request import Request
from solvers.result import Result, status_of
from solvers.tolerance import Tolerance

_LEAST_S = 30.0  # to spend at most on the least feasible budget, where the grid begins


@dataclass(frozen=True, slots=True)
class Curve:
    """Overhead against budget.

    Attributes:
        graph: what was planned.
        points: by budget, least first; times and bounds never rise from one to the next.
        least: what is known of the least feasible budget; None where the budgets were given.
        complete: False when it was stopped before every budget had its turn.
        reordered: whether schedules and bounds are those of another order of the ops than the program's.
        options: what the graph was given, by name.
        without: the same budgets without these, None where there are none.
    """

    graph: GraphSummary
    points: tuple[Point, ...]
    least: LeastBudgetBracket | None
    complete: bool
    reordered: bool
    options: tuple[str, ...] = ()
    without: "Curve | None" = None

    def overhead(self, time_s: float | None) -> float | None:
        """`time_s` as a fraction above the step without recomputation."""
        if time_s is None:
            return None
        return time_s / self.graph.time_s - 1 if self.graph.time_s else 0.0


@dataclass(frozen=True, slots=True)
class _Solve:
    """The job: what is solved at every budget, and how."""

    graph: Graph
    solver: str
    tolerance: float
    time_limit_s: float

    def __call__(self, budget_bytes: int, should_stop: Callable[[], bool]) -> Result:
        tolerance, clock = Tolerance.of(self.tolerance), WallClock(self.time_limit_s)
        return get_solver(self.solver)(Request(self.graph, budget_bytes, tolerance, clock, should_stop=should_stop))


def curve(
    graph: Graph,
    budgets: int | Sequence[str | int] = 10,
    *,
    jobs: int = 1,
    cluster: str | None = None,
    solver: str = "windows",
    tolerance: float = 1e-3,
    time_limit_s: float = 60.0,
    reorder: bool | None = None,
    choices: Choices | None = None,
    on_point: Callable[[int, int], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Curve:
    """Solve `graph` at several budgets.

    A schedule for one budget serves all larger ones, a bound at one holds at all smaller ones, and so
    does a proof that nothing fits; a budget that is settled by the others is not solved.

    Args:
        graph: what is planned.
        budgets: how many, evenly spaced from the least feasible one to the peak without recomputation;
            or the budgets themselves, in bytes or as text (``8GB``, ``60%`` of that peak).
        jobs: processes that solve at the same time. With more than one, the main module is imported in
            each: a script needs ``if __name__ == "__main__":``.
        cluster: address of a Dask scheduler, whose workers solve instead.
        solver: a name in ``solvers.registry``.
        tolerance: on the gap, relative to the whole step.
        time_limit_s: seconds for each budget.
        reorder: as in ``planner.solving.solve``.
        choices: that the graph is given. The budgets are solved without them, too; no schedule of that is better then.
        on_point: told how many budgets have had their turn, and of how many.
        should_stop: polled; once True, what is known so far is the answer.

    Raises:
        BudgetError: a budget cannot be read, or there is none.
        PlannerError: no such solver, or it takes no choices; options out of range, a solve failed, or what runs it was lost.
    """
    get_solver(solver)
    how = _How(jobs, cluster, solver, tolerance, time_limit_s, reorder, on_point, should_stop or (lambda: False))
    found = None if choices is None else _curve(offered_to(solver, graph, choices), budgets, how)
    graph = with_options(graph, ())
    if found is None or choices is None:
        return _curve(graph, budgets, how)
    again = tuple(point.budget_bytes for point in found.points)
    without = _curve(graph, again, how)
    if isinstance(budgets, int):
        order = order_for(graph, solver, reorder=reorder)
        least = _least_in(order, how)
        without = replace(without, least=replace(least, schedule=order.schedule_of_source(least.schedule)))
    points = tuple(_better(*pair, tolerance) for pair in zip(found.points, without.points, strict=True))
    return replace(found, points=points, options=choices.options, without=without)


@dataclass(frozen=True, slots=True)
class _How:
    """What ``curve`` was told, apart from the graph and the budgets."""

    jobs: int
    cluster: str | None
    solver: str
    tolerance: float
    time_limit_s: float
    reorder: bool | None
    on_point: Callable[[int, int], None] | None
    should_stop: Callable[[], bool]


def _curve(graph: Graph, budgets: int | Sequence[str | int], how: _How) -> Curve:
    """As ``curve``, of a graph with the choices that it has."""
    summary = summarize(graph)
    order = order_for(graph, how.solver, reorder=how.reorder)
    known = Frontier(order.graph, how.tolerance)
    least = None
    if isinstance(budgets, int):
        if budgets < 1:
            raise BudgetError(f"{budgets} budgets were asked for: must be at least 1")
        least = _least_in(order, how)
        known.learn_schedule(least.schedule)
        known.infeasible_bytes = least.proved_bytes - 1
        wanted = evenly(least.found_bytes, summary.store_all_peak_bytes, budgets)
    else:
        wanted = tuple(sorted({budget_in_bytes(budget, summary.store_all_peak_bytes) for budget in budgets}))
        if not wanted:
            raise BudgetError("there is no budget to solve for: name at least one")
    plan = Turns(known, wanted, how.on_point)
    job = _Solve(order.graph, how.solver, how.tolerance, how.time_limit_s)
    for result in run(job, plan.take, how.should_stop, jobs=how.jobs, cluster=how.cluster):
        plan.learn(result)
    points = tuple(_of_source(plan.point(budget), order) for budget in wanted)
    if least is not None:
        least = replace(least, schedule=order.schedule_of_source(least.schedule))
    return Curve(summary, points, least, plan.finished, order.changed)


def _least_in(order: Reordering, how: _How) -> LeastBudgetBracket:
    """What is known of the least budget, of the reordered graph."""
    return least_budget(order.graph, clock=WallClock(min(_LEAST_S, how.time_limit_s)), should_stop=how.should_stop)


def _better(point: Point, other: Point, tolerance: float) -> Point:
    """`point` with the schedule of `other`, which is one of fewer choices, if that is faster."""
    if other.time_s is None or point.bound_s is None or (point.time_s is not None and point.time_s <= other.time_s):
        return point
    status = status_of(other.time_s, point.bound_s, tolerance)
    return replace(point, status=status, schedule=other.schedule, peak_bytes=other.peak_bytes, time_s=other.time_s)


def _of_source(point: Point, order: Reordering) -> Point:
    """`point`, found on the reordered graph, with its schedule as one of the original graph."""
    return point if point.schedule is None else replace(point, schedule=order.schedule_of_source(point.schedule))
