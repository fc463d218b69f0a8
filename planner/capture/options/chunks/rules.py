"""Rules on how ops process rows.

An op is known by what it does to dimensions, in any model: elementwise computation, reductions along dimensions other than the
rows, products of matrices, losses that select entries of rows and sum them. Ops without a rule are not by rows.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import fx

from planner.capture.options.chunks.op_by_rows import ByRows, OpByRows, Total
from planner.capture.options.chunks.rows import NotByRowsError, RowDimensions, rows_behind

aten = torch.ops.aten


def by_rows(asked: OpByRows) -> ByRows:
    """Return the row-by-row form of an op.

    Raises:
        NotByRowsError: the op is not by rows.
    """
    target = asked.node.target
    if rule := _RULES.get(target):
        return rule(asked)
    if torch.Tag.pointwise in getattr(target, "tags", ()) or target in _ELEMENTWISE:
        return asked.makes(_by_elements(asked, asked.shape(asked.node)))
    raise NotByRowsError


# Elementwise operators without the tag.
_ELEMENTWISE = frozenset({aten._to_copy.default, aten.masked_fill.Tensor, aten.hardswish_backward.default})


def _by_elements(asked: OpByRows, out: tuple[int, ...]) -> RowDimensions:
    """Return the position of the rows in an elementwise result of shape `out`; scalars are read whole."""
    args = [a for a in asked.node.all_input_nodes if isinstance(a.meta["val"], torch.Tensor)]
    first = next((a for a in args if a in asked.known), None)
    place = asked.at(first).moved(len(out) - len(asked.shape(first))) if first is not None else asked.at()
    for arg in args:
        dims = len(out) - len(asked.shape(arg))
        sizes = ((1,) * dims + asked.shape(arg))[place.first : place.last + 1]
        if sizes == place.sizes(out) and place.first >= dims:
            asked.want(arg, place.moved(-dims))
        elif all(size == 1 for size in sizes):
            asked.want_whole(arg)
        else:
            raise NotByRowsError
    return place


def _along(*read: int, dim: int, reduces: bool = False) -> Callable[[OpByRows], ByRows]:
    """Return the rule of an op along the dimensions in its argument `dim`, none of them rows; `read` are its tensor arguments."""

    def rule(asked: OpByRows) -> ByRows:
        place = asked.at(*map(asked.arg, read))
        count = len(asked.shape(asked.arg(read[0])))
        given = asked.arg(dim)
        dims = {d % count for d in ([given] if isinstance(given, int) else given or range(count))}
        if any(place.within(d) for d in dims):
            raise NotByRowsError
        for position in read:
            _want_with_equal_rows(asked, asked.arg(position), asked.arg(read[0]), place)
        gone = sum(d < place.first for d in dims) if reduces and len(asked.shape(asked.node)) < count else 0
        return asked.makes(place.moved(-gone))

    return rule


_reduced = _along(0, dim=1, reduces=True)


def _summed(asked: OpByRows) -> ByRows:
    """Return the form of a sum over all rows and perhaps more, or along other dimensions."""
    arg = asked.arg(0)
    place, shape = asked.at(arg), asked.shape(arg)
    dims = {d % len(shape) for d in asked.arg(1) or range(len(shape))}
    if not any(place.within(d) for d in dims):
        return _reduced(asked)
    if not all(d in dims for d in range(place.first, place.last + 1)):
        raise NotByRowsError
    asked.want(arg, place)
    return asked.makes(Total.SUM, elements=prod(shape[d] for d in dims) if asked.node.target in MEANS else 0)


def _loss(reduction: int) -> Callable[[OpByRows], ByRows]:
    """Return the rule of an elementwise loss or its gradient; the argument at `reduction` is the kind of reduction."""

    def rule(asked: OpByRows) -> ByRows:
        backward = "backward" in str(asked.node.target)
        shape = asked.shape(asked.arg(1 if backward else 0))
        place, how = _by_elements(asked, shape), asked.arg(reduction)
        made = place if backward or how == _NONE else Total.SUM
        return asked.makes(made, elements=prod(shape) if how in (None, _MEAN) else 0, reduction=reduction)

    return rule


def _product(first: int) -> Callable[[OpByRows], ByRows]:
    """Return the rule of a matrix product whose left factor is at position `first`; an addend comes before."""

    def rule(asked: OpByRows) -> ByRows:
        left, right = asked.arg(first), asked.arg(first + 1)
        added = asked.arg(0) if first else None
        dims = len(asked.shape(left))
        down, across = RowDimensions(dims - 2, dims - 2), RowDimensions(dims - 1, dims - 1)
        at_left, at_right = asked.known.get(left), asked.known.get(right)
        if dims == 3 and RowDimensions(0, 0) in (at_left, at_right):  # each row has products of its own
            made = RowDimensions(0, 0)
            asked.want(left, made)
            asked.want(right, made)
        elif at_left == across or at_right == down:
            asked.want(left, across)
            asked.want(right, down)
            if added is not None:
                raise NotByRowsError
            return asked.makes(Total.PRODUCT)
        elif at_left == down:
            made = down
            asked.want(left, down)
            asked.want_whole(right)
        elif at_right == across:
            made = across
            asked.want(right, across)
            asked.want_whole(left)
        else:
            raise NotByRowsError
        if added is not None:
            _add(asked, added, made)
        return asked.makes(made)

    return rule


def _add(asked: OpByRows, added: fx.Node, made: RowDimensions) -> None:
    """Require the addend of a product by rows if it has them, else whole."""
    dims = len(asked.shape(asked.node)) - len(asked.shape(added))
    if made.first < dims or asked.shape(added)[made.first - dims] == 1:
        asked.want_whole(added)
    else:
        asked.want(added, made.moved(-dims))


_COUNTING = (torch.float32, torch.float64)
_MOST_COUNTED = 2**24  # integers below are exact in float32
_NONE, _MEAN = 0, 1  # of ``reduction``: a loss per row, or the mean
_REDUCTION = 3


def _picked_loss(asked: OpByRows) -> ByRows:
    """Return the form of ``nll_loss``: the entry of each row's class, summed."""
    if asked.arg(_REDUCTION) == _NONE or len(asked.shape(asked.arg(0))) == 1:
        raise NotByRowsError
    rows = rows_behind(asked.shape(asked.arg(0)), 1, asked.rows)
    asked.want(asked.arg(0), rows)
    asked.want(asked.arg(1), rows)
    exact = (
        asked.arg(2) is None and asked.node.meta["val"][1].dtype in _COUNTING and prod(asked.shape(asked.arg(1))) < _MOST_COUNTED
    )
    count = Total.COUNT if exact else Total.SUM
    return asked.makes(Total.SUM, count, mean=asked.arg(_REDUCTION) == _MEAN, reduction=_REDUCTION)


