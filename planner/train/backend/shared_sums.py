"""Gradients that a planned graph and other consumers of its inputs add up.

Eager PyTorch adds the gradient of each use of a tensor to the sum of those of later uses. A graph gives one sum of its own uses,
to which autograd adds: that rounds otherwise if there are several, and the gradient of a later use was there before. Autograd
adds to the gradient that comes first in place, so that the sum is where that was.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from planner.graphs.short_tracebacks import warn_caller
from planner.torch_private.capture import find_backward_nodes
from planner.torch_private.core import at_end_of_backward, current_autograd_node
from planner.train.backend.planned_graph import describe_rounding


@dataclass(slots=True)
class SharedSums:
    """The sums of one graph, which warns once.

    Attributes:
        names: of each input that the graph reads several times; "" for others.
    """

    names: Sequence[str]
    said: bool = False

    def watch(self, outputs: object) -> None:
        """Warn in backward passes from `outputs` if gradients are added up otherwise than in eager PyTorch."""
        if any(self.names) and not self.said:
            for node in find_backward_nodes(outputs):
                node.register_hook(self._watch_inputs)

    def _watch_inputs(self, gradients: Sequence[torch.Tensor | None], _: object) -> None:
        behind = current_autograd_node().next_functions
        if len(gradients) != len(self.names):  # AOTAutograd has other inputs than the graph
            return
        for name, (node, index), gradient in zip(self.names, behind, gradients, strict=True):
            if name and node is not None and gradient is not None:
                check = partial(self._compare, name, index, gradient.data_ptr())
                at_end_of_backward(node.register_prehook(check).remove)

    def _compare(self, name: str, index: int, address: int, sums: Sequence[torch.Tensor | None]) -> None:
        total = sums[index]
        if self.said or total is None or total.data_ptr() == address:
            return
        self.said = True
        warn_caller(
            f"{name} is used several times in a graph and outside of it too: its gradients are added up in another order than in "
            f"eager PyTorch, which may change their last bits ({describe_rounding([total.dtype])}). "
            "TORCH_LOGS=graph_breaks names the lines between the graphs: rewrite them, or train in a block of "
            "planner.rematerialize(budget=...), which needs no graph"
        )
