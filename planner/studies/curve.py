"""Overhead against budget: a grid of budgets, solved in parallel, each result used for all of them. Never imports torch.

Known weakness: the whole curve is of one order of the ops; a schedule in another order is shown only where none in this order
fits.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from planner.capture.options import apply_options
from planner.graphs.errors import BudgetError, FormatError, OutputError
from planner.graphs.io.files import read_text
from planner.graphs.ir import Graph
from planner.graphs.units import format_bytes
from planner.memory.least_budget import LeastBudget, find_least_budget
from planner.memory.reserved import choose_memory, predict_eager_bytes
from planner.plans.record import GraphSummary
from planner.plans.select_attributes import select_attributes
from planner.plans.solve import order_for
from planner.plans.summary import summarize
from planner.settings.budget import read_budget
from planner.settings.counted_memory import CountedMemory
from planner.solvers.clock import Clock, WallClock, measure_rest
from planner.solvers.registry import get_solver
from planner.solvers.result import Status, decide_status
from planner.studies.budget_plots import plot_curve
from planner.studies.curve_text import describe_curve
from planner.studies.frontier import Frontier, Point, Turns, divide_evenly
from planner.studies.rows import declare_column, declare_key, declare_text, declare_value, read_rows
from planner.studies.settings import StudySettings
from planner.studies.workers import ignore, return_false

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ORDER_SHARE = 0.25  # share of the time for an order of the ops
_LEAST_SHARE = 0.25  # likewise, at most, for the least feasible budget, where the grid begins
_DEFAULTS = StudySettings()
_WITH_OPTIONS = 0.6  # share of the time with options; the same budgets are then solved without them


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveRow:
    """The result at one budget, as a row of the CSV that ``planner curve -o`` writes."""

    budget_bytes: int = declare_key("static memory included")
    memory: str = declare_column("what the budget counts, as in planner.settings.counted_memory")
    budget_share: float | None = declare_value("of what plain eager PyTorch takes of that memory")
    status: str = declare_column("as in planner.solvers.result")
    overhead: float | None = declare_value("of the fastest schedule that fits, over the step without recomputation")
    bound_overhead: float | None = declare_value("the same of bound_s")
    gap: float | None = declare_value("as in planner.solvers.result")
    time_s: float | None = declare_value("of the schedule, as peak_bytes")
    bound_s: float | None = declare_value("no schedule within the budget is faster")
    peak_bytes: int | None = declare_value()
    reserved_bytes: int | None = declare_value(
        "what PyTorch's allocator reserves for it on CUDA, by its model, as the budget counts it"
    )
    seconds: float | None = declare_value("of the solves at this budget; unknown where those at others settle it")
    ended: str = declare_text(
        "why there was no more search although no gap within the tolerance is proved, as in planner.solvers.result"
    )
    options: str = declare_text("that the graph offers, with commas")


@dataclass(frozen=True, slots=True)
class Curve:
    """Overhead against budget. ``print`` shows it as a table, ``plot`` as a figure.

    Attributes:
        memory: kind of memory that the budgets count.
        eager_bytes: bytes of that memory that plain eager PyTorch needs.
        points: results by budget, least first; times and bounds never increase.
        least: the least budget of the graph; None if budgets were given, and there is a schedule for each.
        complete: False if it was stopped before every budget had its turn.
        reordered: True if schedules and bounds are those of another order than the program's.
        options: names of the graph's options.
        without: the same budgets without options; None if there are none.
        name: the model, as the graph names it.
        seconds: duration of the whole analysis, with the search for an order and for the least budget.
    """

    graph: GraphSummary
    memory: CountedMemory
    eager_bytes: int
    points: tuple[Point, ...]
    least: LeastBudget | None
    complete: bool
    reordered: bool
    options: tuple[str, ...] = ()
    without: "Curve | None" = None
    name: str = ""
    seconds: float = 0.0

    def __repr__(self) -> str:
        return f"Curve({len(self.points)} budgets, eager PyTorch takes {format_bytes(self.eager_bytes)})"

    def __str__(self) -> str:
        return describe_curve(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def plot(self) -> "Figure":
        """Return a ``matplotlib.figure.Figure`` of overhead against budget, with the bound as a shaded area.

        Raises:
            PlannerError: matplotlib is not installed.
        """
        return plot_curve(self)

    def overhead(self, time_s: float | None) -> float | None:
        """Return `time_s` as an overhead over the step without recomputation; None if it is unknown."""
        return self.graph.compute_overhead(time_s)

    @property
    def rows(self) -> tuple[CurveRow, ...]:
        """A row for each point."""
        return tuple(
            CurveRow(
                **select_attributes(point, "budget_bytes", "gap", "time_s", "bound_s", "peak_bytes", "reserved_bytes", "seconds"),
                memory=str(self.memory),
                budget_share=point.budget_bytes / self.eager_bytes if self.eager_bytes else None,
                status=str(point.status),
                overhead=self.overhead(point.time_s),
                bound_overhead=self.overhead(point.bound_s),
                ended=str(point.ended or ""),
                options=",".join(self.options),
            )
            for point in self.points
        )

    @property
    def all_rows(self) -> tuple[CurveRow, ...]:
        """The rows without options, if the graph has some, then those with them."""
        return (*(() if self.without is None else self.without.rows), *self.rows)


def read_curve(path: Path) -> tuple[CurveRow, ...]:
    """Return the rows that ``planner curve -o`` wrote to `path`, in order of options and budget.

    Raises:
        FormatError: there is no such file, or it is no curve, or one without rows.
    """
    read_text(path)  # which names a missing file, where there would be no rows
    rows: list[CurveRow] = []
    with suppress(OutputError):
        rows = read_rows(path, CurveRow)
    if not rows:
        raise FormatError(f"{path} holds no points of a curve: planner curve model.json -o curve.csv writes one")
    return tuple(sorted(rows, key=lambda row: (row.options, row.budget_bytes)))


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
        name=str(graph.provenance.get("model", "")),
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