def _picked_loss_backward(asked: OpByRows) -> ByRows:
    rows = rows_behind(asked.shape(asked.arg(1)), 1, asked.rows)
    asked.want(asked.arg(1), rows)
    asked.want(asked.arg(2), rows)
    if asked.arg(4) == _NONE:
        asked.want(asked.arg(0), rows)
    return asked.makes(rows)


def _padded(asked: OpByRows) -> ByRows:
    """Return the form of padding along other dimensions than the rows."""
    arg, pad = asked.arg(0), asked.arg(1)
    place, dims = asked.at(arg), len(asked.shape(arg))
    if any(place.within(dims - 1 - i // 2) for i, size in enumerate(pad) if size):
        raise NotByRowsError
    asked.want(arg, place)
    return asked.makes(place)


def _joined(asked: OpByRows) -> ByRows:
    """Return the form of a concatenation of arguments that all have the rows."""
    args = asked.arg(0)
    place = asked.at(*args)
    if place.within((asked.arg(1) or 0) % len(asked.shape(args[0]))):
        raise NotByRowsError
    for arg in args:
        _want_with_equal_rows(asked, arg, args[0], place)
    return asked.makes(place)


def _want_with_equal_rows(asked: OpByRows, arg: fx.Node, other: fx.Node, place: RowDimensions) -> None:
    """Require `arg` by rows, with as many elements per row as `other`."""
    asked.want(arg, place)
    if place.sizes(asked.shape(arg)) != place.sizes(asked.shape(other)):
        raise NotByRowsError


_RULES: Mapping[Any, Callable[[OpByRows], ByRows]] = {
    aten.mm.default: _product(0),
    aten.bmm.default: _product(0),
    aten.addmm.default: _product(1),
    aten.baddbmm.default: _product(1),
    **dict.fromkeys((aten._softmax.default, aten._safe_softmax.default, aten._log_softmax.default), _along(0, dim=1)),
    **dict.fromkeys((aten._softmax_backward_data.default, aten._log_softmax_backward_data.default), _along(0, 1, dim=2)),
    **dict.fromkeys((aten.logsumexp.default, aten.amax.default, aten.amin.default), _reduced),
    aten.argmax.default: _reduced,
    aten.cumsum.default: _along(0, dim=1),
    aten.gather.default: _along(0, 2, dim=1),
    aten.scatter.src: _along(0, 2, 3, dim=1),
    aten.scatter.value: _along(0, 2, dim=1),
    aten.scatter_add.default: _along(0, 2, 3, dim=1),
    aten.sum.dim_IntList: _summed,
    aten.sum.default: _summed,
    aten.mean.default: _summed,
    aten.mean.dim: _summed,
    aten.mse_loss.default: _loss(2),
    aten.smooth_l1_loss.default: _loss(2),
    aten.huber_loss.default: _loss(2),
    aten.binary_cross_entropy.default: _loss(3),
    aten.binary_cross_entropy_with_logits.default: _loss(4),
    aten.mse_loss_backward.default: _loss(3),
    aten.smooth_l1_loss_backward.default: _loss(3),
    aten.huber_loss_backward.default: _loss(3),
    aten.binary_cross_entropy_backward.default: _loss(4),
    aten.nll_loss_forward.default: _picked_loss,
    aten.nll_loss_backward.default: _picked_loss_backward,
    aten.nll_loss2d_forward.default: _picked_loss,
    aten.nll_loss2d_backward.default: _picked_loss_backward,
    aten.constant_pad_nd.default: _padded,
    aten.slice_backward.default: _along(0, dim=2),
    aten.cat.default: _joined,
}

# Ops that sum and divide, by the op that only sums.
MEANS: Mapping[Any, Any] = {aten.mean.default: aten.sum.default, aten.mean.dim: aten.sum.dim_IntList}

# Ops with constant results in the shape of their second argument.
CONSTANTS = frozenset({aten.new_zeros.default, aten.new_ones.default})
