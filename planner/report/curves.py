"""Output of ``planner curve`` and ``planner max-batch``: text and plain data."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from graphs.units import format_bytes, format_enough, format_ratio
from planner.attributes import attributes
from planner.memory import CountedMemory
from planner.studies.curve import Curve, CurveRow
from planner.studies.sizes import LargestSize, Wanted
from planner.studies.tables import Column, lines
from planner.views.text import table
from planner.visible import visible
from solvers.result import Status

_UNKNOWN = "-"
_PERCENT = "{:z.2%}"
_column = partial(Column, missing=_UNKNOWN)


def reserved_column(rows: Sequence[CurveRow] | Sequence[LargestSize], memory: CountedMemory | None) -> list[Column]:
    """Return the column of reserved bytes, if any row has them (on CUDA); `memory` None stands for the default there."""
    return (
        [_column((memory or CountedMemory.RESERVED).taken, "reserved_bytes")]
        if any(row.reserved_bytes is not None for row in rows)
        else []
    )


def curve_text(curve: Curve) -> str:
    """Return the curve as text: a row per budget, and the least budget; for a graph with options, first without them."""
    if curve.without is None:
        return _part_text(curve)
    parts = ("recomputing only", _part_text(curve.without), "", f"with {', '.join(curve.options)}", _part_text(curve))
    return "\n".join(parts)


def _part_text(curve: Curve) -> str:
    columns: list[Column | str] = [
        Column("budget", "budget_bytes"),
        _column("% of eager", "budget_share", format_ratio),
        _column("overhead", form=_PERCENT),
        _column("bound", "bound_overhead", _PERCENT),
        _column("gap", form=_PERCENT),
        *reserved_column(curve.rows, curve.memory),
        _column("seconds", form="{:.2f}"),
        "status",
    ]
    header, *rows = lines(curve.rows, columns)
    said = (*_memory_line(curve), *_least_line(curve), *_gaps_line(curve), *_seconds_line(curve))
    return "\n".join((table(header, rows, numbers=len(header) - 1), *said))


def curve_data(curve: Curve) -> dict[str, object]:
    """Return the curve as plain data, without schedules."""
    least = curve.least
    return {
        "holds": "curve",
        "complete": curve.complete,
        "reordered": curve.reordered,
        "fingerprint": curve.graph.fingerprint,
        "keep_everything_peak_bytes": curve.graph.keep_everything_peak_bytes,
        "keep_everything_time_s": curve.graph.time_s,
        "memory": str(curve.memory),
        "eager_bytes": curve.eager_bytes,
        "least_budget_proved_bytes": None if least is None else least.proved_bytes,
        "least_budget_found_bytes": None if least is None else least.found_bytes,
        "points": [{name: cell for name, cell in asdict(row).items() if name != "options"} for row in curve.rows],
        "options": list(curve.options),
        "without_options": None if curve.without is None else curve_data(curve.without),
    }


def _memory_line(curve: Curve) -> list[str]:
    """Return the line on the kind of memory that budgets count; none if only allocated bytes can be counted."""
    if all(row.reserved_bytes is None for row in curve.rows) and curve.memory is CountedMemory.ALLOCATED:
        return []
    return [f"budgets count {curve.memory.said}, of which eager PyTorch takes {format_bytes(curve.eager_bytes)}"]


def _least_line(curve: Curve) -> list[str]:
    least = curve.least
    if least is None:
        return []
    order = "the order that was found for the ops" if curve.reordered else "program order"
    if least.exact:
        return [f"least feasible budget: {format_enough(least.found_bytes)}, proved for first executions in {order}"]
    proved, found = format_bytes(least.proved_bytes), format_enough(least.found_bytes)
    return [f"least feasible budget: between {proved} (proved for first executions in {order}) and {found}"]


def _gaps_line(curve: Curve) -> list[str]:
    """Return lines that list the budgets that are not solved to optimality."""
    feasible = [format_bytes(point.budget_bytes) for point in curve.points if point.status is Status.FEASIBLE]
    nothing = [format_bytes(point.budget_bytes) for point in curve.points if point.status is Status.LIMIT]
    lines = [f"not proved optimal: {', '.join(feasible)}"] if feasible else []
    lines += [f"nothing found, nor proved infeasible: {', '.join(nothing)}"] if nothing else []
    return [*lines, "raise --total-time-limit or --time-limit for these"] if lines else []


def _seconds_line(curve: Curve) -> list[str]:
    lines = []
    if not curve.complete:
        lines.append("stopped before every budget was solved: the rest follows from those that were")
    elif any(point.seconds is None for point in curve.points):
        lines.append(f"seconds {_UNKNOWN}: not solved, because the results at other budgets decide it")
    return lines


def max_batch_text(answers: Sequence[LargestSize], wanted: Wanted) -> str:
    """Return the largest size of each method as text, with notes on what was not decided."""
    columns: list[Column | str] = [
        "method",
        Column(visible(wanted.varies), "size", "{:,}", missing="none"),
        _column("overhead", form=_PERCENT),
        _column("peak", "peak_bytes"),
        *reserved_column(answers, wanted.memory),
        _column("step time", "time_s"),
    ]
    header, *rows = lines(answers, columns)
    on_cuda = wanted.memory is not None and any(answer.reserved_bytes is not None for answer in answers)
    counted = f" of {wanted.memory.said}" if on_cuda and wanted.memory is not None else ""
    cap = "" if wanted.max_overhead is None else f" and an overhead of at most {format_ratio(wanted.max_overhead)}"
    return "\n".join(
        (
            f"largest {visible(wanted.varies)} within {format_bytes(wanted.budget_bytes)}{counted}{cap}",
            table(header, rows, numbers=0),
            *(f"{answer.method}: {remark}" for answer in answers for remark in _remarks(answer, wanted)),
        )
    )


_OF_METHOD = (
    *("method", "size", "overhead", "peak_bytes", "reserved_bytes", "time_s", "gap"),
    *("at_limit", "undecided", "complete", "extrapolated"),
)


def max_batch_data(answers: Sequence[LargestSize], wanted: Wanted) -> dict[str, object]:
    """Return the largest size of each method as plain data."""
    return {
        "holds": "max-batch",
        "budget_bytes": wanted.budget_bytes,
        "memory": wanted.memory,
        "max_overhead": wanted.max_overhead,
        "limit": wanted.limit * wanted.unit,
        "varies": wanted.varies,
        "multiple_of": wanted.unit,
        **wanted.options.as_json,
        "methods": [attributes(answer, *_OF_METHOD) for answer in answers],
    }


def _remarks(answer: LargestSize, wanted: Wanted) -> list[str]:
    remarks = []
    if not answer.complete:
        remarks.append("stopped: larger ones may fit")
    if answer.at_limit:
        remarks.append("the largest that was tried: raise --limit")
    if answer.undecided is not None and answer.complete:
        remarks.append(
            f"not decided in time at {wanted.named(answer.undecided // wanted.unit)}, treated as too large: raise the time limit"
        )
    if answer.extrapolated:
        remarks.append("its sizes and times were extrapolated from smaller ones: there was not enough memory to measure them")
    if answer.size is None and answer.result is not None and answer.result.message:
        remarks.append(f"at {wanted.named(1)}, {answer.result.message}")
    return remarks
