"""Gradients of pooling without the tensor of which their kernels read only the shape."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from graphs.ir import Phase
from planner.capture.options.pack.finder import PackFinder, allocate_like
from planner.capture.rewrites.outputs import get_fake

aten = torch.ops.aten

# For each kernel its variant with an output argument, and the argument's name. Each is called with the incoming gradient and
# the tensor first.
WRITING: Mapping[Any, tuple[Callable[..., Any], str]] = MappingProxyType(
    {
        aten.max_pool2d_with_indices_backward.default: (aten.max_pool2d_with_indices_backward.grad_input, "grad_input"),
        aten.avg_pool2d_backward.default: (aten.avg_pool2d_backward.grad_input, "grad_input"),
        aten._adaptive_avg_pool2d_backward.default: (aten._adaptive_avg_pool2d_backward.out, "out"),
    }
)


@dataclass(frozen=True, slots=True)
class OfShape:
    """A gradient of pooling that passes its own memory to the kernel for the shape.

    Attributes:
        result: fake.
        target: kernel of the program.
        arguments: its arguments after the gradient and the tensor, without the indices of max-pooling, which come last.
    """

    result: torch.Tensor
    target: Any
    arguments: tuple[Any, ...]

    def __call__(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the gradient."""
        result = allocate_like(self.result, given[0])
        self.write(result, *given)
        return (result,)

    def write(self, result: torch.Tensor, gradient: torch.Tensor, *indices: torch.Tensor) -> None:
        """Write the gradient to `result`; all arguments may be slices of the batch."""
        kernel, name = WRITING[self.target]
        kernel(gradient, result, *self.arguments, *indices, **{name: result})


def build_of_shape(node: fx.Node) -> OfShape:
    """Return the computation of `node`, a call of one of ``WRITING``."""
    return OfShape(get_fake(node), node.target, tuple(arg for arg in node.args[2:] if not isinstance(arg, fx.Node)))


def offer(finder: PackFinder) -> None:
    """Add an op for each such gradient without the tensor, if nothing else in the backward pass needs that."""
    for op, node in finder.iterate_calls(WRITING, Phase.BACKWARD):
        x = node.args[1]
        assert isinstance(x, fx.Node)
        if not finder.is_needed(x):
            reads = [arg for arg in (node.args[0], *node.args[2:]) if isinstance(arg, fx.Node)]
            finder.add(build_of_shape(node), reads, like=op, of=op.name, does="of_shape", makes=op.outputs[0], alternative=True)
