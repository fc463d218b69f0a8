"""The gradient of ``prod`` as eager PyTorch computes it.

Eager PyTorch looks for zeros in the input first. Without any it divides the product by each element, which no static graph can
decide; a capture alone has the general formula of cumulative products, which rounds differently.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from planner.torch_private.core import (
    DispatchKey,
    OpOverload,
    below_autograd,
    excluded_dispatch_keys,
    force_dispatch_keys,
    included_dispatch_keys,
    register_python_kernels,
)

aten = torch.ops.aten


@torch.library.custom_op("planner::prod_backward", mutates_args=())
def prod_backward(gradient: Tensor, value: Tensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None) -> Tensor:  # noqa: FBT001
    """Return the gradient of ``value.prod()``, or of ``value.prod(dim, keepdim)``, by autograd itself."""
    with _record_gradients():
        leaf = value.detach().requires_grad_()
        product = leaf.prod(dtype=dtype) if dim is None else leaf.prod(dim, keepdim, dtype=dtype)
        (found,) = torch.autograd.grad(product, leaf, gradient)
    return found if found._base is None and found.data_ptr() != gradient.data_ptr() else found.clone()


@prod_backward.register_fake
def _(gradient: Tensor, value: Tensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None) -> Tensor:  # noqa: FBT001
    return torch.empty_like(value)


@contextmanager
def _record_gradients() -> Iterator[None]:
    """Make operators record gradients, which they do not within a custom operator."""
    included, excluded = included_dispatch_keys(), excluded_dispatch_keys()
    for key in (DispatchKey.AutogradFunctionality, DispatchKey.ADInplaceOrView):
        excluded = excluded.remove(key)
    with force_dispatch_keys(included, excluded), torch.enable_grad():
        yield


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None) -> Tensor:  # noqa: FBT001
        ctx.save_for_backward(value)
        ctx.arguments = (dim, keepdim, dtype)
        with below_autograd():
            product: Tensor = aten.prod(value, dtype=dtype) if dim is None else aten.prod(value, dim, keepdim, dtype=dtype)
            return product

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (value,) = ctx.saved_tensors
        return torch.ops.planner.prod_backward(gradient, value, *ctx.arguments), None, None, None


def _multiply_all(value: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return _Product.apply(value, None, False, dtype)  # type: ignore[no-untyped-call,no-any-return]


def _multiply_along(value: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:  # noqa: FBT001, FBT002
    return _Product.apply(value, dim, keepdim, dtype)  # type: ignore[no-untyped-call,no-any-return]


@contextmanager
def capture_products_as_eager() -> Iterator[None]:
    """Capture the gradient of ``prod`` as one op, which computes it as eager PyTorch does."""
    kernels: dict[OpOverload, Callable[..., Tensor]] = {aten.prod.default: _multiply_all, aten.prod.dim_int: _multiply_along}
    with ExitStack() as stack:
        for op, kernel in kernels.items():
            stack.enter_context(register_python_kernels(op, {DispatchKey.Autograd: kernel}))
        yield
