"""Placement: an op may run on another device, with transfers between the devices (Schuler et al., XEngine, TACO 2022).

Each further device d has a pool, a stream that computes and owns it, and a channel to and from every other device. The optional
ops are, for each op that can run there, a replacement that reads and produces copies ``t@d`` of the program's tensors; and
transfers of each of these tensors between every two devices.

Static tensors live on the main device: a device that reads them gets copies, once or more often in a step, and frees them like
other tensors. So parameters that the optimizer has changed are never stale, and their copies take memory only while they are
used.

Some ops stay on the main device: ops that draw random numbers or save the state of the generator; ops that write in place, or
read a tensor that is written in place, since nothing orders a copy and the write; and ops whose tensors are held for
others. Kept tensors end on the main device. A replacement has the workspace of its op, unless another one was measured.

Other options stay on the main device: optional ops that compute there come before these, transfers to the host
(``planner.graphs.options.offload``) after them. A replacement overwrites no input; its op may, if the schedule executes it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from planner.graphs.errors import GraphError
from planner.graphs.ir import Graph, Kind, Op
from planner.graphs.options.option import Feature, GraphOption, Need
from planner.graphs.options.passes import order_by_passes
from planner.graphs.options.selection import remove_ops
from planner.graphs.options.surroundings import OtherDevice, Surroundings
from planner.graphs.options.transfers import OptionBuilder
from planner.graphs.pools import COMPUTE, DEVICE, DEVICE_TO_HOST, HOST, HOST_TO_DEVICE, Channel, Pool, name_channel, name_stream
from planner.graphs.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Placement:
    """The alternatives that ``PLACEMENT`` has added to a graph. Devices are positions in `pools`, the main one 0.

    Attributes:
        program: the graph without them, with the same ids.
        runs: by device and op of the program, the op that executes it there; None if it cannot run.
        places: by device and tensor of `program`, its copy there; None if there is none.
        copies: by (from, to, tensor of `program`), the transfer.
    """

    whole: Graph
    program: Graph
    pools: tuple[Pool, ...]
    runs: tuple[tuple[int | None, ...], ...]
    places: tuple[tuple[int | None, ...], ...]
    copies: Mapping[tuple[int, int, int], int]


def _explain_refusal(graph: Graph, surroundings: Surroundings) -> str:
    if len(graph.pools) > 1 or len(graph.streams) > 1:
        return "placement cannot be added to a graph that already has other pools or streams: add it once, and first"
    if not surroundings.others:
        return (
            "placement needs another device, and the times of the ops there: trace the step with --other-devices cpu:2, or cuda "
            "(planner.trace(..., other_devices=['cuda'])), or give Surroundings(others=...)"
        )
    pools, taken = [DEVICE], {DEVICE, COMPUTE, HOST, DEVICE_TO_HOST, HOST_TO_DEVICE}
    for device in surroundings.others:
        if reason := _describe_mismatch(graph, device):
            return reason
        new = _choose_names(pools, device.name)
        if clashes := [name for name in new if name in taken]:
            return f"device {device.name!r} would have a pool or stream {clashes[0]!r}, which the graph has already: rename it"
        if not find_movable(graph, device):
            return f"no op can run on device {device.name!r}: each has no time there, or must stay on the main device"
        pools.append(device.name)
        taken.update(new)
    return ""


def _describe_mismatch(graph: Graph, device: OtherDevice) -> str:
    if len(device.times_s) == len(graph.program):
        return ""
    return (
        f"device {device.name!r} has {len(device.times_s)} times for a program of {len(graph.program)} ops: give one for "
        "each, None where an op cannot run there"
    )


def _choose_names(pools: Sequence[str], device: str) -> list[str]:
    """Return the names of the pool and the streams that `device` adds to a graph with these `pools`."""
    ends = [ends for pool in pools for ends in ((pool, device), (device, pool))]
    return [device, name_stream(device), *(name_channel(*pools) for pools in ends)]


def _add_placement(graph: Graph, surroundings: Surroundings) -> Graph:
    devices = _Devices(graph)
    for device in surroundings.others:
        devices.add(device)
    return devices.builder.build_graph()


def _lift(graph: Graph, schedule: Schedule) -> Schedule:
    return order_by_passes(graph, schedule) if is_placed(graph) else schedule


PLACEMENT = GraphOption(
    name="placement",
    description="ops may run on other devices, with transfers between them",
    refused={
        Feature.INDUCTOR: "Inductor's kernels run on one device; leave it out, or use kernels='eager'",
        Feature.TORCH_COMPILE: "its graphs are not measured on other devices; leave it out, or use planner.compile",
        Feature.VARYING_SIZES: "ops are measured on other devices at one size; leave one of them out",
        Feature.CUDA_GRAPH: "ops on other devices run one by one; leave one of them out",
        Feature.ARENA: "an arena serves one thread, and each device has its own; leave one of them out",
        Feature.SEVERAL_PROCESSES: "placement works in a single process; leave it out, or train without "
        "DistributedDataParallel or fully_shard",
    },
    need=Need.DEVICES,
    accepts=_explain_refusal,
    apply=_add_placement,
    lift=_lift,
)


class _Devices:
    """A builder that adds devices to a graph, one after the other."""

    def __init__(self, graph: Graph) -> None:
        self.source, self.builder = graph, OptionBuilder(graph)
        self.places = [{t.id: t.id for t in graph.tensors}]  # by pool, the copy of each tensor of the graph

    def add(self, device: OtherDevice) -> None:
        """Add the pool, copies of tensors, transfers to the device, replacements, and transfers back, in this order."""
        moved = find_movable(self.source, device)
        pools = [pool.name for pool in self.builder.pools]
        self.builder.pools.append(Pool(device.name, name_stream(device.name), device.capacity_bytes))
        read_or_made = sorted({t for op, _ in moved for t in (*op.inputs, *op.outputs)})
        there = {t: self.builder.add_copy(self.source.tensors[t], device.name, device.block_bytes) for t in read_or_made}
        for pool, here in zip(pools, self.places, strict=True):
            self._copy_all(here, there, device.make_channel(pool, device.name))
        for op, time_s in moved:
            self.builder.add_op(
                replace(
                    op,
                    name=f"{op.name}@{device.name}",
                    inputs=tuple(there[t] for t in op.inputs),
                    outputs=tuple(there[t] for t in op.outputs),
                    time_s=time_s,
                    workspace_bytes=device.workspaces_bytes[op.id] if device.workspaces_bytes else op.workspace_bytes,
                    stream=name_stream(device.name),
                    optional=True,
                    replaces=(op.id,),
                    overwrites=(),
                    requests=(),
                    differs="" if op.id in device.exact else device.differs,
                )
            )
        for pool, here in zip(pools, self.places, strict=True):
            self._copy_all(there, here, device.make_channel(device.name, pool))
        self.places.append(there)

    def _copy_all(self, source: Mapping[int, int], target: Mapping[int, int], channel: Channel) -> None:
        """Add transfers of all tensors that may be in both pools, except to the pool where a tensor is static."""
        for t in self.source.tensors:
            if t.id in source and t.id in target and not (t.static and target is self.places[0]):
                self.builder.add_transfer(t, source[t.id], target[t.id], channel)


def remove_placement(graph: Graph) -> Graph:
    """Return `graph` on its main device with its other options; remaining ops and tensors are renumbered."""
    if not is_placed(graph):
        return graph
    others = list_devices(graph)[1:]
    there = {pool.name for pool in others}
    left = remove_ops(graph, lambda op: any(graph.tensors[t].pool in there for t in (*op.inputs, *op.outputs)))
    return replace(left, pools=tuple(pool for pool in graph.pools if pool not in others))


def find_fixed(graph: Graph) -> frozenset[int]:
    """Return the ids of the program's ops that stay on the main device."""
    stay = {t for op in graph.ops for t in op.mutates}
    stay |= {t.id for t in graph.tensors if t.held_for is not None or t.kind is Kind.RANDOM_STATE}
    return frozenset(op.id for op in graph.program if op.random or op.mutates or not stay.isdisjoint((*op.inputs, *op.outputs)))


