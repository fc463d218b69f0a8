"""Transfers: what channels carry in parallel with the computation; and a builder that adds pools, copies and transfers.

A reload from the host, a copy to another device, a gather of sharded parameters and a reduction of their gradients are one
concept. They differ in properties that solvers ask for: a transfer without sources may run at any time, since what it reads is
static; its targets come together; some have no other producer, so that their first readers wait for the channel too; and one that
is an op of the program must run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.graphs.ir import Graph, Op, Tensor
from planner.graphs.pools import TRANSFER, Channel


@dataclass(frozen=True, slots=True)
class Transfer:
    """An op on a channel.

    Attributes:
        time_s: seconds of the channel: by its rate and latency, or measured.
        sources: the tensors that it reads, without static ones, which are always there.
        targets: the tensors that it makes; they come together.
        lent_bytes: memory of the main device, from the issue until the computation waits for the transfer.
        must_run: True if it is an op of the program; others are executed as a schedule wants.
    """

    op: int
    stream: str
    time_s: float
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    lent_bytes: int = 0
    must_run: bool = False

    @property
    def may_be_early(self) -> bool:
        """True if it may be issued before earlier ops of the program: its sources are always there."""
        return not self.sources


def find_transfers(graph: Graph) -> Mapping[int, Transfer]:
    """Return the transfers of `graph` by op, those of the program first."""
    return {
        op.id: Transfer(
            op=op.id,
            stream=op.stream,
            time_s=op.time_s,
            sources=tuple(t for t in op.inputs if not graph.tensors[t].static),
            targets=op.outputs,
            lent_bytes=op.workspace_bytes,
            must_run=not op.optional,
        )
        for op in graph.ops
        if op.is_transfer
    }


class OptionBuilder:
    """A builder that adds pools, tensors and optional ops to a graph.

    Attributes:
        pools: its pools, and the added ones.
    """

    def __init__(self, graph: Graph) -> None:
        self.source = graph
        self.pools = list(graph.pools)
        self._ops, self._tensors = list(graph.ops), list(graph.tensors)

    def add_copy(self, tensor: Tensor, pool: str, block_bytes: int = 1) -> int:
        """Add a copy of `tensor` in `pool`, without a producer, in whole blocks of `block_bytes`; return its id."""
        number, size_bytes = len(self._tensors), -(-tensor.size_bytes // block_bytes) * block_bytes
        copy = Tensor(number, f"{tensor.name}@{pool}", size_bytes, (), tensor.kind, tensor.shape, tensor.dtype, pool=pool)
        self._tensors.append(copy)
        return number

    def add_transfer(self, tensor: Tensor, before: int, after: int, channel: Channel) -> None:
        """Add a transfer over `channel` that produces `after` from `before`, which are `tensor` or copies of it."""
        producer = self.source.ops[tensor.producers[0] if tensor.producers else 0]
        self.add_op(
            Op(
                id=len(self._ops),
                name=f"copy_{tensor.name}_{channel.stream}",
                target=TRANSFER,
                inputs=(before,),
                outputs=(after,),
                time_s=channel.time_s(tensor.size_bytes),
                phase=producer.phase,
                stream=channel.stream,
                optional=True,
            )
        )

    def add_op(self, op: Op) -> None:
        """Add `op` after the others, with a new id."""
        op = replace(op, id=len(self._ops))
        self._ops.append(op)
        for t in op.outputs:
            self._tensors[t] = replace(self._tensors[t], producers=(*self._tensors[t].producers, op.id))

    def build_graph(self) -> Graph:
        """Return the graph with all additions."""
        return replace(self.source, ops=tuple(self._ops), tensors=tuple(self._tensors), pools=tuple(self.pools))
