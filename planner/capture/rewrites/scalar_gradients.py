"""Gradients of ``pow`` and ``lerp``, whose exponent or weight is an input of the step.

PyTorch's own formulas convert the number to one of C++, which a symbol is not, so that each value would be captured. These are
the same formulas in Python, with the same bits. Engines sum gradients of tensors that were broadcast.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from planner.torch_private.core import DispatchKey, OpOverload, below_autograd, disable_python_dispatcher, register_python_kernels

aten = torch.ops.aten


class _Power(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, exponent: torch.SymFloat) -> Tensor:
        ctx.save_for_backward(value)
        ctx.exponent = exponent
        with below_autograd():
            power: Tensor = aten.pow.Tensor_Scalar(value, exponent)
            return power

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (value,) = ctx.saved_tensors
        if ctx.exponent == 0.0:
            return torch.zeros_like(value), None
        return gradient * (ctx.exponent * value.pow(ctx.exponent - 1.0)).conj(), None


class _Lerp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, start: Tensor, end: Tensor, weight: torch.SymFloat) -> Tensor:
        ctx.weight = weight
        with below_autograd():
            between: Tensor = aten.lerp.Scalar(start, end, weight)
            return between

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient * (1.0 - ctx.weight), gradient * ctx.weight, None


@contextmanager
def capture_gradients_with_symbols() -> Iterator[None]:
    """Capture the gradients of ``pow`` and ``lerp`` for any value of a symbol."""
    with ExitStack() as stack:
        for op, function in ((aten.pow.Tensor_Scalar, _Power), (aten.lerp.Scalar, _Lerp)):
            kernel = partial(_apply_with_symbols, op, function.apply)
            stack.enter_context(register_python_kernels(op, {DispatchKey.Autograd: kernel}))
        yield


def _apply_with_symbols(op: OpOverload, apply: Callable[..., Any], *args: Any) -> Any:
    if isinstance(args[-1], torch.SymFloat):
        return apply(*args)
    with disable_python_dispatcher():  # or this function would be called again
        return op(*args)
