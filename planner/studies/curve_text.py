"""A curve as text: a row per budget, and what is proved. Never imports torch."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from planner.graphs.units import format_bytes, format_enough, format_ratio, format_seconds
from planner.plans.record import describe_ending
from planner.settings.counted_memory import CountedMemory
from planner.show.views.text import format_table
from planner.solvers.result import Ending, Status
from planner.studies.tables import Column, build_lines

if TYPE_CHECKING:
    from planner.studies.curve import Curve, CurveRow
    from planner.studies.sizes import LargestSize

UNKNOWN = "-"
_OPEN = {Status.FEASIBLE: "not proved optimal", Status.LIMIT: "nothing found, nor proved infeasible"}
_ORDERS = "first executions in the orders of the ops that were tried"
PERCENT = "{:z.2%}"
SEARCH_CUT = "its search was cut short, and with more time may find less"
column = partial(Column, missing=UNKNOWN)


def list_reserved_columns(rows: "Sequence[CurveRow] | Sequence[LargestSize]", memory: CountedMemory | None) -> list[Column]:
    """Return the column of reserved bytes, if any row has them (on CUDA); `memory` None stands for the default there."""
    return (
        [column((memory or CountedMemory.RESERVED).taken, "reserved_bytes")]
        if any(row.reserved_bytes is not None for row in rows)
        else []
    )


def describe_curve(curve: "Curve") -> str:
    """Return the curve as text: a row per budget, and the least budget; for a graph with options, first without them."""
    if curve.without is None:
        return _describe_part(curve)
    parts = ("recomputing only", _describe_part(curve.without), "", f"with {', '.join(curve.options)}", _describe_part(curve))
    return "\n".join(parts)


def _describe_part(curve: "Curve") -> str:
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


def _describe_memory(curve: "Curve") -> list[str]:
    """Return the line on the kind of memory that budgets count; none if only allocated bytes can be counted."""
    if all(row.reserved_bytes is None for row in curve.rows) and curve.memory is CountedMemory.ALLOCATED:
        return []
    return [f"budgets count {curve.memory.said}, of which eager PyTorch takes {format_bytes(curve.eager_bytes)}"]


def _describe_least(curve: "Curve") -> list[str]:
    least = curve.least
    if least is None:
        return []
    if least.exact:
        return [f"least feasible budget: {format_enough(least.found_bytes)}, proved for {_ORDERS}"]
    proved, found = format_bytes(least.proved_bytes), format_enough(least.found_bytes)
    cut = f"; {SEARCH_CUT}" if least.stopped else ""
    return [f"least feasible budget: between {proved} (proved for {_ORDERS}) and {found}{cut}"]


def _describe_gaps(curve: "Curve") -> list[str]:
    """Return lines that list the budgets that are not solved to optimality, with the reasons."""
    lines = []
    for status, said in _OPEN.items():
        for ended in (None, *Ending):
            budgets = [format_enough(p.budget_bytes) for p in curve.points if (p.status, p.ended) == (status, ended)]
            why = f": {describe_ending(ended)}" if ended else ""
            lines += [f"{said}: {', '.join(budgets)}{why}"] if budgets else []
    short = any(point.status in _OPEN and point.ended in (None, Ending.LIMIT) for point in curve.points)
    return [*lines, *(["raise --total-time-limit or --time-limit (time_limit_s in Python) for these"] if short else [])]


def _describe_seconds(curve: "Curve") -> list[str]:
    lines = []
    if not curve.complete:
        lines.append("stopped before every budget was solved: the rest follows from those that were")
    elif any(point.seconds is None for point in curve.points):
        lines.append(f"seconds {UNKNOWN}: not solved, because the results at other budgets decide it")
    return [*lines, f"took {format_seconds(curve.seconds)} in all"]
