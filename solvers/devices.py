"""The other devices of a graph, as the exact solver sees them: their streams, times and memories."""

from dataclasses import dataclass

from graphs.ir import Graph, Op
from graphs.pools import COMPUTE, Pool
from solvers.places import Places


@dataclass(frozen=True, slots=True)
class Memory:
    """A pool with a capacity, other than the main device's.

    Attributes:
        capacity_bytes: for tensors that are not static.
        sizes: b_t for each tensor in the pool, 0 for others.
        own_bytes: for each op, its inputs, outputs and workspace in the pool.
    """

    capacity_bytes: int
    sizes: tuple[int, ...]
    own_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OtherDevices:
    """Other devices, and the channels between all devices; there may be none. Ops are numbered as in ``Places``.

    Attributes:
        streams: for each stream other than the main device's, its ops.
        seconds: time of each of these ops; 0 for those of the main device.
        bases: for each tensor, the tensor of the program that it is a copy of, or itself.
        device: for each tensor, the number of its pool; the main device's is 0.
        memories: the pools that have a capacity.
    """

    streams: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    bases: tuple[int, ...]
    device: tuple[int, ...]
    memories: tuple[Memory, ...]

    def __bool__(self) -> bool:
        return bool(self.streams)


def other_devices_of(graph: Graph, places: Places) -> OtherDevices:
    """Return the other devices of a graph without transfers to the host."""
    ops = [graph.ops[op] for op in places.ids]
    aside = [stream for stream in graph.streams if stream != COMPUTE]
    bases = list(range(len(graph.tensors)))
    for op in (op for op in graph.ops if op.is_transfer):
        (source,), (copy,) = op.inputs, op.outputs
        if graph.tensors[copy].pool != graph.pools[0].name:
            bases[copy] = bases[source]
    number = {pool.name: d for d, pool in enumerate(graph.pools)}
    return OtherDevices(
        streams=tuple(tuple(i for i, op in enumerate(ops) if op.stream == stream) for stream in aside),
        seconds=tuple(0.0 if op.stream == COMPUTE else op.time_s for op in ops),
        bases=tuple(bases),
        device=tuple(number[t.pool] for t in graph.tensors),
        memories=tuple(_memory(graph, places, pool) for pool in graph.pools[1:] if pool.capacity_bytes is not None),
    )


def _memory(graph: Graph, places: Places, pool: Pool) -> Memory:
    assert pool.capacity_bytes is not None
    sizes = sizes_in(graph, pool)
    ops = [graph.ops[op] for op in places.ids]
    own = tuple(sum(sizes[t] for t in {*op.inputs, *op.outputs}) + workspace_bytes_in(pool, op) for op in ops)
    return Memory(pool.capacity_bytes - graph.static_bytes_by_pool[pool.name], sizes, own)


def sizes_in(graph: Graph, pool: Pool) -> tuple[int, ...]:
    """Return the size of each tensor in `pool`; 0 for static tensors and tensors of other pools."""
    return tuple(0 if t.static or t.pool != pool.name else t.size_bytes for t in graph.tensors)


def workspace_bytes_in(pool: Pool, op: Op) -> int:
    """Return the workspace of `op` in `pool`."""
    return op.workspace_bytes if op.stream == pool.owner else 0