def find_movable(graph: Graph, device: OtherDevice) -> list[tuple[Op, float]]:
    """Return the ops of the program that may run on `device`, each with its seconds there.

    Raises:
        GraphError: `device` does not have one time, or None, for each op.
    """
    if reason := _describe_mismatch(graph, device):
        raise GraphError(reason)
    stay, times = find_fixed(graph), zip(graph.program, device.times_s, strict=True)
    return [(op, time_s) for op, time_s in times if time_s is not None and op.id not in stay]


def is_between_devices(graph: Graph, op: Op) -> bool:
    """Return True if `op` is a transfer between two devices, neither of them the host."""
    return op.is_transfer and HOST not in graph.ends(op)


def is_placed(graph: Graph) -> bool:
    """Return True if ``PLACEMENT`` has added devices to `graph`."""
    return len(list_devices(graph)) > 1


def list_devices(graph: Graph) -> tuple[Pool, ...]:
    """Return the pools of the devices, the main one first, without the host's."""
    return tuple(pool for pool in graph.pools if pool.computes)


def is_on_devices_alone(graph: Graph) -> bool:
    """Return True if all pools and streams of `graph` belong to the main device or were added by ``PLACEMENT``."""
    owners = {pool.owner for pool in graph.pools}
    others = [op for op in graph.ops if op.stream not in owners]
    return list_devices(graph) == graph.pools and all(op.is_transfer and not op.replaces for op in others)


