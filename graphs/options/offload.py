"""Offload: a tensor is transferred to the host, its device memory is free meanwhile, and it is reloaded before it is read.

Each tensor t has two transfers: one produces ``t@host`` from t, on the channel from the device to the host; the other is a second
producer of t, on the channel back. A channel carries one transfer at a time; both work in parallel with the computation.

A transfer is an op on another stream, not a new kind of step: schedules, the judge and the writer of passes need no second notion
of memory or time. Known weaknesses: a tensor is transferred as a whole, and a channel has a constant rate and latency.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from planner.graphs.errors import GraphError
from planner.graphs.ir import Graph, Kind, Op
from planner.graphs.options.option import Feature, GraphOption, Need
from planner.graphs.options.placement import get_placement_with_options, is_on_devices_alone, is_placed
from planner.graphs.options.surroundings import Surroundings
from planner.graphs.options.transfers import OptionBuilder, Transfer, find_transfers
from planner.graphs.pools import DEVICE, DEVICE_TO_HOST, HOST, HOST_TO_DEVICE, Pool

# Smaller tensors are not worth a transfer: PCIe needs 20 us, about the overhead of starting it and waiting for it.
LEAST_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """The two transfers that offload and reload a tensor, by way of its copy `host_tensor`."""

    out: Transfer
    back: Transfer

    @property
    def host_tensor(self) -> int:
        """Id of its copy on the host."""
        (copy,) = self.out.targets
        return copy


@dataclass(frozen=True, slots=True)
class Offloads:
    """The tensors that a graph may offload; there may be none.

    Attributes:
        by_tensor: the transfers of each, in ascending order of tensors.
        host_bytes: capacity of the host's pool, None if all of them fit together.
    """

    by_tensor: Mapping[int, RoundTrip]
    host_bytes: int | None = None

    def __bool__(self) -> bool:
        return bool(self.by_tensor)


NO_OFFLOADS = Offloads(MappingProxyType({}))


def _explain_refusal(graph: Graph, surroundings: Surroundings) -> str:
    if surroundings.link is None:
        return "offload needs the link to the host: Surroundings(link=...)"
    if is_on_devices_alone(graph):
        return ""
    return "offload cannot be added to a graph that already has other pools or streams: add it once, and after placement"


def _add_offload(graph: Graph, surroundings: Surroundings) -> Graph:
    """Return `graph` with transfers for each tensor that the program produces and reads on the device and does not keep.

    States of generators are not offloaded, nor tensors that only optional ops produce, such as copies on other devices, nor
    those that a channel of the program fills or reads: a gather has its source at hand, and a reduction follows its last
    gradient. Tensors of less than ``LEAST_BYTES`` are offloaded only if there are no larger ones.
    """
    transfers = find_transfers(graph)
    carried = {t for transfer in transfers.values() if transfer.must_run for t in (*transfer.sources, *transfer.targets)}
    made = [t for t in graph.tensors if t.size_bytes and not t.static and t.id not in graph.kept and t.held_for is None]
    made = [t for t in made if t.producers[0] < len(graph.program) and t.id not in carried]
    # An op that draws from a state first writes it, and would have to wait for its transfer.
    made = [t for t in made if t.kind is not Kind.RANDOM_STATE and not transfers.keys() >= {*graph.consumers[t.id]}]
    large = [t for t in made if t.size_bytes >= LEAST_BYTES]
    builder, link = OptionBuilder(graph), surroundings.link
    assert link is not None  # else the graph is not accepted
    for t in large or made:
        copy = builder.add_copy(t, HOST)
        builder.add_transfer(t, t.id, copy, link.out)
        builder.add_transfer(t, copy, t.id, link.back)
    # The host computes nothing: only the channel that fills its pool waits for space.
    builder.pools.append(Pool(HOST, link.out.stream, surroundings.host_bytes))
    return builder.build_graph()


OFFLOAD = GraphOption(
    name="offload",
    description="tensors may be offloaded to host memory and reloaded, in parallel with computation",
    refused={
        Feature.ARENA: "transfers end at different times in each step, and addresses are planned for fixed times; leave one "
        "of them out"
    },
    need=Need.LINK,
    last=True,  # it applies to all tensors on the device, whichever op produces them
    accepts=_explain_refusal,
    apply=_add_offload,
)


def remove_offload(graph: Graph) -> tuple[Graph, Offloads]:
    """Return `graph` without the transfers of ``OFFLOAD``, with the same ids, and these transfers.

    Raises:
        GraphError: the graph has pools or streams that belong neither to the host nor to other devices.
    """
    if len(graph.pools) == 1 and len(graph.streams) == 1:
        return graph, NO_OFFLOADS
    host = next((pool for pool in graph.pools if pool.name == HOST), None)
    made = next((t.id for t in graph.tensors if t.pool == HOST), len(graph.tensors))
    rest = next((op.id for op in graph.ops if op.stream == DEVICE_TO_HOST), len(graph.ops))
    copying, transfers = graph.ops[rest:], find_transfers(graph)
    by_tensor = {
        out.inputs[0]: RoundTrip(transfers[out.id], transfers[back.id])
        for out, back in zip(copying[::2], copying[1::2], strict=False)
        if _offload_and_reload(graph, out, back)
    }
    known = len(copying) == 2 * len(by_tensor) and len(graph.tensors) == made + len(by_tensor)
    left = graph
    if host is not None:
        known = known and host.owner == DEVICE_TO_HOST and not graph.static_bytes_by_pool[HOST]
        tensors = tuple(replace(t, producers=tuple(p for p in t.producers if p < rest)) for t in graph.tensors[:made])
        pools = tuple(pool for pool in graph.pools if pool is not host)
        left = replace(graph, ops=graph.ops[:rest], tensors=tensors, pools=pools) if known else graph
    if not known or not is_on_devices_alone(left):
        raise _make_unknown_ops_error(graph)
    if is_placed(left):
        get_placement_with_options(left)  # raises an error for other ops
    if host is None:
        return left, NO_OFFLOADS
    total = sum(left.tensors[t].size_bytes for t in by_tensor)
    limited = host.capacity_bytes is not None and total > host.capacity_bytes
    return left, Offloads(MappingProxyType(dict(sorted(by_tensor.items()))), host.capacity_bytes if limited else None)


def _make_unknown_ops_error(graph: Graph) -> GraphError:
    return GraphError(
        f"the graph has {len(graph.pools)} pools, {len(graph.streams)} streams and {len(graph.ops) - len(graph.program)} "
        "optional ops. Some are neither transfers of single tensors to or from host memory nor ops on other devices: solve a "
        "graph without other options on other streams"
    )


def _offload_and_reload(graph: Graph, out: Op, back: Op) -> bool:
    """Return True if the optional ops `out` and `back` offload and reload one tensor, on a channel each."""
    if len(out.inputs) != 1 or len(out.outputs) != 1 or (back.inputs, back.outputs) != (out.outputs, out.inputs):
        return False
    t, copy = graph.tensors[out.inputs[0]], graph.tensors[out.outputs[0]]
    places = (t.pool, copy.pool, out.stream, back.stream) == (DEVICE, HOST, DEVICE_TO_HOST, HOST_TO_DEVICE)
    made = len(t.producers) > 1 and t.producers[-1] == back.id and copy.producers == (out.id,)
    again = out.recomputable and back.recomputable and not out.replaces and not back.replaces
    return places and made and again and t.id not in graph.kept and copy.size_bytes == t.size_bytes and out.exact and back.exact
