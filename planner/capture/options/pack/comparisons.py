"""Gradients of activations that depend only on whether an input is in a range, from one bit per element.

Two cells of the ablation of options use these ops, and none is slower by 0.1% without (results/options/ablation.md): its solves
are short. At 60% of its peak, the zoo's MLP takes 3.4% longer without, both solved to the optimum on the roofline of an H200.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from planner.capture.options.pack import bits
from planner.capture.options.pack.finder import PackFinder
from planner.capture.options.pack.results import find_needed_result, is_of_type
from planner.capture.rewrites.outputs import get_fake, is_dense, is_same_layout

aten = torch.ops.aten

Arguments = tuple[Any, ...]  # of the kernel, after the gradient and its input


# Called with a part of the incoming gradient, a zero, an output of the same size, and arguments; returns the result.
Answer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Arguments], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ComparisonGradient:
    """The computation of a gradient from a comparison.

    Attributes:
        ask: writes the truth values, given the kernel's input, an output and the kernel's arguments.
        yes, no: the gradient for each answer.
    """

    ask: Callable[[torch.Tensor, torch.Tensor, Arguments], object]
    yes: Answer
    no: Answer


# NaN is on the same side here as in the kernel. hardtanh, hardshrink and softshrink are excluded: on a CPU, whether a gradient
# passes at NaN depends on whether the element is processed in a vector or alone.
COMPARISONS: Mapping[Any, ComparisonGradient] = MappingProxyType(
    {
        aten.threshold_backward.default: ComparisonGradient(
            ask=lambda x, room, arguments: torch.le(x, arguments[0], out=room),
            yes=lambda _, zero, *__: zero,
            no=lambda part, *_: part,
        ),
        aten.leaky_relu_backward.default: ComparisonGradient(
            ask=lambda x, room, _: torch.gt(x, 0, out=room),
            yes=lambda part, *_: part,
            no=lambda part, _, room, arguments: torch.mul(part, arguments[0], out=room),
        ),
        aten.hardsigmoid_backward.default: ComparisonGradient(
            ask=lambda x, room, _: torch.gt(x, -3, out=room).logical_and_(torch.lt(x, 3)),
            yes=lambda part, _, room, __: torch.mul(part, 1 / 6, out=room),
            no=lambda _, zero, *__: zero,
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Compared:
    """A gradient from a comparison, on a call's arguments.

    Attributes:
        comparison, arguments: the kernel's comparison and arguments.
        like: the fake gradient, with the layout of the kernel's input.
        size: number of elements processed at a time.
    """

    comparison: ComparisonGradient
    arguments: Arguments
    like: torch.Tensor
    size: int

    def pack_bits(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        """Return the bits that the gradient needs of the kernel's input."""
        flat = bits.flatten_in_order(x, bits.order_of(self.like))
        return (bits.pack(partial(self._write, flat), flat.numel(), self.size, flat),)

    def _write(self, flat: torch.Tensor, room: torch.Tensor, begin: int, end: int) -> None:
        self.comparison.ask(flat[begin:end], room, self.arguments)

    def unpack_bits(self, gradient: torch.Tensor, packed: torch.Tensor) -> tuple[torch.Tensor]:
        """Return the gradient, laid out like the kernel's."""
        like, order = self.like, bits.order_of(self.like)
        result = gradient.new_empty_strided(like.shape, like.stride(), dtype=like.dtype)
        came, goes = bits.flatten_in_order(gradient, order), bits.flatten_in_order(result, order)
        zero = gradient.new_zeros(())
        for answers, begin, end in bits.iterate_unpacked(packed, came.numel(), self.size):
            arguments = came[begin:end], zero, goes[begin:end], self.arguments
            yes, no = self.comparison.yes(*arguments), self.comparison.no(*arguments)
            torch.where(answers, yes, no, out=goes[begin:end])
        return (result,)


def offer(finder: PackFinder) -> None:
    """Add two ops for each such gradient, to bits and from bits, if nothing else in the backward pass needs its input.

    If the result of the activation gives the same bit and is needed anyway, ``pack.results`` has a better alternative.
    """
    for op, node in finder.iterate_gradients(COMPARISONS):
        gradient, x, *arguments = node.args
        assert isinstance(gradient, fx.Node) and isinstance(x, fx.Node)
        if finder.is_needed(x) or find_needed_result(finder, node) is not None or not _is_alike(finder, node):
            continue
        comparison, size = COMPARISONS[node.target], bits.choose_part_size(get_fake(x).numel(), finder.device)
        packed = get_fake(x).new_empty(bits.count_bytes(get_fake(x).numel()), dtype=torch.uint8)
        made = finder.additions.add_tensor(f"{op.name}@bits", packed)
        found = Compared(comparison, tuple(arguments), get_fake(node), size)
        finder.add(found.pack_bits, [x], op, "to_bits", made)
        finder.add(found.unpack_bits, [gradient, made], op, "from_bits", op.outputs[0])


def _is_alike(finder: PackFinder, node: fx.Node) -> bool:
    """Return True if inputs and output of `node` share a dense layout, and its kernel's dtype is supported."""
    gradient, x, *arguments = node.args
    assert isinstance(gradient, fx.Node) and isinstance(x, fx.Node)
    dtypes = {get_fake(value).dtype for value in (gradient, x, node)}
    dense = (
        is_dense(get_fake(node))
        and is_same_layout(get_fake(x), get_fake(node))
        and is_same_layout(get_fake(gradient), get_fake(node))
    )
    # On a CPU, the bits of NaN depend on whether the element is processed in a vector or alone: for this kernel in bfloat16, for
    # products in any half precision; and in float64 a sixth differs from that of the kernel.
    if node.target is not aten.threshold_backward.default:
        return dense and dtypes == {torch.float32}
    rounded = finder.device == "cpu" and torch.bfloat16 in dtypes
    return dense and len(dtypes) == 1 and not rounded and all(is_of_type(number, get_fake(x).dtype) for number in arguments)
