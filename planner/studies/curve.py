"""Overhead against budget: a grid of budgets solved side by side, each answer used for all of them. Never imports torch."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from graphs.errors import BudgetError, PlannerError
from graphs.ir import Graph
from graphs.plan import GraphSummary, relative_gap
from graphs.schedule import Schedule
from graphs.simulate import simulate
from planner.solving import budget_in_bytes, order_for, summarize
from planner.studies.jobs import run
from solvers.clock import WallClock
from solvers.least import LeastBudgetBracket, least_budget
from solvers.order.reorder import Reordering
from solvers.policies.store_all import store_all
from solvers.registry import get_solver
from solvers.request import Request
from solvers.result import Result, Status, status_of
from solvers.tolerance import Tolerance

_LEAST_S = 30.0  # to spend at most on the least feasible budget, where the grid begins
_ANY_BUDGET = math.inf  # a bound found here holds everywhere


@dataclass(frozen=True, slots=True)
class Point:
    """What is known at one budget. What is unknown is None.

    Attributes:
        budget_bytes: static bytes included.
        status: as in ``solvers.result.Status``.
        schedule: the fastest that is known to fit; it may have been found for another budget.
        peak_bytes, time_s: of the schedule.
        bound_s: no schedule (of the class the solver searches) within the budget is faster.
        seconds: of the solve at this budget; None where the answers at others were enough, or none was begun.
    """

    budget_bytes: int
    status: Status
    schedule: Schedule | None
    peak_bytes: int | None
    time_s: float | None
    bound_s: float | None
    seconds: float | None

    @property
    def gap(self) -> float | None:
        """As in ``Result.gap``."""
        return relative_gap(self.time_s, self.bound_s)


@dataclass(frozen=True, slots=True)
class Curve:
    """Overhead against budget.

    Attributes:
        graph: what was planned.
        points: by budget, least first; times and bounds never rise from one to the next.
        least: what is known of the least feasible budget; None where the budgets were given.
        complete: False when it was stopped before every budget had its turn.
        reordered: whether schedules and bounds are those of another order of the ops than the program's.
    """

    graph: GraphSummary
    points: tuple[Point, ...]
    least: LeastBudgetBracket | None
    complete: bool
    reordered: bool

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
        on_point: told how many budgets have had their turn, and of how many.
        should_stop: polled; once True, what is known so far is the answer.

    Raises:
        BudgetError: a budget cannot be read, or there is none.
        PlannerError: no such solver, options out of range, a solve failed, or what runs it was lost.
    """
    get_solver(solver)
    summary = summarize(graph)
    order = order_for(graph, solver, reorder=reorder)
    known = _Frontier(order.graph, tolerance)
    least = None
    if isinstance(budgets, int):
        if budgets < 1:
            raise BudgetError(f"{budgets} budgets were asked for: must be at least 1")
        least = least_budget(order.graph, clock=WallClock(min(_LEAST_S, time_limit_s)), should_stop=should_stop)
        known.learn_schedule(least.schedule)
        known.infeasible_bytes = least.proved_bytes - 1
        wanted = evenly(least.found_bytes, summary.store_all_peak_bytes, budgets)
    else:
        wanted = tuple(sorted({budget_in_bytes(budget, summary.store_all_peak_bytes) for budget in budgets}))
        if not wanted:
            raise BudgetError("there is no budget to solve for: name at least one")
    plan = _Turns(known, wanted, on_point)
    job = _Solve(order.graph, solver, tolerance, time_limit_s)
    for result in run(job, plan.take, should_stop or (lambda: False), jobs=jobs, cluster=cluster):
        plan.learn(result)
    points = tuple(_of_source(plan.point(budget), order) for budget in wanted)
    if least is not None:
        least = replace(least, schedule=order.schedule_of_source(least.schedule))
    return Curve(summary, points, least, plan.finished, order.changed)


def _of_source(point: Point, order: Reordering) -> Point:
    """`point`, found on the reordered graph, with its schedule as one of the original graph."""
    return point if point.schedule is None else replace(point, schedule=order.schedule_of_source(point.schedule))


