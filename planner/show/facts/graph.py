"""Facts about a graph before planning, and about the devices its ops were measured on."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from planner.capture.options import restrict_to
from planner.graphs.ir import Graph, Op, Phase, Tensor
from planner.graphs.options import extract_eager_program
from planner.graphs.options.offload import OFFLOAD, remove_offload
from planner.graphs.options.placement import PLACEMENT, find_movable, remove_placement
from planner.graphs.options.selection import keep_traced_ops, list_exact_ops
from planner.graphs.options.surroundings import Link, OtherDevice, Surroundings
from planner.graphs.simulate import simulate
from planner.memory.least_budget import LeastBudget, find_least_budget
from planner.memory.reserved import EagerMemory, is_on_cuda, predict_eager_memory
from planner.plans.record import GraphSummary
from planner.plans.select_attributes import select_attributes
from planner.plans.summary import summarize
from planner.settings.counted_memory import CountedMemory
from planner.settings.other_devices import decode_devices
from planner.solvers.bounds import bound_least_budget, describe_need, find_any_order_need
from planner.solvers.clock import WallClock, measure_rest
from planner.solvers.order.peak import keep_everything_peak_bytes
from planner.solvers.order.reorder import find_order

LISTED = 10


@dataclass(frozen=True, slots=True)
class OpFacts:
    """The memory of one op: inputs that the step made, outputs, workspace, and their sum in bytes."""

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
    """One tensor and its producer."""

    name: str
    size_bytes: int
    shape: tuple[int, ...]
    dtype: str
    op: str


@dataclass(frozen=True, slots=True)
class OptionFacts:
    """The gain from an option that a graph was traced with.

    Attributes:
        ops, inexact_ops: number of its optional ops, or of ops that may overwrite inputs; and number of those that are not exact.
        least_budget_bytes: lower bound on the budget with it, for schedules in the order that a solve uses.
        least_budget_found_bytes: budget of the best schedule known with it.
    """

    ops: int
    inexact_ops: int
    least_budget_bytes: int
    least_budget_found_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The gain from another device that the ops of a graph were measured on.

    Attributes:
        ops, inexact_ops: number of ops of the program that may run there; and number of those that are not exact there.
        time_s, here_s: total seconds of these ops there, and on the main device.
        bytes_per_s, latency_s: rate and latency of transfers.
        capacity_bytes: size of its memory; None for no limit.
        least_budget_bytes, least_budget_found_bytes: lower bound on the main device's budget with it, and the budget of the best
            schedule known; None if no op may run there.
    """

    ops: int
    inexact_ops: int
    time_s: float
    here_s: float
    bytes_per_s: float
    latency_s: float
    capacity_bytes: int | None
    least_budget_bytes: int | None
    least_budget_found_bytes: int | None


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """The facts that ``planner info`` prints about a graph.

    No schedule that first executes the ops in program order, or in the order that a solve finds
    (``planner.solvers.order.reorder``), needs less than `least_budget_bytes`; `least_budget_op` sets the bound of single ops, and
    `least_budget_reason` explains it. In the second order, keeping everything needs `reordered_peak_bytes`. In any order, no
    schedule needs less than `least_budget_any_order_bytes`. A schedule is known for `least_budget_found_bytes`
    (``memory.least_budget``). With offloading the bounds are `least_budget_offload_bytes` and `least_budget_offload_found_bytes`,
    the latter with `least_budget_offload_host_bytes` on the host. All these are of allocated bytes; those called
    ``least_reserved`` are of the bytes that PyTorch's allocator reserves on CUDA. `eager_memory` is what allocators take for
    plain eager PyTorch. `traced` has each of the options that the graph was traced with, alone; `placement` has the other
    devices, by name. `stopped_after_s` is the time limit if it cut the searches for least budgets short, else None.
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
    eager_memory: EagerMemory
    least_reserved_bytes: int | None
    least_reserved_found_bytes: int | None
    least_reserved_offload_bytes: int | None
    least_reserved_offload_found_bytes: int | None
    traced: Mapping[str, OptionFacts]
    placement: Mapping[str, DeviceFacts]
    least_budget_any_order_bytes: int
    least_budget_op: str
    least_budget_reason: str
    largest_ops: tuple[OpFacts, ...]
    largest_tensors: tuple[TensorFacts, ...]
    stopped_after_s: float | None


def collect_graph_facts(graph: Graph, *, exact: bool = False, time_limit_s: float = math.inf) -> GraphFacts:
    """Return the facts about `graph`, the largest ops and tensors first: those of its program, and the gains from its options.

    Args:
        exact: count only exact ops.
        time_limit_s: of the searches for least budgets.

    Raises:
        MismatchError: the devices in its provenance are impossible.
        GraphError: the devices do not match its ops.
    """
    graph = keep_traced_ops(graph, list_exact_ops(graph)) if exact else graph
    summary, clock, stopped = summarize(graph), WallClock(time_limit_s), False

    def find_least(graph: Graph, memory: CountedMemory = CountedMemory.ALLOCATED) -> LeastBudget:
        nonlocal stopped
        found = find_least_budget(graph, memory, should_stop=lambda: measure_rest(clock) <= 0)
        stopped = stopped or found.stopped
        return found

    devices = [device.exactly if exact else device for device in decode_devices(graph.provenance)]
    offered, graph = graph, extract_eager_program(graph)
    whole = OFFLOAD.add_to(graph, Surroundings(Link.even(1.0)))  # for any link and host
    order = find_order(graph).graph
    bound, least, offloading = bound_least_budget(order), find_least(graph), find_least(whole)
    reserved = find_least(graph, CountedMemory.RESERVED) if is_on_cuda(graph) else None
    reserved_offloading = find_least(whole, CountedMemory.RESERVED) if is_on_cuda(graph) else None
    traced = {
        name: _collect_option_facts(restrict_to(remove_placement(remove_offload(offered)[0]), (name,)), find_least)
        for name in offered.provenance.options
    }
    placement = {device.name: _collect_device_facts(graph, device, find_least) for device in devices}
    ops = sorted((_collect_op_facts(graph, op) for op in graph.ops), key=lambda op: -op.total_bytes)
    made = sorted((t for t in graph.tensors if not t.static), key=lambda t: -t.size_bytes)
    return GraphFacts(
        summary=summary,
        kept_tensors=len(graph.kept),
        static_bytes_by_kind={str(kind): size for kind, size in graph.static_bytes_by_kind.items()},
        time_s_by_phase={str(phase): math.fsum(op.time_s for op in graph.ops if op.phase is phase) for phase in Phase},
        reordered_peak_bytes=keep_everything_peak_bytes(order),
        least_budget_bytes=least.proved_bytes,
        least_budget_found_bytes=least.found_bytes,
        least_budget_offload_bytes=offloading.proved_bytes,
        least_budget_offload_found_bytes=offloading.found_bytes,
        least_budget_offload_host_bytes=simulate(whole, offloading.schedule).pool_peaks_bytes[1],
        eager_memory=predict_eager_memory(graph),
        least_reserved_bytes=reserved.proved_bytes if reserved else None,
        least_reserved_found_bytes=reserved.found_bytes if reserved else None,
        least_reserved_offload_bytes=reserved_offloading.proved_bytes if reserved_offloading else None,
        least_reserved_offload_found_bytes=reserved_offloading.found_bytes if reserved_offloading else None,
        traced=traced,
        placement=placement,
        least_budget_any_order_bytes=min(least.proved_bytes, find_any_order_need(graph).total_bytes),
        least_budget_op=order.ops[bound.need.op].name,
        least_budget_reason=describe_need(order, bound.need),
        largest_ops=tuple(ops[:LISTED]),
        largest_tensors=tuple(_collect_tensor_facts(graph, tensor) for tensor in made[:LISTED]),
        stopped_after_s=time_limit_s if stopped else None,
    )


def _collect_option_facts(graph: Graph, find_least: Callable[[Graph], LeastBudget]) -> OptionFacts:
    """Return the facts about `graph` with one option enabled."""
    least = find_least(graph)
    offered = [op for op in graph.ops if op.optional or op.overwrites]
    return OptionFacts(
        ops=len(offered),
        inexact_ops=sum(not op.exact for op in offered),
        least_budget_bytes=least.proved_bytes,
        least_budget_found_bytes=least.found_bytes,
    )


def _collect_device_facts(graph: Graph, device: OtherDevice, find_least: Callable[[Graph], LeastBudget]) -> DeviceFacts:
    """Return the facts about running ops of the program of `graph` on `device`.

    Raises:
        GraphError: it lacks a time, or None, for one of the ops.
    """
    offered = find_movable(graph, device)
    least = find_least(PLACEMENT.add_to(graph, Surroundings(others=(device,)))) if offered else None
    return DeviceFacts(
        ops=len(offered),
        inexact_ops=sum(bool(device.differs) and op.id not in device.exact for op, _ in offered),
        time_s=math.fsum(time_s for _, time_s in offered),
        here_s=math.fsum(op.time_s for op, _ in offered),
        **select_attributes(device, "bytes_per_s", "latency_s", "capacity_bytes"),
        least_budget_bytes=least.proved_bytes if least else None,
        least_budget_found_bytes=least.found_bytes if least else None,
    )


def _collect_op_facts(graph: Graph, op: Op) -> OpFacts:
    input_bytes = sum(graph.tensors[t].size_bytes for t in op.inputs if not graph.tensors[t].static)
    output_bytes = sum(graph.tensors[t].size_bytes for t in op.outputs)
    return OpFacts(
        **select_attributes(op, "name", "target", "module", "phase", "workspace_bytes", "time_s"),
        input_bytes=input_bytes,
        output_bytes=output_bytes,
        total_bytes=input_bytes + output_bytes + op.workspace_bytes,
    )


def _collect_tensor_facts(graph: Graph, tensor: Tensor) -> TensorFacts:
    producer = "" if tensor.static else graph.ops[tensor.producers[0]].name
    return TensorFacts(tensor.name, tensor.size_bytes, tensor.shape, tensor.dtype, producer)
