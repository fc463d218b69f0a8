"""The graph of a batch that was not captured, from those of two others: sizes and times as straight lines in the batch."""

from dataclasses import dataclass, replace

from graphs.errors import GraphError
from graphs.ir import Graph


@dataclass(frozen=True, slots=True)
class Line:
    """Two graphs of the same ops, at two batches; what lies between and beyond them is read off a straight line.

    Attributes:
        small, large: the batches.
        at_small, at_large: their graphs.

    Raises:
        GraphError: the graphs do not have the same ops and tensors.
    """

    small: int
    large: int
    at_small: Graph
    at_large: Graph

    def __post_init__(self) -> None:
        if not 0 < self.small < self.large:
            raise GraphError(f"batches {self.small} and {self.large} make no line: the second must be the larger, both above 0")
        if not same_ops(self.at_small, self.at_large):
            raise GraphError(f"the graphs of batches {self.small} and {self.large} do not have the same ops")

    def graph(self, batch: int) -> Graph:
        """The graph at `batch` (1 or more). Sizes are rounded to bytes; nothing is below 0.

        Shapes are those of the smaller graph.
        """
        past, length = batch - self.small, self.large - self.small

        def size(low: int, high: int) -> int:
            # In whole numbers: a float would lose bytes of large tensors.
            return max(0, low + (high - low) * past // length)

        tensors = tuple(
            replace(low, size_bytes=size(low.size_bytes, high.size_bytes))
            for low, high in zip(self.at_small.tensors, self.at_large.tensors, strict=True)
        )
        ops = tuple(
            replace(
                low,
                workspace_bytes=size(low.workspace_bytes, high.workspace_bytes),
                time_s=max(0.0, low.time_s + (high.time_s - low.time_s) * past / length),
            )
            for low, high in zip(self.at_small.ops, self.at_large.ops, strict=True)
        )
        made = {"scaled_from_batches": [self.small, self.large], "scaled_to_batch": batch}
        return Graph(ops, tensors, self.at_small.kept, {**self.at_small.provenance, **made})


def same_ops(one: Graph, other: Graph) -> bool:
    """Whether two graphs differ in sizes, times and names only."""
    return _structure(one) == _structure(other)


def _structure(graph: Graph) -> object:
    ops = [(op.target, op.inputs, op.outputs, op.mutates, op.phase, op.recomputable, op.random) for op in graph.ops]
    return ops, [(t.producer, t.kind) for t in graph.tensors], graph.kept
