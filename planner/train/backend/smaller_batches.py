"""Smaller batches that eager PyTorch takes within the budget: what Dynamo has captured for them runs as it is, without a plan.

Dynamo has captured them by then: the same ops in the same order show that the code does the same for fewer rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from planner.capture.signature import has_fewer_rows
from planner.measure.smaller_batch import is_sure_to_fit
from planner.torch_private.core import pytree

if TYPE_CHECKING:
    from planner.train.backend.shared_budget import SharedBudget


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


def run_smaller(module: fx.GraphModule, inputs: Sequence[Any], budget: "SharedBudget") -> Callable[..., Any] | None:
    """Return the function that runs `module` by eager PyTorch; None unless it is one of a smaller batch and sure to fit."""
    returned = pytree.tree_leaves(module.graph.output_node().args[0])
    outputs = [node.meta.get("example_value") if isinstance(node, fx.Node) else None for node in returned]
    outline = Outline.of(module)
    for graph in budget.list_alone():
        captured = graph.captured
        if (
            graph.outline is not None
            and outline.is_smaller(graph.outline)
            and is_sure_to_fit(
                captured.graph,
                captured.program,
                graph.list_static(inputs, outputs),
                budget.memory,
                budget.compute_room_beside(inputs),
            )
        ):
            return budget.run_eagerly(module, graph.device)
    return None
