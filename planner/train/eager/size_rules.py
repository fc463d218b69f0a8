"""Bytes of the outputs of common ops, from the shapes and types of their arguments in microseconds.

A rule returns the bytes that the op will allocate, or None where it cannot tell, as for types that PyTorch would promote.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import zip_longest
from typing import Any

import torch

from planner.torch_private.core import is_composite

Sizes = Sequence[int] | None  # the bytes of each new output
Rule = Callable[[Sequence[Any], dict[str, Any]], Sizes]


@cache
def get_rule(function: Any) -> Rule | None:
    """Return the rule for an operator; None if there is none."""
    schema = function._schema
    if list_names_of_outs(function):
        return None  # it may resize them
    if all(value.alias_info is not None for value in schema.returns):
        return _count_nothing
    name = _name_in_aten(function)
    if name is None or schema.overload_name == "dtype":
        return None
    if name in _RULES:
        return _RULES[name]
    if torch.Tag.pointwise in function.tags and [str(value.type) for value in schema.returns] == ["Tensor"]:
        return _count_truth_values if name in _TRUTH_VALUES else _count_pointwise
    return None


def list_names_of_outs(function: Any) -> list[str]:
    """Return the names of the arguments of an operator that are tensors for its results."""
    return [argument.name for argument in function._schema.arguments if argument.is_out]


def _name_in_aten(function: Any) -> str | None:
    """Return the name of an operator of ATen with kernels of its own; None for others."""
    namespace, _, name = function._schema.name.partition("::")
    return None if namespace != "aten" or is_composite(function) else name


def _count_nothing(_args: Sequence[Any], _kwargs: dict[str, Any]) -> Sizes:
    return ()


def _count_pointwise(args: Sequence[Any], kwargs: dict[str, Any]) -> Sizes:
    """Return the bytes if one type decides: of the only real tensors, beside integers and numbers."""
    values = (*args, *kwargs.values())
    tensors = list(iterate_tensors(values))
    types = {tensor.dtype for tensor in tensors if tensor.dim()} or {tensor.dtype for tensor in tensors}
    real = [dtype for dtype in types if dtype.is_floating_point]
    if len(real) != 1 or any(dtype.is_complex for dtype in (*types, *(tensor.dtype for tensor in tensors))):
        return None
    if any(type(value) is complex or isinstance(value, torch.dtype) for value in values):
        return None
    return (_count_elements(args, kwargs) * real[0].itemsize,)


def _count_loss(args: Sequence[Any], _kwargs: dict[str, Any]) -> Sizes:
    """Return the bytes of the losses of all elements: a kernel that reduces them keeps their memory for the result."""
    value, target = args[:2]
    dtype = torch.promote_types(value.dtype, target.dtype)
    return (count_broadcast_elements((value.shape, target.shape)) * dtype.itemsize,)


def _count_truth_values(args: Sequence[Any], kwargs: dict[str, Any]) -> Sizes:
    return (_count_elements(args, kwargs),)


def _count_like(args: Sequence[Any], kwargs: dict[str, Any]) -> Sizes:
    """Return the bytes of a tensor of the shape of the first argument."""
    return (args[0].numel() * (kwargs.get("dtype") or args[0].dtype).itemsize,)


def _count_new(args: Sequence[Any], kwargs: dict[str, Any]) -> Sizes:
    """Return the bytes of a tensor of the size that is the second argument, of the type of the first."""
    return (math.prod(args[1]) * (kwargs.get("dtype") or args[0].dtype).itemsize,)


def _count_softmax(args: Sequence[Any], _kwargs: dict[str, Any]) -> Sizes:
    to_float = args[2]
    return (args[0].numel() * (4 if to_float else args[0].element_size()),)


def _count_softmax_gradient(args: Sequence[Any], _kwargs: dict[str, Any]) -> Sizes:
    """Return the bytes of a tensor of the shape of the first argument, of the type that is the last."""
    return (args[0].numel() * args[3].itemsize,)


def _count_layer_norm(args: Sequence[Any], _kwargs: dict[str, Any]) -> Sizes:
    """Return the bytes of the result, and of mean and deviation of each row."""
    value = args[0]
    if value.dtype not in (torch.float32, torch.float64):
        return None
    rows = value.numel() // max(math.prod(args[1]), 1)
    return (value.nbytes, rows * value.element_size(), rows * value.element_size())


def _count_concatenated(args: Sequence[Any], _kwargs: dict[str, Any]) -> Sizes:
    tensors = args[0]
    return (sum(tensor.nbytes for tensor in tensors),) if len({tensor.dtype for tensor in tensors}) == 1 else None


def _count_embedding(args: Sequence[Any], _kwargs: dict[str, Any]) -> Sizes:
    table, positions = args[:2]
    return (positions.numel() * table.shape[-1] * table.element_size(),)


def _count_gathered(args: Sequence[Any], _kwargs: dict[str, Any]) -> Sizes:
    return (args[2].numel() * args[0].element_size(),)


def _count_product(args: Sequence[Any], _kwargs: dict[str, Any]) -> Sizes:
    """Return the bytes of the product of the last two tensors, or batches, of matrices."""
    *_rest, left, right = iterate_tensors(args)
    return (math.prod(left.shape[:-1]) * right.shape[-1] * left.element_size(),)


def _count_reduced(args: Sequence[Any], kwargs: dict[str, Any]) -> Sizes:
    """Return the bytes of a sum over the dimensions that are the second argument, or over all."""
    tensor = args[0]
    promoted = tensor.dtype if tensor.is_floating_point() or tensor.is_complex() else torch.int64
    dtype: torch.dtype = kwargs.get("dtype") or promoted
    over = [dim % tensor.dim() for dim in args[1] or ()] if len(args) > 1 and tensor.dim() else []
    kept = [size for dim, size in enumerate(tensor.shape) if over and dim not in over]
    return (math.prod(kept) * dtype.itemsize,)


def _count_indexed(args: Sequence[Any], _kwargs: dict[str, Any]) -> Sizes:
    return (count_indexed_bytes(args[0], args[1]),)


def count_indexed_bytes(tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> int:
    """Return the bytes of a tensor that is indexed: exactly for indices, at most for masks, which may choose all."""
    sizes, others, chosen = iter(tensor.shape), list[int](), list[Sequence[int]]()
    for index in indices:
        if index is None:
            others.append(next(sizes, 1))  # the op raises its own error if there are too many indices
        elif is_mask(index):
            chosen.append((index.numel(),))
            for _ in index.shape:
                next(sizes, 1)
        else:
            chosen.append(index.shape)
            next(sizes, 1)
    return math.prod((*others, *sizes)) * count_broadcast_elements(chosen) * tensor.element_size()


def is_mask(index: torch.Tensor) -> bool:
    """Return True if a tensor of indices chooses the elements that are true."""
    return index.dtype in (torch.bool, torch.uint8)


def _count_selected(args: Sequence[Any], _kwargs: dict[str, Any]) -> Sizes:
    """Return the bytes of a tensor with the rows that the third argument names."""
    tensor, dim, rows = args
    others = [size for other, size in enumerate(tensor.shape) if other != dim % tensor.dim()]
    return (math.prod(others) * rows.numel() * tensor.element_size(),)


def _count_elements(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    return count_broadcast_elements([tensor.shape for tensor in iterate_tensors((*args, *kwargs.values()))])


def count_broadcast_elements(shapes: Sequence[Sequence[int]]) -> int:
    """Return the elements of a tensor of these shapes, broadcast."""
    if len(shapes) == 1:
        return math.prod(shapes[0])
    sizes = zip_longest(*map(reversed, shapes), fillvalue=1)
    return math.prod(0 if 0 in of_dim else max(of_dim) for of_dim in sizes)


def iterate_tensors(values: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and dicts, in order."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, list | tuple | dict):
                yield from iterate_tensors(value)
    elif isinstance(values, dict):
        yield from iterate_tensors(list[Any](values.values()))


_TRUTH_VALUES = frozenset(
    (
        *("eq", "ge", "gt", "isfinite", "isinf", "isnan", "isneginf", "isposinf", "le", "logical_and", "logical_not"),
        *("logical_or", "logical_xor", "lt", "ne", "signbit"),
    )
)
_LIKE = (
    *("_to_copy", "clone", "empty_like", "flip", "index_add", "index_copy", "index_fill", "index_put"),
    *("ones_like", "roll", "scatter", "scatter_add", "scatter_reduce", "tril", "triu", "zeros_like"),
)
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_LIKE, _count_like),
    **dict.fromkeys(("new_empty", "new_full", "new_ones", "new_zeros"), _count_new),
    **dict.fromkeys(("addmm", "baddbmm", "bmm", "mm"), _count_product),
    **dict.fromkeys(("binary_cross_entropy", "mse_loss", "smooth_l1_loss", "soft_margin_loss"), _count_loss),
    **dict.fromkeys(("mean", "sum"), _count_reduced),
    **dict.fromkeys(("_log_softmax", "_softmax"), _count_softmax),
    **dict.fromkeys(("_log_softmax_backward_data", "_softmax_backward_data"), _count_softmax_gradient),
    "_unsafe_view": _count_nothing,
    "cat": _count_concatenated,
    "embedding": _count_embedding,
    "gather": _count_gathered,
    "index": _count_indexed,
    "index_select": _count_selected,
    "native_layer_norm": _count_layer_norm,
}