def get_placement(graph: Graph) -> Placement:
    """Return the alternatives that ``PLACEMENT`` has added to a graph; for a plain graph, those of one device.

    Raises:
        GraphError: the graph has other optional ops.
    """
    found = get_placement_with_options(graph)
    if not found.program.plain:
        raise _make_unknown_ops_error(found.program.ops[-1])
    return found


def get_placement_with_options(graph: Graph) -> Placement:
    """Return the placement of a graph that may also have optional ops on the main device, which stay in ``program``.

    Raises:
        GraphError: the graph has pools, streams or ops on other devices that ``PLACEMENT`` does not add.
    """
    first = next((op.id for op in graph.ops if op.stream != COMPUTE), len(graph.ops))
    count = next((t.id for t in graph.tensors if t.pool != graph.pools[0].name), len(graph.tensors))
    device = {pool.owner: d for d, pool in enumerate(graph.pools)}
    pool = {pool.name: d for d, pool in enumerate(graph.pools)}
    runs: list[list[int | None]] = [[None] * len(graph.program) for _ in graph.pools]
    places: list[list[int | None]] = [[None] * count for _ in graph.pools]
    runs[0], places[0] = [op.id for op in graph.program], list(range(count))
    base = list(range(len(graph.tensors)))
    copies: dict[tuple[int, int, int], int] = {}
    for op in graph.ops[first:]:
        known = False
        if op.is_transfer and op.optional and len(op.inputs) == len(op.outputs) == 1:
            (before,), (after,) = op.inputs, op.outputs
            source, target = pool[graph.tensors[before].pool], pool[graph.tensors[after].pool]
            if source == 0 and target and after >= count > before:
                places[target][before], base[after] = after, before
            key = source, target, base[before]
            known = graph.pools[source].computes and graph.pools[target].computes
            known = known and source != target and base[before] == base[after] < count and key not in copies and not op.replaces
            copies[key] = op.id
        elif len(op.replaces) == 1 and (d := device.get(op.stream, 0)):
            replaced = graph.ops[op.replaces[0]]
            runs[d][replaced.id] = op.id
            known = (_map_tensors(places[d], replaced.inputs), _map_tensors(places[d], replaced.outputs)) == (
                op.inputs,
                op.outputs,
            )
        if not known:
            raise _make_unknown_ops_error(op)
    if {t for here in places for t in here if t is not None} != set(range(len(graph.tensors))):
        raise GraphError(
            "the graph has tensors on other devices that are not copies: only graphs with placement and no other "
            "option are supported here"
        )
    tensors = tuple(replace(t, producers=tuple(p for p in t.producers if p < first)) for t in graph.tensors[:count])
    alone = replace(graph, ops=graph.ops[:first], tensors=tensors, pools=graph.pools[:1]) if len(graph.pools) > 1 else graph
    return Placement(
        whole=graph,
        program=alone,
        pools=graph.pools,
        runs=tuple(map(tuple, runs)),
        places=tuple(map(tuple, places)),
        copies=MappingProxyType(copies),
    )


def _make_unknown_ops_error(op: Op) -> GraphError:
    return GraphError(
        f"op {op.name!r} is optional, and neither transfers a tensor from one device to another nor replaces one op on another "
        "device: only graphs with placement and no other option are supported here"
    )


def _map_tensors(place: Sequence[int | None], tensors: Sequence[int]) -> tuple[int | None, ...]:
    return tuple(place[t] for t in tensors)
