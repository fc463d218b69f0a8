"""The streams and pools of a graph: the main device, other devices, the host, and the channels between them."""

import math

from planner.graphs.ir import Graph, Op, Phase
from planner.graphs.options.transfers import find_transfers
from planner.graphs.pools import DEVICE, Pool
from planner.graphs.schedule import Compute, Free


class Streams:
    """The ops and tensors of a graph by id, with its streams and pools by position. The main device's pool is 0.

    Attributes:
        owner: for each pool the stream that owns it.
        computes: for each pool, True if it is the memory of a device that runs ops; the host's is not.
        limits_bytes, static_bytes: capacity (infinite without a limit) and static memory of each pool.
        stream, time_s, inputs, outputs, mutates: of each op; inputs without static tensors.
        transfers: those of the graph, by op; `origin`: the pool of what each reads.
        home: for each op the pool that holds its outputs and workspace: all are in one.
        need_bytes: for each op the size of its outputs and workspace.
        overwritable: for each op the inputs that an output may overwrite.
        forward: the ops of the program's forward pass that are executed on devices.
        pool, sizes, kept: of each tensor; static ones have size 0.
        base: for each tensor, the tensor of the program that it is a copy of, or itself.
        compute, free: the steps that execute each op and free each tensor.
    """

    def __init__(self, graph: Graph) -> None:
        ops, tensors = graph.ops, graph.tensors
        stream = {name: i for i, name in enumerate(graph.streams)}
        number = {pool.name: d for d, pool in enumerate(graph.pools)}
        self.names = graph.streams
        self.owner = [stream[pool.owner] for pool in graph.pools]
        self.computes = [pool.computes for pool in graph.pools]
        self.limits_bytes = [math.inf if pool.capacity_bytes is None else pool.capacity_bytes for pool in graph.pools]
        self.static_bytes = [graph.static_bytes_by_pool[pool.name] for pool in graph.pools]
        self.pool = [number[t.pool] for t in tensors]
        self.sizes = [0 if t.static else t.size_bytes for t in tensors]
        self.kept = [t.id in graph.kept for t in tensors]
        self.base = list(range(len(tensors)))
        self.transfers = find_transfers(graph)
        for op in self.transfers:
            if self.pool[target := ops[op].outputs[0]]:  # elsewhere than the program's tensors
                self.base[target] = self.base[ops[op].inputs[0]]
        self.stream = [stream[op.stream] for op in ops]
        self.time_s = [op.time_s for op in ops]
        self.inputs = [tuple(t for t in op.inputs if not tensors[t].static) for op in ops]
        self.outputs = [op.outputs for op in ops]
        self.mutates = [op.mutates for op in ops]
        self.origin = {op: self.pool[ops[op].inputs[0]] for op in self.transfers}
        self.home = [self.pool[op.outputs[0]] if op.outputs else self.owner.index(stream[op.stream]) for op in ops]
        self.need_bytes = [sum(self.sizes[t] for t in op.outputs) + op.workspace_bytes for op in ops]
        self.forward = [op.id for op in graph.program if op.phase is Phase.FORWARD and op.id not in self.transfers]
        self.overwritable = [frozenset(t for _, t in op.overwrites) for op in ops]
        self.compute = [Compute(op.id) for op in ops]
        self.free = [Free(t.id) for t in tensors]


def list_sizes(graph: Graph, pool: Pool) -> tuple[int, ...]:
    """Return the size of each tensor in `pool`; 0 for static tensors and tensors of other pools."""
    return tuple(0 if t.static or t.pool != pool.name else t.size_bytes for t in graph.tensors)


def get_workspace_bytes(pool: Pool, op: Op) -> int:
    """Return the workspace of `op` in `pool`; that of a transfer is on the main device."""
    return op.workspace_bytes if op.stream == pool.owner or (op.is_transfer and pool.name == DEVICE) else 0
