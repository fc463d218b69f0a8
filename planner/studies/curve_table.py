"""Output of ``planner curve`` and ``planner max-batch``: text and plain data."""

from collections.abc import Sequence
from dataclasses import asdict

from planner.graphs.escape import escape_text
from planner.graphs.units import format_bytes, format_ratio
from planner.plans.select_attributes import select_attributes
from planner.show.views.text import format_table
from planner.studies.curve import PERCENT, Curve, column, list_reserved_columns
from planner.studies.sizes import LargestSize, Wanted
from planner.studies.tables import Column, build_lines


def build_curve_data(curve: Curve) -> dict[str, object]:
    """Return the curve as plain data, without schedules."""
    least = curve.least
    return {
        "holds": "curve",
        "complete": curve.complete,
        "seconds": curve.seconds,
        "reordered": curve.reordered,
        "fingerprint": curve.graph.fingerprint,
        "keep_everything_peak_bytes": curve.graph.keep_everything_peak_bytes,
        "keep_everything_time_s": curve.graph.time_s,
        "memory": str(curve.memory),
        "eager_bytes": curve.eager_bytes,
        "least_budget_proved_bytes": None if least is None else least.proved_bytes,
        "least_budget_found_bytes": None if least is None else least.found_bytes,
        "least_budget_stopped": None if least is None else least.stopped,
        "points": [{name: cell for name, cell in asdict(row).items() if name != "options"} for row in curve.rows],
        "options": list(curve.options),
        "without_options": None if curve.without is None else build_curve_data(curve.without),
    }


def describe_max_batch(answers: Sequence[LargestSize], wanted: Wanted) -> str:
    """Return the largest size of each method as text, with notes on what was not decided."""
    columns: list[Column | str] = [
        "method",
        Column(escape_text(wanted.varies), "size", "{:,}", missing="none"),
        column("overhead", form=PERCENT),
        column("gap", form=PERCENT),
        column("peak", "peak_bytes"),
        *list_reserved_columns(answers, wanted.memory),
        column("step time", "time_s"),
    ]
    header, *rows = build_lines(answers, columns)
    on_cuda = wanted.memory is not None and any(answer.reserved_bytes is not None for answer in answers)
    counted = f" of {wanted.memory.said}" if on_cuda and wanted.memory is not None else ""
    cap = "" if wanted.max_overhead is None else f" and an overhead of at most {format_ratio(wanted.max_overhead)}"
    return "\n".join(
        (
            f"largest {escape_text(wanted.varies)} within {format_bytes(wanted.budget_bytes)}{counted}{cap}",
            format_table(header, rows, numbers=0),
            *(f"{answer.method}: {remark}" for answer in answers for remark in _list_remarks(answer, wanted)),
        )
    )


_OF_METHOD = (
    *("method", "size", "overhead", "peak_bytes", "reserved_bytes", "time_s", "gap"),
    *("at_limit", "undecided", "complete", "extrapolated"),
)


def build_max_batch_data(answers: Sequence[LargestSize], wanted: Wanted) -> dict[str, object]:
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
        "methods": [select_attributes(answer, *_OF_METHOD) for answer in answers],
    }


def _list_remarks(answer: LargestSize, wanted: Wanted) -> list[str]:
    remarks = []
    if not answer.complete:
        remarks.append("stopped: larger ones may fit")
    if answer.at_limit:
        remarks.append("the largest that was tried: raise --limit")
    if answer.undecided is not None and answer.complete:
        remarks.append(
            f"not decided in time at {wanted.name_size(answer.undecided // wanted.unit)}, treated as too large: "
            "raise the time limit"
        )
    if answer.extrapolated:
        remarks.append("its sizes and times were extrapolated from smaller ones: there was not enough memory to measure them")
    if answer.size is None and answer.result is not None and answer.result.message:
        remarks.append(f"at {wanted.name_size(1)}, {answer.result.message}")
    return remarks
