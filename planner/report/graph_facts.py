"""What is known of a graph before it is planned, as text for people and as plain data for machines."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from graphs.ir import Graph, Op, Phase, Tensor
from graphs.options import without_options
from graphs.options.offload import OFFLOAD, without_copies
from graphs.options.placement import without_placement
from graphs.options.selection import exact_ops, holding_ops, traced_with
from graphs.options.surroundings import Link, Surroundings
from graphs.plan import GraphSummary
from graphs.simulate import simulate
from graphs.units import format_bytes, format_seconds
from planner.capture.options import holding, option_called
from planner.profiling.other_devices import known_devices
from planner.report.describe import aligned, provenance_lines, summary_data, table
from planner.report.device_facts import DeviceFacts, device_facts, device_lines, least_with
from planner.solving import summarize
from planner.visible import visible
from solvers.bounds import any_order_need, describe_need, least_budget_bound
from solvers.clock import WorkClock
from solvers.least import least_known
from solvers.order.reorder import reordered
from solvers.policies.keep_everything import keep_everything

LISTED = 10
_ORDER = "in the order of the ops that a solve takes"
_FINDING = 1.0  # units of work, for schedules that need little memory


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
class OptionFacts:
    """What an option that a graph was traced with offers on it.

    Attributes:
        ops, inexact_ops: its optional ops, or those of the program that may write over an input; and those of them that may
            differ from the program.
        least_budget_bytes: no schedule with it needs less, of those in the order of ops that a solve with it takes.
        least_budget_found_bytes: a schedule with it is known for so much.
    """

    ops: int
    inexact_ops: int
    least_budget_bytes: int
    least_budget_found_bytes: int


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """What ``planner info`` says about a graph.

    No schedule that first executes the ops in the order which a solve finds for them (``solvers.order.reorder``) needs less
    than `least_budget_bytes`: `least_budget_op` sets it, `least_budget_reason` says how. In that order, keeping
    everything takes `reordered_peak_bytes`. No schedule at all needs less than `least_budget_any_order_bytes`.
    A schedule is known for `least_budget_found_bytes`. With round trips to the host these are `least_budget_offload_bytes`
    and `least_budget_offload_found_bytes`, the latter with `least_budget_offload_host_bytes` there. `traced` has each of the
    options that the graph was traced with, alone; `placement` the other devices, by name.
    """

    summary: GraphSummary
    kept_tensors: int
    static_bytes_by_kind: Mapping[str, int]
    time_s_by_phase: Mapping[str, float]
    reordered_peak_bytes: int
    least_budget_bytes: int
    least_budget_found_bytes: int
    least_budget_offload_bytes: int
    least_budget_offload_found_bytes: int
    least_budget_offload_host_bytes: int
    traced: Mapping[str, OptionFacts]
    placement: Mapping[str, DeviceFacts]
    least_budget_any_order_bytes: int
    least_budget_op: str
    least_budget_reason: str
    largest_ops: tuple[OpFacts, ...]
    largest_tensors: tuple[TensorFacts, ...]


def graph_facts(graph: Graph, *, exact: bool = False) -> GraphFacts:
    """The facts of `graph`, with the largest ops and tensors first: those of its program, and what its options could gain.

    Args:
        exact: count only what differs from the program in not a bit.

    Raises:
        MismatchError: its provenance has other devices that cannot be.
        GraphError: these are not those of its ops.
    """
    graph = holding_ops(graph, exact_ops(graph)) if exact else graph
    summary = summarize(graph)
    devices = [device.exactly if exact else device for device in known_devices(graph.provenance)]
    traced = {name: _option_facts(holding(_here(graph), (name,))) for name in traced_with(graph)}
    graph = without_options(graph).out_of_place()
    whole = reordered(OFFLOAD.added_to(graph, Surroundings(Link.even(1.0)))).graph
    order, copies = without_copies(whole)
    least, offloading = least_budget_bound(order), least_budget_bound(order, copies)
    found = simulate(order, least_known(order, WorkClock(_FINDING), proved_bytes=least.budget_bytes))
    sending = simulate(whole, least_known(whole, WorkClock(_FINDING), proved_bytes=offloading.budget_bytes))
    ops = sorted((_op_facts(graph, op) for op in graph.ops), key=lambda op: -op.total_bytes)
    made = sorted((t for t in graph.tensors if not t.static), key=lambda t: -t.size_bytes)
    return GraphFacts(
        summary=summary,
        kept_tensors=len(graph.kept),
        static_bytes_by_kind={str(kind): size for kind, size in graph.static_bytes_by_kind.items()},
        time_s_by_phase={str(phase): math.fsum(op.time_s for op in graph.ops if op.phase is phase) for phase in Phase},
        reordered_peak_bytes=simulate(order, keep_everything(order)).peak_bytes,
        least_budget_bytes=least.budget_bytes,
        least_budget_found_bytes=found.peak_bytes,
        least_budget_offload_bytes=offloading.budget_bytes,
        least_budget_offload_found_bytes=sending.peak_bytes,
        least_budget_offload_host_bytes=sending.pool_peaks_bytes[1],
        traced=traced,
        placement={device.name: device_facts(graph, device, _FINDING) for device in devices},
        least_budget_any_order_bytes=min(least.budget_bytes, any_order_need(graph).total_bytes),
        least_budget_op=order.ops[least.need.op].name,
        least_budget_reason=describe_need(order, least.need),
        largest_ops=tuple(ops[:LISTED]),
        largest_tensors=tuple(_tensor_facts(graph, tensor) for tensor in made[:LISTED]),
    )


def graph_data(facts: GraphFacts) -> dict[str, object]:
    """The facts of a graph as plain data."""
    data = asdict(facts)
    return {"holds": "graph", **summary_data(data.pop("summary")), **data}


def graph_text(facts: GraphFacts) -> str:
    """The facts of a graph for people."""
    summary = facts.summary
    host = f"{format_bytes(facts.least_budget_offload_host_bytes)} on the host" if facts.least_budget_offload_host_bytes else ""
    times = ", ".join(f"{phase} {format_seconds(time_s)}" for phase, time_s in facts.time_s_by_phase.items() if time_s)
    lines = [
        *provenance_lines(summary.provenance),
        ("ops", f"{summary.ops:,}"),
        *([("optional ops", f"{summary.optional_ops:,}")] if summary.optional_ops else ()),
        ("tensors", f"{summary.tensors:,}, {facts.kept_tensors:,} of them kept at the end"),
        ("step time", f"{format_seconds(summary.time_s)} ({times})" if times else format_seconds(summary.time_s)),
        ("static memory", format_bytes(summary.static_bytes)),
        *((f"  {kind}", format_bytes(size)) for kind, size in facts.static_bytes_by_kind.items()),
        ("peak", f"{format_bytes(summary.keep_everything_peak_bytes)} without recomputation{_reordered(facts)}"),
        ("least budget", f"no less than {_least(facts)}: {visible(facts.least_budget_reason)}"),
        ("  known", format_bytes(facts.least_budget_found_bytes)),
        ("with offload", f"no less than {format_bytes(facts.least_budget_offload_bytes)} {_ORDER}"),
        ("  known", f"{format_bytes(facts.least_budget_offload_found_bytes)}, with {host or 'nothing on the host'}"),
        *(line for name, offered in facts.traced.items() for line in _option_lines(name, offered)),
        *(line for name, device in facts.placement.items() for line in device_lines(name, device, summary.ops, _ORDER)),
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


def _option_lines(name: str, facts: OptionFacts) -> list[tuple[str, str]]:
    """What an option offers, and the least budget with it."""
    if not facts.ops:
        return [(f"with {name}", "nothing to choose: no op of this step is one that it knows another way for")]
    exactness = f"{facts.inexact_ops:,} of them not exact" if facts.inexact_ops else "all exact"
    return [
        (f"with {name}", f"no less than {format_bytes(facts.least_budget_bytes)} {_ORDER}"),
        ("  known", format_bytes(facts.least_budget_found_bytes)),
        ("  offered", f"{facts.ops:,} {option_called(name).offers}, {exactness}"),
    ]


def _least(facts: GraphFacts) -> str:
    """The bound on the least budget, and of which schedules it is one."""
    least_bytes, anyway_bytes = facts.least_budget_bytes, facts.least_budget_any_order_bytes
    if least_bytes == anyway_bytes:
        return format_bytes(least_bytes)
    return f"{format_bytes(least_bytes)} {_ORDER} ({format_bytes(anyway_bytes)} in any order)"


def _reordered(facts: GraphFacts) -> str:
    if facts.reordered_peak_bytes == facts.summary.keep_everything_peak_bytes:
        return ""
    return f", {format_bytes(facts.reordered_peak_bytes)} with the ops in a better order"


def _here(graph: Graph) -> Graph:
    """`graph` with what was found when it was traced alone."""
    return without_placement(without_copies(graph)[0])


def _option_facts(graph: Graph) -> OptionFacts:
    """Of `graph` with one of its options."""
    proved_bytes, found_bytes = least_with(graph, _FINDING)
    offered = [op for op in graph.ops if op.optional or op.overwrites]
    return OptionFacts(
        ops=len(offered),
        inexact_ops=sum(not op.exact for op in offered),
        least_budget_bytes=proved_bytes,
        least_budget_found_bytes=found_bytes,
    )


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