def evenly(low_bytes: int, high_bytes: int, count: int) -> tuple[int, ...]:
    """`count` (1 or more) whole budgets from `low_bytes` to `high_bytes`, both included; fewer where they coincide."""
    if count == 1:
        return (low_bytes,)
    width = high_bytes - low_bytes
    return tuple(sorted({low_bytes + width * i // (count - 1) for i in range(count)}))


def outside_in(count: int) -> Iterator[int]:
    """0 .. `count` - 1: both ends, then always the middle of what is between two that were named."""
    if count < 1:
        return
    yield count - 1
    if count > 1:
        yield 0
    gaps = [(0, count - 1)]
    for low, high in gaps:
        middle = (low + high) // 2
        if low < middle < high:
            yield middle
            gaps += [(middle, high), (low, middle)]


class _Frontier:
    """All that is known of a graph, whatever the budget it was found at."""

    def __init__(self, graph: Graph, tolerance: float) -> None:
        self.graph = graph
        self.tolerance = tolerance
        self.infeasible_bytes = -1  # nothing fits into this much
        self.bounds: list[tuple[float, float]] = [(_ANY_BUDGET, graph.time_s)]
        self.schedules: list[tuple[float, int, Schedule]] = []
        self.learn_schedule(store_all(graph))

    def learn_schedule(self, schedule: Schedule) -> None:
        simulation = simulate(self.graph, schedule)
        self.schedules.append((simulation.time_s, simulation.peak_bytes, schedule))

    def learn(self, result: Result) -> None:
        if result.status is Status.ERROR:
            raise PlannerError(f"the solver {result.solver} failed: {result.message}")
        if result.status is Status.INFEASIBLE:
            self.infeasible_bytes = max(self.infeasible_bytes, result.budget_bytes)
        if result.bound_s is not None:
            self.bounds.append((result.budget_bytes, result.bound_s))
        if result.schedule is not None:
            self.learn_schedule(result.schedule)

    def point(self, budget_bytes: int, seconds: float | None) -> Point:
        if budget_bytes <= self.infeasible_bytes:
            return Point(budget_bytes, Status.INFEASIBLE, None, None, None, None, seconds)
        bound_s = max(bound_s for at, bound_s in self.bounds if at >= budget_bytes)
        fitting = [found for found in self.schedules if found[1] <= budget_bytes]
        if not fitting:
            return Point(budget_bytes, Status.LIMIT, None, None, None, bound_s, seconds)
        time_s, peak_bytes, schedule = min(fitting, key=lambda found: found[:2])
        return Point(budget_bytes, status_of(time_s, bound_s, self.tolerance), schedule, peak_bytes, time_s, bound_s, seconds)


class _Turns:
    """Which budget is solved next, and what has come of those before."""

    def __init__(self, known: _Frontier, budgets: tuple[int, ...], on_point: Callable[[int, int], None] | None) -> None:
        self.known = known
        self.waiting = [budgets[i] for i in outside_in(len(budgets))]
        self.count = len(budgets)
        self.seconds: dict[int, float] = {}
        self.solving = 0
        self._on_point = on_point

    @property
    def finished(self) -> bool:
        """Whether every budget has had its turn, or needs none."""
        self._drop_settled()
        return not self.waiting and not self.solving

    def take(self) -> int | None:
        """The next budget to solve; None when there is none left."""
        self._drop_settled()
        self._tell()
        if not self.waiting:
            return None
        self.solving += 1
        return self.waiting.pop(0)

    def learn(self, result: Result) -> None:
        self.solving -= 1
        self.seconds[result.budget_bytes] = result.seconds
        self.known.learn(result)

    def point(self, budget_bytes: int) -> Point:
        return self.known.point(budget_bytes, self.seconds.get(budget_bytes))

    def _drop_settled(self) -> None:
        settled = (Status.OPTIMAL, Status.INFEASIBLE)
        self.waiting = [budget for budget in self.waiting if self.point(budget).status not in settled]

    def _tell(self) -> None:
        if self._on_point is not None:
            self._on_point(self.count - len(self.waiting) - self.solving, self.count)
