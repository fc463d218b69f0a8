"""What offload and placement add alike: pools, copies of tensors there, and the ops that transfer them over channels."""

from dataclasses import replace

from graphs.ir import Graph, Op, Tensor
from graphs.pools import TRANSFER, Channel


class Writer:
    """Adds pools, tensors and optional ops to a graph.

    Attributes:
        source: the graph.
        pools: its own, and those that were added.
    """

    def __init__(self, graph: Graph) -> None:
        self.source = graph
        self.pools = list(graph.pools)
        self._ops, self._tensors = list(graph.ops), list(graph.tensors)

    def add_copy(self, tensor: Tensor, pool: str, block_bytes: int = 1) -> int:
        """Return the id of a copy of `tensor` in `pool`, whose memory comes in blocks of so many bytes; nothing makes it yet."""
        number, size_bytes = len(self._tensors), -(-tensor.size_bytes // block_bytes) * block_bytes
        copy = Tensor(number, f"{tensor.name}@{pool}", size_bytes, (), tensor.kind, tensor.shape, tensor.dtype, pool=pool)
        self._tensors.append(copy)
        return number

    def add_transfer(self, tensor: Tensor, before: int, after: int, channel: Channel) -> None:
        """Add an op that makes `after` of `before`, over `channel`: `tensor` of the graph, or copies of it."""
        maker = self.source.ops[tensor.producers[0] if tensor.producers else 0]
        self.add_op(
            Op(
                id=len(self._ops),
                name=f"copy_{tensor.name}_{channel.stream}",
                target=TRANSFER,
                inputs=(before,),
                outputs=(after,),
                time_s=channel.time_s(tensor.size_bytes),
                phase=maker.phase,
                stream=channel.stream,
                optional=True,
            )
        )

    def add_op(self, op: Op) -> None:
        """Add `op`, whatever its id, behind the others."""
        op = replace(op, id=len(self._ops))
        self._ops.append(op)
        for t in op.outputs:
            self._tensors[t] = replace(self._tensors[t], producers=(*self._tensors[t].producers, op.id))

    def graph(self) -> Graph:
        """Return the graph with all that was added."""
        return replace(self.source, ops=tuple(self._ops), tensors=tuple(self._tensors), pools=tuple(self.pools))
