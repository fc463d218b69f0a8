"""What is compared of captured graphs, to find those of smaller batches."""

from dataclasses import dataclass

import torch
from torch import fx

from planner.capture.signature import has_fewer_rows


@dataclass(frozen=True, slots=True)
class Outline:
    """What is compared of two graphs that Dynamo has captured.

    Attributes:
        ops: kinds and targets of the nodes, in order.
        shapes: those of the inputs; () for one that is no tensor.
    """

    ops: tuple[tuple[str, str], ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, module: fx.GraphModule) -> "Outline":
        """Return the outline of a captured graph."""
        inputs = (node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder"))
        shapes = tuple(tuple(value.shape) if isinstance(value, torch.Tensor) else () for value in inputs)
        return cls(tuple((node.op, str(node.target)) for node in module.graph.nodes), shapes)

    def is_smaller(self, planned: "Outline") -> bool:
        """Return True if this is the planned graph with fewer rows."""
        if self.ops != planned.ops or self.shapes == planned.shapes:
            return False
        return all(a == b or has_fewer_rows(a, b) for a, b in zip(self.shapes, planned.shapes, strict=True))
