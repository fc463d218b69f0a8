"""Gradients of activations from their result, which the next op needs anyway, in place of their input."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from planner.capture.options.pack.finder import PackFinder
from planner.capture.rewrites.outputs import get_fake, is_same_layout
from planner.torch_private.core import OpOverload

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation whose gradient depends on whether its input is in a range.

    Attributes:
        forward: kernel of the activation.
        arguments: number of arguments after the input that it shares with its gradient.
        says: given these arguments and a dtype, returns whether each result is in the range exactly if its input is.
    """

    forward: Any
    arguments: int
    says: Callable[[tuple[Any, ...], torch.dtype], bool]


def is_of_type(number: Any, dtype: torch.dtype) -> bool:
    """Return True if `number` is representable in `dtype`: kernels compare in different dtypes."""
    return bool(torch.tensor(number, dtype=dtype).item() == number)


def _is_clamp(arguments: tuple[Any, ...], dtype: torch.dtype) -> bool:
    lowest, highest = arguments
    return lowest < highest and is_of_type(lowest, dtype) and is_of_type(highest, dtype)


ACTIVATIONS: Mapping[Any, Activation] = MappingProxyType(
    {
        aten.hardtanh_backward.default: Activation(aten.hardtanh.default, 2, _is_clamp),
        aten.leaky_relu_backward.default: Activation(aten.leaky_relu.default, 1, lambda arguments, _: bool(arguments[0] > 0)),
    }
)


def compute_from_result(*given: torch.Tensor, target: Any, arguments: Sequence[Any]) -> tuple[torch.Tensor]:
    """Return the gradient by its kernel `target`, `given` the incoming gradient and the result; `arguments` are further ones."""
    return (target(*given, *arguments),)


def find_needed_result(finder: PackFinder, node: fx.Node) -> fx.Node | None:
    """Return the result that can replace the input of `node`, an activation's gradient, if the backward pass needs it."""
    x = node.args[1]
    assert isinstance(x, fx.Node)
    if (activation := ACTIVATIONS.get(node.target)) is None:
        return None
    arguments = tuple(node.args[2 : 2 + activation.arguments])
    for user in x.users:
        if (
            user.target is activation.forward
            and _get_arguments(user) == arguments
            and activation.says(arguments, get_fake(x).dtype)
        ):
            same = get_fake(user).dtype == get_fake(x).dtype and is_same_layout(get_fake(user), get_fake(x))
            return user if same and finder.is_saved(user) else None
    return None


def _get_arguments(node: fx.Node) -> tuple[Any, ...]:
    """Return the arguments of the activation `node` after its input."""
    assert isinstance(node.target, OpOverload)
    schema = node.target._schema.arguments[1:]
    given = node.args[1:]
    rest = (node.kwargs.get(argument.name, argument.default_value) for argument in schema[len(given) :])
    return (*given, *rest)


def offer(finder: PackFinder) -> None:
    """Add an op for each such gradient, if nothing else in the backward pass needs its input."""
    for op, node in finder.iterate_gradients(ACTIVATIONS):
        gradient, x, *arguments = node.args
        assert isinstance(gradient, fx.Node) and isinstance(x, fx.Node)
        if not finder.is_needed(x) and (result := find_needed_result(finder, node)) is not None:
            called = partial(compute_from_result, target=node.target, arguments=arguments)
            finder.add(called, [gradient, result], op, "from_result", op.outputs[0])
