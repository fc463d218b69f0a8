"""Graphs, plans and runs as text for people and as plain data for machines."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from graphs.ir import Graph, Op, Phase, Tensor
from graphs.plan import GraphSummary, Plan
from graphs.simulate import simulate
from graphs.units import format_bytes, format_ratio, format_seconds
from planner.solving import summarize
from planner.visible import visible
from solvers.bounds import any_order_need, describe_need, least_budget_bound
from solvers.order.reorder import reordered
from solvers.policies.store_all import store_all

if TYPE_CHECKING:
    from planner.api import RunReport

LISTED = 10


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What one op holds at once: inputs that the step made, outputs, workspace, and their sum."""

    name: str
    target: str
    module: str
    phase: str
    input_bytes: int
    output_bytes: int
    workspace_bytes: int
    total_bytes: int
    time_s: float


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One tensor, and the op that makes it."""

    name: str
    size_bytes: int
    shape: tuple[int, ...]
    dtype: str
    op: str


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """What ``planner info`` says about a graph.

    No schedule that first executes the ops in the order which a solve finds for them (``solvers.order.reorder``) needs less
    than `least_budget_bytes`: `least_budget_op` sets it, `least_budget_reason` says how. In that order, keeping
    everything takes `reordered_peak_bytes`. No schedule at all needs less than `least_budget_any_order_bytes`.
    """

    summary: GraphSummary
    kept_tensors: int
    static_bytes_by_kind: Mapping[str, int]
    time_s_by_phase: Mapping[str, float]
    reordered_peak_bytes: int
    least_budget_bytes: int
    least_budget_any_order_bytes: int
    least_budget_op: str
    least_budget_reason: str
    largest_ops: tuple[OpFacts, ...]
    largest_tensors: tuple[TensorFacts, ...]


def graph_facts(graph: Graph) -> GraphFacts:
    """The facts of `graph`, with the largest ops and tensors first."""
    summary = summarize(graph)
    order = reordered(graph).graph
    least = least_budget_bound(order)
    ops = sorted((_op_facts(graph, op) for op in graph.ops), key=lambda op: -op.total_bytes)
    made = sorted((t for t in graph.tensors if not t.static), key=lambda t: -t.size_bytes)
    return GraphFacts(
        summary=summary,
        kept_tensors=len(graph.kept),
        static_bytes_by_kind={str(kind): size for kind, size in graph.static_bytes_by_kind.items()},
        time_s_by_phase={str(phase): math.fsum(op.time_s for op in graph.ops if op.phase is phase) for phase in Phase},
        reordered_peak_bytes=simulate(order, store_all(order)).peak_bytes,
        least_budget_bytes=least.budget_bytes,
        least_budget_any_order_bytes=min(least.budget_bytes, any_order_need(graph).total_bytes),
        least_budget_op=order.ops[least.need.op].name,
        least_budget_reason=describe_need(order, least.need),
        largest_ops=tuple(ops[:LISTED]),
        largest_tensors=tuple(_tensor_facts(graph, tensor) for tensor in made[:LISTED]),
    )


def graph_data(facts: GraphFacts) -> dict[str, object]:
    """The facts of a graph as plain data."""
    data = asdict(facts)
    return {"holds": "graph", **_summary_data(data.pop("summary")), **data}


def graph_text(facts: GraphFacts) -> str:
    """The facts of a graph for people."""
    summary = facts.summary
    times = ", ".join(f"{phase} {format_seconds(time_s)}" for phase, time_s in facts.time_s_by_phase.items() if time_s)
    lines = [
        *_provenance_lines(summary.provenance),
        ("ops", f"{summary.ops:,}"),
        ("tensors", f"{summary.tensors:,}, {facts.kept_tensors:,} of them kept at the end"),
        ("step time", f"{format_seconds(summary.time_s)} ({times})" if times else format_seconds(summary.time_s)),
        ("static memory", format_bytes(summary.static_bytes)),
        *((f"  {kind}", format_bytes(size)) for kind, size in facts.static_bytes_by_kind.items()),
        ("peak", f"{format_bytes(summary.store_all_peak_bytes)} without recomputation{_reordered(facts)}"),
        ("least budget", f"no less than {_least(facts)}: {visible(facts.least_budget_reason)}"),
        ("fingerprint", summary.fingerprint),
    ]
    op_rows = [
        (*map(format_bytes, (op.total_bytes, op.input_bytes, op.output_bytes, op.workspace_bytes)), op.name, op.target, op.module)
        for op in facts.largest_ops
    ]
    tensor_rows = [(format_bytes(t.size_bytes), t.name, f"{t.dtype}{list(t.shape)}", t.op) for t in facts.largest_tensors]
    return "\n".join(
        (
            aligned(lines),
            "",
            "ops that hold most at once, besides static memory",
            table(("at once", "inputs", "outputs", "workspace", "op", "target", "module"), op_rows, numbers=4),
            "",
            "largest tensors",
            table(("size", "tensor", "shape", "made by"), tensor_rows, numbers=1),
        )
    )


def _least(facts: GraphFacts) -> str:
    """The bound on the least budget, and of which schedules it is one."""
    least_bytes, anyway_bytes = facts.least_budget_bytes, facts.least_budget_any_order_bytes
    if least_bytes == anyway_bytes:
        return format_bytes(least_bytes)
    return f"{format_bytes(least_bytes)} in the order of the ops that a solve takes ({format_bytes(anyway_bytes)} in any order)"


def _reordered(facts: GraphFacts) -> str:
    if facts.reordered_peak_bytes == facts.summary.store_all_peak_bytes:
        return ""
    return f", {format_bytes(facts.reordered_peak_bytes)} with the ops in a better order"


def plan_data(plan: Plan) -> dict[str, object]:
    """What ``planner solve`` and ``planner info`` say about a plan, as plain data."""
    return {
        "holds": "plan",
        "status": plan.status,
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.peak_bytes,
        "measured_peak_bytes": plan.measured_peak_bytes,
        "predicted_time_s": plan.time_s,
        "predicted_ratio": 1 + plan.overhead,
        "overhead": plan.overhead,
        "eager": None
        if plan.eager is None
        else {**asdict(plan.eager), "identical": plan.eager.identical, "overhead": plan.eager.overhead},
        "bound_s": plan.bound_s,
        "gap": plan.gap,
        "solver": plan.solver,
        "seconds": plan.seconds,
        "settings": dict(plan.settings),
        "versions": dict(plan.versions),
        "steps": len(plan.schedule.steps),
        "recomputed": len(plan.schedule.computed) - plan.graph.ops,
        "graph": _summary_data(asdict(plan.graph)),
    }


def plan_text(plan: Plan) -> str:
    """What ``planner solve`` says about a plan, for people."""
    peak = plan.graph.store_all_peak_bytes
    share = f", {format_ratio(plan.budget_bytes / peak)} of the {format_bytes(peak)} without recomputation" if peak else ""
    time_s, ratio = format_seconds(plan.time_s), f"{1 + plan.overhead:.4f}"
    lines = [
        ("budget", format_bytes(plan.budget_bytes) + share),
        ("predicted peak", format_bytes(plan.peak_bytes)),
        *(() if plan.measured_peak_bytes is None else [("measured peak", format_bytes(plan.measured_peak_bytes))]),
        ("predicted step time", f"{time_s}, {ratio} times that of keeping everything"),
        *_eager_lines(plan),
        ("overhead", f"{100 * plan.overhead:z.2f}%, {len(plan.schedule.computed) - plan.graph.ops:,} ops recomputed"),
        ("bound", "unknown" if plan.bound_s is None else f"{format_seconds(plan.bound_s)}: {_bound_of(plan)}"),
        ("gap", "unknown" if plan.gap is None else f"{format_ratio(plan.gap)}{_tolerated(plan)}"),
        ("status", f"{plan.status}, by {visible(plan.solver)} in {plan.seconds:.2f} s"),
    ]
    return aligned(lines)


def _tolerated(plan: Plan) -> str:
    """The tolerance that the solve ended by, where it says so."""
    tolerance = plan.settings.get("tolerance")
    return f", tolerance {100 * tolerance:g}%" if isinstance(tolerance, int | float) else ""


def _eager_lines(plan: Plan) -> list[tuple[str, str]]:
    if plan.eager is None:
        return []
    overhead = plan.eager.overhead
    measured = [] if overhead is None else [("over eager", f"{100 * overhead:+.2f}%, measured")]
    return [*measured, ("beside eager", visible(plan.eager))]


def plan_info_text(plan: Plan) -> str:
    """What ``planner info`` says about a plan, for people: also what it is for and how it was found."""
    lines = [
        *_provenance_lines(plan.graph.provenance),
        ("graph", f"{plan.graph.ops:,} ops, {plan.graph.tensors:,} tensors, fingerprint {visible(plan.graph.fingerprint)}"),
        ("steps", f"{len(plan.schedule.steps):,}"),
        *((visible(name), visible(value)) for name, value in (*_plain(plan.settings), *plan.versions.items())),
    ]
    return f"{plan_text(plan)}\n\n{aligned(lines)}"


def _plain(settings: Mapping[str, object]) -> list[tuple[str, object]]:
    """Those for people to read; the parameters of the search are for machines."""
    return [(name, value) for name, value in settings.items() if not isinstance(value, Mapping)]


def run_data(report: "RunReport") -> dict[str, object]:
    """What ``planner run`` says, as plain data; the timeline is left out."""
    return {
        "budget_bytes": report.budget_bytes,
        "predicted_peak_bytes": report.predicted_peak_bytes,
        "measured_peak_bytes": report.measured_peak_bytes,
        "reserved_bytes": report.reserved_bytes,
        "predicted_time_s": report.predicted_time_s,
        "measured_time_s": report.measured_time_s,
        "predicted_ratio": report.predicted_ratio,
        "measured_ratio": report.measured_ratio,
        "eager_ratio": report.eager_ratio,
        "identical": report.identical,
        "differences": list(report.differences),
        "eager_differences": list(report.eager_differences),
    }


def run_text(report: "RunReport") -> str:
    """What ``planner run`` says, for people."""
    rows = [
        ("peak memory", format_bytes(report.predicted_peak_bytes), format_bytes(report.measured_peak_bytes)),
        ("step time", format_seconds(report.predicted_time_s), format_seconds(report.measured_time_s)),
        ("times keeping everything", f"{report.predicted_ratio:.4f}", f"{report.measured_ratio:.4f}"),
    ]
    within = "within" if report.measured_peak_bytes <= report.budget_bytes else "OVER"
    over = 100 * (report.measured_ratio / report.eager_ratio - 1)
    reserved = "" if report.reserved_bytes is None else f"; the allocator held {format_bytes(report.reserved_bytes)}"
    return "\n".join(
        (
            table(("", "predicted", "measured"), rows, numbers=3),
            f"measured peak: {within} the budget of {format_bytes(report.budget_bytes)}{reserved}",
            f"plain PyTorch: {report.eager_ratio:.4f} times keeping everything; the planned step takes {over:+.2f}% over it",
            *_compared("keeping everything", report.differences),
            *_compared("plain PyTorch", report.eager_differences),
        )
    )


def _compared(reference: str, differences: Sequence[str]) -> list[str]:
    if not differences:
        return [f"loss, gradients, buffers and random state: identical to {reference}"]
    return [f"DIFFERENT from {reference}:", *(f"  {visible(difference)}" for difference in differences)]


def aligned(lines: Iterable[tuple[str, str]]) -> str:
    """Names and values in two columns."""
    pairs = list(lines)
    width = max((len(name) for name, _ in pairs), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in pairs)


def _bound_of(plan: Plan) -> str:
    """What the bound is a bound of: solvers that search a smaller class of schedules name it in their settings."""
    narrower = plan.settings.get("schedules")
    taken = visible(str(narrower)) if narrower else "each op first in program order"
    order = " as reordered" if plan.settings.get("reordered") else ""
    return f"no schedule that fits, and takes {taken}{order}, is faster"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: int) -> str:
    """Rows under a header; the first `numbers` columns are aligned on the right."""
    cells = [tuple(header), *(tuple(map(visible, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(
            f"{cell:>{width}}" if i < numbers else f"{cell:<{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def _op_facts(graph: Graph, op: Op) -> OpFacts:
    input_bytes = sum(graph.tensors[t].size_bytes for t in op.inputs if not graph.tensors[t].static)
    output_bytes = sum(graph.tensors[t].size_bytes for t in op.outputs)
    return OpFacts(
        name=op.name,
        target=op.target,
        module=op.module,
        phase=str(op.phase),
        input_bytes=input_bytes,
        output_bytes=output_bytes,
        workspace_bytes=op.workspace_bytes,
        total_bytes=input_bytes + output_bytes + op.workspace_bytes,
        time_s=op.time_s,
    )


def _tensor_facts(graph: Graph, tensor: Tensor) -> TensorFacts:
    maker = "" if tensor.static else graph.ops[tensor.producers[0]].name
    return TensorFacts(tensor.name, tensor.size_bytes, tensor.shape, tensor.dtype, maker)


def _summary_data(summary: dict[str, object]) -> dict[str, object]:
    """A graph's summary with its provenance last."""
    provenance = summary.pop("provenance")
    return {**summary, "provenance": provenance}


def _provenance_lines(provenance: Mapping[str, object]) -> list[tuple[str, str]]:
    def text(value: object) -> str:
        return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

    return [(visible(name), visible(text(value))) for name, value in provenance.items()]
