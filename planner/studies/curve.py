"""A curve of overhead against budget: its rows, text and figure. Never imports torch."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from planner.graphs.errors import FormatError, OutputError
from planner.graphs.io.files import read_text
from planner.graphs.units import format_bytes, format_enough, format_ratio, format_seconds
from planner.memory.least_budget import LeastBudget
from planner.plans.record import GraphSummary, describe_ending
from planner.plans.select_attributes import select_attributes
from planner.settings.counted_memory import CountedMemory
from planner.show.views.figures import COLORS, add_legend, choose_size_unit, create_figure, scale_y_axis, set_title
from planner.show.views.text import format_table
from planner.solvers.result import Ending, Status
from planner.studies.frontier import Point
from planner.studies.rows import declare_column, declare_key, declare_text, declare_value, read_rows
from planner.studies.sizes import LargestSize
from planner.studies.tables import Column, build_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNKNOWN = "-"
_OPEN = {Status.FEASIBLE: "not proved optimal", Status.LIMIT: "nothing found, nor proved infeasible"}
_ORDERS = "first executions in the orders of the ops that were tried"
PERCENT = "{:z.2%}"
SEARCH_CUT = "its search was cut short, and with more time may find less"
column = partial(Column, missing=UNKNOWN)


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
        figure = create_figure()
        axes = figure.add_subplot()
        parts = (self,) if self.without is None else (self.without, self)
        scale, unit = choose_size_unit(max(p.budget_bytes for part in parts for p in part.points))
        for part, color in zip(parts, (COLORS["ours"], COLORS["blocks"]), strict=False):
            bounded = [(p.budget_bytes / scale, 100 * o) for p in part.points if (o := part.overhead(p.bound_s)) is not None]
            solved = [(p.budget_bytes / scale, 100 * o) for p in part.points if (o := part.overhead(p.time_s)) is not None]
            kind = f" with {', '.join(part.options)}" if part.options else ""
            if bounded:
                xs, ys = zip(*bounded, strict=True)
                # A bound holds at all smaller budgets: between two points, that of the larger one holds.
                label = f"proved impossible in this order{kind}"
                axes.fill_between(xs, ys, step="pre", color=color if part.options else "0.6", alpha=0.3, linewidth=0, label=label)
            if solved:
                xs, ys = zip(*solved, strict=True)
                # A schedule fits all larger budgets: between two points, that of the smaller one holds.
                axes.step(xs, ys, where="post", color=color, marker="o", markersize=5, linewidth=2, label=f"remat-planner{kind}")
        for i, budget in enumerate(p.budget_bytes / scale for p in self.points if p.status == "infeasible"):
            axes.axvline(budget, color=COLORS["budget"], linestyle=":", linewidth=1.2, label=None if i else "infeasible")
        axes.set(xlabel=f"budget ({self.memory}) in {unit}", ylabel="overhead in %")
        axes.margins(x=0.02)
        scale_y_axis(axes, [100 * o for part in parts for p in part.points if (o := part.overhead(p.time_s)) is not None])
        set_title(axes, self.name)
        add_legend(figure, axes)
        return figure

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


def list_reserved_columns(rows: Sequence[CurveRow] | Sequence[LargestSize], memory: CountedMemory | None) -> list[Column]:
    """Return the column of reserved bytes, if any row has them (on CUDA); `memory` None stands for the default there."""
    return (
        [column((memory or CountedMemory.RESERVED).taken, "reserved_bytes")]
        if any(row.reserved_bytes is not None for row in rows)
        else []
    )


def describe_curve(curve: Curve) -> str:
    """Return the curve as text: a row per budget, and the least budget; for a graph with options, first without them."""
    if curve.without is None:
        return _describe_part(curve)
    parts = ("recomputing only", _describe_part(curve.without), "", f"with {', '.join(curve.options)}", _describe_part(curve))
    return "\n".join(parts)


def _describe_part(curve: Curve) -> str:
    columns: list[Column | str] = [
        Column("budget", "budget_bytes", format_enough),
        column("% of eager", "budget_share", format_ratio),
        column("overhead", form=PERCENT),
        column("bound", "bound_overhead", PERCENT),
        column("gap", form=PERCENT),
        *list_reserved_columns(curve.rows, curve.memory),
        column("seconds", form="{:.2f}"),
        "status",
    ]
    header, *rows = build_lines(curve.rows, columns)
    said = (*_describe_memory(curve), *_describe_least(curve), *_describe_gaps(curve), *_describe_seconds(curve))
    return "\n".join((format_table(header, rows, numbers=len(header) - 1), *said))


def _describe_memory(curve: Curve) -> list[str]:
    """Return the line on the kind of memory that budgets count; none if only allocated bytes can be counted."""
    if all(row.reserved_bytes is None for row in curve.rows) and curve.memory is CountedMemory.ALLOCATED:
        return []
    return [f"budgets count {curve.memory.said}, of which eager PyTorch takes {format_bytes(curve.eager_bytes)}"]


def _describe_least(curve: Curve) -> list[str]:
    least = curve.least
    if least is None:
        return []
    if least.exact:
        return [f"least feasible budget: {format_enough(least.found_bytes)}, proved for {_ORDERS}"]
    proved, found = format_bytes(least.proved_bytes), format_enough(least.found_bytes)
    cut = f"; {SEARCH_CUT}" if least.stopped else ""
    return [f"least feasible budget: between {proved} (proved for {_ORDERS}) and {found}{cut}"]


def _describe_gaps(curve: Curve) -> list[str]:
    """Return lines that list the budgets that are not solved to optimality, with the reasons."""
    lines = []
    for status, said in _OPEN.items():
        for ended in (None, *Ending):
            budgets = [format_enough(p.budget_bytes) for p in curve.points if (p.status, p.ended) == (status, ended)]
            why = f": {describe_ending(ended)}" if ended else ""
            lines += [f"{said}: {', '.join(budgets)}{why}"] if budgets else []
    short = any(point.status in _OPEN and point.ended in (None, Ending.LIMIT) for point in curve.points)
    return [*lines, *(["raise --total-time-limit or --time-limit (time_limit_s in Python) for these"] if short else [])]


def _describe_seconds(curve: Curve) -> list[str]:
    lines = []
    if not curve.complete:
        lines.append("stopped before every budget was solved: the rest follows from those that were")
    elif any(point.seconds is None for point in curve.points):
        lines.append(f"seconds {UNKNOWN}: not solved, because the results at other budgets decide it")
    return [*lines, f"took {format_seconds(curve.seconds)} in all"]
