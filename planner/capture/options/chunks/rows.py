"""The positions of rows in shapes, and how views move them."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import fx

aten = torch.ops.aten

# Views that keep the order of elements: rows are identified by the number of elements before them.
_RESHAPING = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})
_SAME = frozenset({aten.alias.default, aten.detach.default})


class NotByRowsError(Exception):
    """The error that a row of a result depends on other rows, or is not known to depend on its own row alone."""


@dataclass(frozen=True, slots=True)
class RowDimensions:
    """The dimensions `first` to `last` of a value, which together enumerate the rows, in order.

    A row may have several elements of these dimensions: for a value of 4 x 8 sentences and words, seen as 32 words, rows may be
    the sentences.
    """

    first: int
    last: int

    def shift(self, dims: int) -> "RowDimensions":
        """Return the rows shifted by `dims` dimensions."""
        return RowDimensions(self.first + dims, self.last + dims)

    def has_dimension(self, dim: int) -> bool:
        """Return True if `dim` is one of the dimensions."""
        return self.first <= dim <= self.last

    def list_sizes(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes of these dimensions."""
        return tuple(shape[self.first : self.last + 1])

    def compute_chunk_shape(self, shape: Sequence[int], count: int, rows: int) -> list[int]:
        """Return the shape of `count` of `rows` rows, with the same number of dimensions."""
        size = prod(self.list_sizes(shape)) // rows * count
        return [*shape[: self.first], *(1,) * (self.last - self.first), size, *shape[self.last + 1 :]]


def find_rows_behind(shape: Sequence[int], before: int, rows: int) -> RowDimensions:
    """Return the fewest dimensions of `shape` with `rows` rows, after `before` elements; raise NotByRowsError if none have."""
    seen = 1
    for first, size in enumerate(shape):
        if seen == before and size > 1:
            for last in range(first, len(shape)):
                if prod(shape[first : last + 1]) % rows == 0:
                    return RowDimensions(first, last)
            break
        seen *= size
    raise NotByRowsError


def take_slice(value: torch.Tensor, rows: RowDimensions, begin: int, size: int) -> torch.Tensor:
    """Return `size` elements of the dimensions of `rows`, in the shape of a chunk."""
    flat = value.flatten(rows.first, rows.last) if rows.last > rows.first else value
    part = flat.narrow(rows.first, begin, size)
    for _ in range(rows.last - rows.first):
        part = part.unsqueeze(rows.first)
    return part


def is_flat(value: torch.Tensor, rows: RowDimensions) -> bool:
    """Return True if a slice of `rows` is a view."""
    dims = range(rows.first, rows.last)
    return all(value.stride(d) == value.stride(d + 1) * value.shape[d + 1] for d in dims)


def is_view(node: fx.Node) -> bool:
    """Return True if `node` is a view of another value."""
    return node.target is operator.getitem or node.target in _RESHAPING or bool(getattr(node.target, "is_view", False))


def map_through_view(node: fx.Node, base: RowDimensions, rows: int) -> RowDimensions:
    """Return the position of the rows in the value of the view `node`, whose base has them at `base`.

    Raises:
        NotByRowsError: the view has parts of rows, rows in another order, or several rows as one.
    """
    arg = node.args[0]
    assert isinstance(arg, fx.Node)
    if node.target is operator.getitem:
        return base
    given, shape = tuple(arg.meta["val"].shape), _get_shape(node)
    match node.target:
        case target if target in _SAME:
            return base
        case target if target in _RESHAPING:
            return find_rows_behind(shape, prod(given[: base.first]), rows)
        case aten.t.default | aten.transpose.int | aten.permute.default:
            return _permute(node, base, len(given))
        case aten.unsqueeze.default:
            dim = _normalize_dim(node.args[1], len(shape))
            if base.first < dim <= base.last:
                raise NotByRowsError
            return base.shift(1) if dim <= base.first else base
        case aten.expand.default:
            moved = base.shift(len(shape) - len(given))
            if moved.list_sizes(shape) != base.list_sizes(given):
                raise NotByRowsError
            return moved
        case aten.slice.Tensor | aten.split.Tensor | aten.split_with_sizes.default:
            position = 1 if node.target is aten.slice.Tensor else 2
            if base.has_dimension(_normalize_dim(node.args[position] if len(node.args) > position else 0, len(given))):
                raise NotByRowsError
            return base
        case aten.select.int | aten.squeeze.dim:
            dim = _normalize_dim(node.args[1], len(given))
            if base.has_dimension(dim):
                raise NotByRowsError
            is_gone = node.target is aten.select.int or given[dim] == 1
            return base.shift(-1) if dim < base.first and is_gone else base
    raise NotByRowsError


def _permute(node: fx.Node, base: RowDimensions, dims: int) -> RowDimensions:
    order = list(range(dims))
    if node.target is aten.permute.default:
        order = [_normalize_dim(d, dims) for d in node.args[1]]  # type: ignore[union-attr]
    elif dims > 1:
        one, other = (0, 1) if node.target is aten.t.default else (_normalize_dim(d, dims) for d in node.args[1:3])
        order[one], order[other] = order[other], order[one]
    first = order.index(base.first)
    moved = base.shift(first - base.first)
    if order[moved.first : moved.last + 1] != list(range(base.first, base.last + 1)):
        raise NotByRowsError
    return moved


def _get_shape(node: fx.Node) -> tuple[int, ...]:
    value = node.meta["val"]
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _normalize_dim(dim: object, dims: int) -> int:
    assert isinstance(dim, int)
    return dim % max(1, dims)
