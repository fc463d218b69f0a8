"""Placement: an op may run on another device, with copies between their memories (Schuler et al., XEngine, TACO 2022).

Each further device d has a pool, a stream that computes and owns it, and a channel to and from every other device. The optional
ops are, for each op that can run there, one that stands for it, reading and making copies ``t@d`` of the program's tensors; and
for each of these tensors copies from every memory to every other.

Static tensors live on the main device: what is read elsewhere is copied there, once or more often in a step, and freed there like
any other. So parameters that the optimizer has changed are never stale, and take memory there only while they are wanted.

Some ops stay on the main device: those that draw random numbers, which another generator would draw otherwise; those that write
in place, or read what is written, for a copy has no side of the write to be on; and those around a tensor that is held on for
another. Kept tensors end on the main device. A stand-in's workspace is that of its op, unless another was measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from graphs.errors import GraphError
from graphs.ir import Graph, Op, Tensor
from graphs.options.surroundings import OtherDevice, Surroundings
from graphs.pools import COMPUTE, Pool

COPY = "copy"  # target of the ops that copy


@dataclass(frozen=True, slots=True)
class Placement:
    """The choices that ``placed`` has given a graph. Devices are positions in `pools`, the main one 0.

    Attributes:
        whole: the graph.
        program: the graph without them, with the same ids.
        pools: of the devices.
        runs: by device and op of the program the op that executes it there, None where it cannot run.
        places: by device and tensor of the program the tensor that is its copy there, None where it never is.
        copies: by (from, to, tensor of the program) the op that copies.
    """

    whole: Graph
    program: Graph
    pools: tuple[Pool, ...]
    runs: tuple[tuple[int | None, ...], ...]
    places: tuple[tuple[int | None, ...], ...]
    copies: Mapping[tuple[int, int, int], int]


def placed(graph: Graph, surroundings: Surroundings) -> Graph:
    """`graph` with the choice of running its ops on ``surroundings.others`` as well.

    Raises:
        GraphError: the graph has choices already; no other device is given, one has the name of another memory, or not a time
            for each op; or no op can run there.
    """
    if not graph.plain:
        raise GraphError("placement is added to a graph that has choices already: add it first, and once")
    if not surroundings.others:
        raise GraphError(
            "placement needs another device, and the times of the ops there: trace the step with --other-devices cpu:2, or cuda "
            "(planner.trace(..., other_devices=['cuda'])), or give Surroundings(others=...)"
        )
    writer = _Writer(graph)
    for device in surroundings.others:
        writer.add_device(device)
    return writer.graph()


class _Writer:
    """Adds devices to a graph, one after the other."""

    def __init__(self, graph: Graph) -> None:
        self.source = graph
        self.ops, self.tensors = list(graph.ops), list(graph.tensors)
        self.pools = list(graph.pools)
        self.places = [list(range(len(graph.tensors)))]
        self.others: list[OtherDevice] = []
        self.fixed = fixed(graph)

    def add_device(self, device: OtherDevice) -> None:
        """Pool, tensors, copies to it, stand-ins, and copies from it: in this order each reads what there is already."""
        if len(device.times_s) != len(self.source.ops):
            raise GraphError(
                f"device {device.name!r} has {len(device.times_s)} times for a program of {len(self.source.ops)} ops: give one "
                "for each, None where an op cannot run there"
            )
        moved = [
            (op, time_s)
            for op, time_s in zip(self.source.ops, device.times_s, strict=True)
            if time_s is not None and op.id not in self.fixed
        ]
        if not moved:
            raise GraphError(f"no op can run on device {device.name!r}: each has no time there, or must stay on the main device")
        stream = f"{COMPUTE}@{device.name}"
        self.pools.append(Pool(device.name, stream, device.capacity_bytes))
        self.others.append(device)
        there = dict.fromkeys(t for op, _ in moved for t in (*op.inputs, *op.outputs))
        place = [-1] * len(self.source.tensors)
        for t in sorted(there):
            place[t] = len(self.tensors)
            base = self.source.tensors[t]
            size_bytes = -(-base.size_bytes // device.block_bytes) * device.block_bytes
            copy = Tensor(place[t], f"{base.name}@{device.name}", size_bytes, (), base.kind, base.shape, base.dtype)
            self.tensors.append(replace(copy, pool=device.name))
        self.places.append(place)
        here = len(self.places) - 1
        for source in range(here):
            self._copy_all(source, here)
        for op, time_s in moved:
            inputs, outputs = (tuple(place[t] for t in tensors) for tensors in (op.inputs, op.outputs))
            self._add(
                replace(
                    op,
                    name=f"{op.name}@{device.name}",
                    inputs=inputs,
                    outputs=outputs,
                    time_s=time_s,
                    workspace_bytes=device.workspaces_bytes[op.id] if device.workspaces_bytes else op.workspace_bytes,
                    stream=stream,
                    optional=True,
                    stands_for=(op.id,),
                    overwrites=(),
                    differs="" if op.id in device.exact else device.differs,
                )
            )
        for target in range(here):
            self._copy_all(here, target)

    def _copy_all(self, source: int, target: int) -> None:
        """Copies of all tensors that may be in both memories; none to where a tensor is static."""
        link = self.others[max(source, target) - 1]
        names = self.pools[source].name, self.pools[target].name
        for t in self.source.tensors:
            before, after = self.places[source][t.id], self.places[target][t.id]
            if before < 0 or after < 0 or (t.static and target == 0):
                continue
            phase = self.source.ops[t.producers[0] if t.producers else 0].phase
            time_s = link.latency_s + t.size_bytes / link.bytes_per_s
            copy = Op(0, f"copy_{t.name}_{'_to_'.join(names)}", COPY, (before,), (after,), time_s)
            self._add(replace(copy, phase=phase, stream="_to_".join(names), optional=True))

    def _add(self, op: Op) -> None:
        op = replace(op, id=len(self.ops))
        self.ops.append(op)
        for t in op.outputs:
            self.tensors[t] = replace(self.tensors[t], producers=(*self.tensors[t].producers, op.id))

    def graph(self) -> Graph:
        """What has become of it."""
        return Graph(tuple(self.ops), tuple(self.tensors), self.source.kept, self.source.provenance, tuple(self.pools))


def fixed(graph: Graph) -> frozenset[int]:
    """Ops of the program that stay on the main device."""
    written = {t for op in graph.ops for t in op.mutates}
    held = {t.id for t in graph.tensors if t.held_for is not None}
    return frozenset(
        op.id for op in graph.ops if op.random or op.mutates or not (written | held).isdisjoint((*op.inputs, *op.outputs))
    )


def is_copy(op: Op) -> bool:
    """Whether it copies a tensor from one device to another."""
    return op.optional and op.target == COPY


def is_placed(graph: Graph) -> bool:
    """Whether ``placed`` has given `graph` other devices."""
    return any(pool.owner == f"{COMPUTE}@{pool.name}" for pool in graph.pools)


def placement_of(graph: Graph) -> Placement:
    """The choices of a graph that ``placed`` has made; of a plain graph those of one device.

    Raises:
        GraphError: it has other choices than these.
    """
    program = graph.program
    count = next((t.id for t in graph.tensors if t.pool != graph.pools[0].name), len(graph.tensors))
    device = {pool.owner: d for d, pool in enumerate(graph.pools)}
    pool = {pool.name: d for d, pool in enumerate(graph.pools)}
    runs: list[list[int | None]] = [[None] * len(program) for _ in graph.pools]
    places: list[list[int | None]] = [[None] * count for _ in graph.pools]
    runs[0], places[0] = [op.id for op in program], list(range(count))
    base = list(range(len(graph.tensors)))
    copies: dict[tuple[int, int, int], int] = {}
    for op in graph.ops[len(program) :]:
        known = False
        if op.target == COPY and len(op.inputs) == len(op.outputs) == 1:
            (before,), (after,) = op.inputs, op.outputs
            source, target = pool[graph.tensors[before].pool], pool[graph.tensors[after].pool]
            if source == 0 and target and after >= count > before:
                places[target][before], base[after] = after, before
            key = source, target, base[before]
            known = source != target and base[before] == base[after] < count and key not in copies and not op.stands_for
            copies[key] = op.id
        elif len(op.stands_for) == 1 and (d := device.get(op.stream, 0)):
            stood_for = program[op.stands_for[0]]
            runs[d][stood_for.id] = op.id
            known = (_placed(places[d], stood_for.inputs), _placed(places[d], stood_for.outputs)) == (op.inputs, op.outputs)
        if not known:
            raise GraphError(
                f"op {op.name!r} is optional, and neither copies a tensor from one device to another nor stands for one op on "
                "another device: this takes graphs with no other choice than placement"
            )
    if {t for here in places for t in here if t is not None} != set(range(len(graph.tensors))):
        raise GraphError("the graph has tensors on other devices that are no copies: this takes graphs that have placement alone")
    tensors = tuple(replace(t, producers=t.producers[:1]) for t in graph.tensors[:count])
    return Placement(
        whole=graph,
        program=graph if graph.plain else Graph(program, tensors, graph.kept, graph.provenance),
        pools=graph.pools,
        runs=tuple(map(tuple, runs)),
        places=tuple(map(tuple, places)),
        copies=MappingProxyType(copies),
    )


def _placed(place: Sequence[int | None], tensors: Sequence[int]) -> tuple[int | None, ...]:
    return tuple(place[t] for t in tensors)
