"""Tensors among the arguments of ops, and elements of outputs by their shapes."""

import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch


def list_names_of_outs(function: Any) -> list[str]:
    """Return the names of the arguments of an operator that are tensors for its results."""
    return [argument.name for argument in function._schema.arguments if argument.is_out]


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
