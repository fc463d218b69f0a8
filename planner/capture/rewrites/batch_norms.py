"""Batch norms: eager PyTorch's kernels, and the running statistics that these update and do not need.

cuDNN's kernel updates the running statistics, and its schema does not declare it. PyTorch therefore captures its own kernel
instead, which rounds differently, takes another time and saves other tensors. ``_batch_norm_with_update`` has a complete schema,
calls cuDNN's kernel under the same conditions as eager PyTorch, and returns its reserve tensor
(ATen/native/cuda/Normalization.cu, ATen/native/cudnn/BatchNorm.cpp).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from planner.torch_private.core import DispatchKey, OpOverload, disable_python_dispatcher, register_python_kernels

aten = torch.ops.aten

_STATISTICS = slice(3, 5)  # the running mean and variance among the arguments


@dataclass(frozen=True, slots=True)
class _BatchNorm:
    """An op of batch norm, by positions among its arguments.

    Attributes:
        training: position of the flag; None if the op always trains.
        backward: True for an op of the backward pass.
        updated: the paths of the new running statistics among the results.
        without: for a forward op, the op that returns the other results, under the same paths, and reads no running statistics.
        in_place: for a forward op that returns new running statistics, the op that writes them over the old ones.
    """

    training: int | None = None
    backward: bool = False
    updated: tuple[tuple[int, ...], ...] = ()
    without: Callable[..., tuple[OpOverload, tuple[Any, ...]]] | None = None
    in_place: OpOverload | None = None


def _build_native(x: Any, weight: Any, bias: Any, _mean: Any, _variance: Any, *rest: Any) -> tuple[OpOverload, tuple[Any, ...]]:
    return aten._native_batch_norm_legit.no_stats, (x, weight, bias, *rest)


def _build_cudnn(x: Any, weight: Any, bias: Any, _mean: Any, _variance: Any, *rest: Any) -> tuple[OpOverload, tuple[Any, ...]]:
    return aten.cudnn_batch_norm.default, (x, weight, bias, None, None, True, *rest)


_OPS: dict[object, _BatchNorm] = {
    aten._native_batch_norm_legit_functional.default: _BatchNorm(
        training=5, updated=((3,), (4,)), without=_build_native, in_place=aten._native_batch_norm_legit.default
    ),
    aten._native_batch_norm_legit.default: _BatchNorm(training=5, without=_build_native),
    aten._batch_norm_with_update_functional.default: _BatchNorm(
        updated=((4,), (5,)), without=_build_cudnn, in_place=aten._batch_norm_with_update.default
    ),
    aten._batch_norm_with_update.default: _BatchNorm(without=_build_cudnn),
    aten.native_batch_norm_backward.default: _BatchNorm(training=7, backward=True),
    aten.batch_norm_backward.default: _BatchNorm(training=7, backward=True),
}


def capture_batch_norms_as_eager() -> AbstractContextManager[object]:
    """Capture cuDNN's kernel of batch norm where eager PyTorch runs it."""
    return register_python_kernels(aten.cudnn_batch_norm.default, {DispatchKey.Autograd: call_cudnn_batch_norm})


def call_cudnn_batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,  # noqa: FBT001  # the signature of the operator
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Call an op whose schema declares the update of the running statistics; without such an update the op itself."""
    results: tuple[Tensor, Tensor, Tensor, Tensor]
    if training and mean is not None and variance is not None:
        results = aten._batch_norm_with_update.default(x, weight, bias, mean, variance, momentum, eps)
        return results
    with disable_python_dispatcher():  # or this function would be called again
        results = aten.cudnn_batch_norm.default(x, weight, bias, mean, variance, training, momentum, eps)
        return results


def find_ignored_inputs(node: fx.Node) -> frozenset[fx.Node]:
    """Return the inputs that do not influence the results of `node` that are recomputed: running statistics in training mode.

    The forward op updates them, though: those that another op has computed are inputs of its first execution.
    """
    op = _OPS.get(node.target)
    if op is None or (op.training is not None and not node.args[op.training]):
        return frozenset()
    return frozenset(
        arg for arg in node.args[_STATISTICS] if isinstance(arg, fx.Node) and (op.backward or arg.op == "placeholder")
    )


def build_without_statistics(node: fx.Node) -> tuple[Any, tuple[Any, ...], tuple[tuple[int, ...], ...]]:
    """Return the call for `node` after the forward pass: target, arguments, and the paths of results that are left out.

    `node` has ``find_ignored_inputs``.
    The running statistics of a batch norm in training mode are overwritten by then; neither its backward pass nor a second
    execution needs them.
    """
    op, ignored = _OPS[node.target], find_ignored_inputs(node)
    if op.without is not None:
        return *op.without(*node.args), op.updated
    return node.target, tuple(None if arg in ignored else arg for arg in node.args), ()


def find_updates(node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Return the running statistics that a batch norm in training mode reads, with their new values; [] for other nodes."""
    op, ignored = _OPS.get(node.target), find_ignored_inputs(node)
    if op is None or op.in_place is None or len(ignored) < len(op.updated):
        return []
    values = {user.args[1]: user for user in node.users}
    pairs = zip(node.args[_STATISTICS], op.updated, strict=True)
    return [(before, values[index]) for before, (index,) in pairs if isinstance(before, fx.Node) and index in values]


def update_statistics_in_place(node: fx.Node) -> None:
    """Let a batch norm overwrite its running statistics; nothing reads the new ones among its results."""
    op = _OPS[node.target]
    assert op.in_place is not None
    for _, after in find_updates(node):
        for gradient in list(after.users):
            gradient.args = tuple(None if arg is after else arg for arg in gradient.args)
        node.graph.erase_node(after)
    node.target = op.in_place
    node.meta["val"] = node.meta["val"][: -len(op.updated)]
