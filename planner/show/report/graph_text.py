"""Facts about a graph, as text and as plain data."""

from dataclasses import asdict

from planner.capture.options import OPTIONS
from planner.graphs.escape import escape_text
from planner.graphs.units import format_bytes, format_enough, format_seconds
from planner.settings.link import format_rate
from planner.show.facts.graph import DeviceFacts, GraphFacts, OptionFacts
from planner.show.report.describe import build_summary_data, list_provenance
from planner.show.views.text import format_aligned, format_table

_ORDER = "in the orders of the ops that a solve takes"


def build_graph_data(facts: GraphFacts) -> dict[str, object]:
    """Return the facts about a graph as plain data."""
    data = asdict(facts)
    del data["summary"]
    return {"holds": "graph", **build_summary_data(facts.summary), **data}


def describe_graph(facts: GraphFacts) -> str:
    """Return the facts about a graph as text."""
    summary = facts.summary
    host = f"{format_bytes(facts.least_budget_offload_host_bytes)} on the host" if facts.least_budget_offload_host_bytes else ""
    times = ", ".join(f"{phase} {format_seconds(time_s)}" for phase, time_s in facts.time_s_by_phase.items() if time_s)
    lines = [
        *list_provenance(summary.provenance),
        ("ops", f"{summary.ops:,}"),
        *([("optional ops", f"{summary.optional_ops:,}")] if summary.optional_ops else ()),
        ("tensors", f"{summary.tensors:,}, {facts.kept_tensors:,} of them kept at the end"),
        ("step time", f"{format_seconds(summary.time_s)} ({times})" if times else format_seconds(summary.time_s)),
        ("static memory", format_bytes(summary.static_bytes)),
        *((f"  {kind}", format_bytes(size)) for kind, size in facts.static_bytes_by_kind.items()),
        ("peak", f"{format_bytes(summary.keep_everything_peak_bytes)} without recomputation{_describe_reordered(facts)}"),
        *((f"  {name}", value) for name, value in facts.eager_memory.list_lines()),
        ("least budget", f"no less than {_describe_least_budget(facts)}: {escape_text(facts.least_budget_reason)}"),
        ("  known", format_enough(facts.least_budget_found_bytes)),
        *_describe_reserved(facts.least_reserved_bytes, facts.least_reserved_found_bytes),
        ("with offload", f"no less than {format_bytes(facts.least_budget_offload_bytes)} {_ORDER}"),
        ("  known", f"{format_enough(facts.least_budget_offload_found_bytes)}, with {host or 'nothing on the host'}"),
        *_describe_reserved(facts.least_reserved_offload_bytes, facts.least_reserved_offload_found_bytes),
        *(line for name, offered in facts.traced.items() for line in _describe_option(name, offered)),
        *(line for name, device in facts.placement.items() for line in _list_device_lines(name, device, summary.ops)),
        *([("time limit", _describe_stop(facts.stopped_after_s))] if facts.stopped_after_s is not None else ()),
        ("fingerprint", summary.fingerprint),
    ]
    op_rows = [
        (*map(format_bytes, (op.total_bytes, op.input_bytes, op.output_bytes, op.workspace_bytes)), op.name, op.target, op.module)
        for op in facts.largest_ops
    ]
    tensor_rows = [(format_bytes(t.size_bytes), t.name, f"{t.dtype}{list(t.shape)}", t.op) for t in facts.largest_tensors]
    return "\n".join(
        (
            format_aligned(lines),
            "",
            "ops that hold most at once, besides static memory",
            format_table(("at once", "inputs", "outputs", "workspace", "op", "target", "module"), op_rows, numbers=4),
            "",
            "largest tensors",
            format_table(("size", "tensor", "shape", "made by"), tensor_rows, numbers=1),
        )
    )


def _describe_reserved(proved_bytes: int | None, found_bytes: int | None) -> list[tuple[str, str]]:
    """Return the line on budgets that count reserved memory; none on the CPU."""
    if proved_bytes is None or found_bytes is None:
        return []
    said = f"no less than {format_bytes(proved_bytes)}, if the budget counts it; known {format_enough(found_bytes)}"
    return [("  reserved", said)]


def _describe_option(name: str, facts: OptionFacts) -> list[tuple[str, str]]:
    """Return lines on the ops that an option offers, and on the least feasible budget with it."""
    if not facts.ops:
        return [(f"with {escape_text(name)}", "it applies to no op of this step")]
    exactness = f"{facts.inexact_ops:,} of them not exact" if facts.inexact_ops else "all exact"
    return [
        (f"with {escape_text(name)}", f"no less than {format_bytes(facts.least_budget_bytes)} {_ORDER}"),
        ("  known", format_enough(facts.least_budget_found_bytes)),
        ("  offered", f"{facts.ops:,} {_describe_alternatives(name)}, {exactness}"),
    ]


def _describe_alternatives(name: str) -> str:
    """Return the words for the alternatives that an option adds to a graph (``Option.offers``)."""
    known = OPTIONS.get(name.partition(":")[0])
    return f"optional ops of an option that is not registered here, {escape_text(name)!r}" if known is None else known.offers


def _describe_stop(limit_s: float) -> str:
    return f"{format_seconds(limit_s)}, which cut the searches for least budgets short: a longer --time-limit may find less"


def _describe_least_budget(facts: GraphFacts) -> str:
    """Return the lower bound on the least feasible budget as text, with the class of schedules it holds for."""
    least_bytes, anyway_bytes = facts.least_budget_bytes, facts.least_budget_any_order_bytes
    if least_bytes == anyway_bytes:
        return format_bytes(least_bytes)
    return f"{format_bytes(least_bytes)} {_ORDER} ({format_bytes(anyway_bytes)} in any order)"


def _describe_reordered(facts: GraphFacts) -> str:
    if facts.reordered_peak_bytes == facts.summary.keep_everything_peak_bytes:
        return ""
    return f", {format_bytes(facts.reordered_peak_bytes)} with the ops in a better order"


def _list_device_lines(name: str, facts: DeviceFacts, ops: int) -> list[tuple[str, str]]:
    """Return lines on the device `name`; the program has `ops` ops."""
    lines = [("with placement", _describe_device(name, facts, ops))]
    if facts.least_budget_bytes is not None and facts.least_budget_found_bytes is not None:
        lines.append(("  least budget", f"no less than {format_bytes(facts.least_budget_bytes)} {_ORDER}"))
        lines.append(("    known", format_enough(facts.least_budget_found_bytes)))
    return lines


def _describe_device(name: str, facts: DeviceFacts, ops: int) -> str:
    exactness = f"{facts.inexact_ops:,} of them not exact" if facts.inexact_ops else "all exact"
    room = "" if facts.capacity_bytes is None else f", {format_bytes(facts.capacity_bytes)} of memory"
    times = f"{format_seconds(facts.time_s)} there and {format_seconds(facts.here_s)} here"
    copies = f"copies at {format_rate(facts.bytes_per_s)} and {format_seconds(facts.latency_s)} each"
    return f"{facts.ops:,} of {ops:,} ops may run on {escape_text(name)}, {exactness}: {times}{room}, {copies}"
