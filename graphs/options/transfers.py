"""A builder shared by offload and placement: it adds pools, copies of tensors, and transfers to a graph."""

from dataclasses import replace

from graphs.ir import Graph, Op, Tensor
from graphs.pools import TRANSFER, Channel


class OptionBuilder:
    """A builder that adds pools, tensors and optional ops to a graph.

    Attributes:
        source: the graph.
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
