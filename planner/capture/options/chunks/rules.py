"""Rules on how ops process rows.

An op is known by what it does to dimensions, in any model: elementwise computation, reductions along dimensions other than the
rows, products of matrices, losses that select entries of rows and sum them. Ops without a rule are not by rows.

Known weakness: a new operator is not by rows until it has a rule, and then the whole stretch is missing without a message.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import fx

from planner.capture.options.chunks.op_by_rows import ByRows, OpByRows, Total
from planner.capture.options.chunks.rows import NotByRowsError, RowDimensions, find_rows_behind

aten = torch.ops.aten


def find_row_form(op: OpByRows) -> ByRows:
    """Return the row-by-row form of an op; raise NotByRowsError if it has none."""
    target = op.node.target
    if rule := _RULES.get(target):
        return rule(op)
    if torch.Tag.pointwise in getattr(target, "tags", ()) or target in _ELEMENTWISE:
        return op.build(_match_elements(op, op.get_shape(op.node)))
    raise NotByRowsError


# Elementwise operators without the tag.
_ELEMENTWISE = frozenset({aten._to_copy.default, aten.masked_fill.Tensor, aten.hardswish_backward.default})


def _match_elements(op: OpByRows, out: tuple[int, ...]) -> RowDimensions:
    """Return the position of the rows in an elementwise result of shape `out`; scalars are read whole."""
    args = [a for a in op.node.all_input_nodes if isinstance(a.meta["val"], torch.Tensor)]
    first = next((a for a in args if a in op.known), None)
    place = op.get_rows(first).shift(len(out) - len(op.get_shape(first))) if first is not None else op.get_rows()
    for arg in args:
        dims = len(out) - len(op.get_shape(arg))
        sizes = ((1,) * dims + op.get_shape(arg))[place.first : place.last + 1]
        if sizes == place.list_sizes(out) and place.first >= dims:
            op.require(arg, place.shift(-dims))
        elif all(size == 1 for size in sizes):
            op.require_whole(arg)
        else:
            raise NotByRowsError
    return place


def _apply_along(op: OpByRows, *, read: Sequence[int] = (0,), dim: int, reduces: bool = False) -> ByRows:
    """Apply the rule of an op along the dimensions in its argument `dim`, none of them rows; `read` are its tensor arguments."""
    place = op.get_rows(*map(op.get_arg, read))
    count = len(op.get_shape(op.get_arg(read[0])))
    given = op.get_arg(dim)
    dims = {d % count for d in ([given] if isinstance(given, int) else given or range(count))}
    if any(place.has_dimension(d) for d in dims):
        raise NotByRowsError
    for position in read:
        _require_equal_rows(op, op.get_arg(position), op.get_arg(read[0]), place)
    gone = sum(d < place.first for d in dims) if reduces and len(op.get_shape(op.node)) < count else 0
    return op.build(place.shift(-gone))


_reduced = partial(_apply_along, dim=1, reduces=True)


def _apply_sum(op: OpByRows) -> ByRows:
    """Return the form of a sum over all rows and perhaps more, or along other dimensions."""
    arg = op.get_arg(0)
    place, shape = op.get_rows(arg), op.get_shape(arg)
    dims = {d % len(shape) for d in op.get_arg(1) or range(len(shape))}
    if not any(place.has_dimension(d) for d in dims):
        return _reduced(op)
    if not all(d in dims for d in range(place.first, place.last + 1)):
        raise NotByRowsError
    op.require(arg, place)
    return op.build(Total.SUM, elements=prod(shape[d] for d in dims) if op.node.target in MEANS else 0)


def _apply_loss(op: OpByRows, *, reduction: int) -> ByRows:
    """Apply the rule of an elementwise loss or its gradient; the argument at `reduction` is the kind of reduction."""
    backward = "backward" in str(op.node.target)
    shape = op.get_shape(op.get_arg(1 if backward else 0))
    place, how = _match_elements(op, shape), op.get_arg(reduction)
    made = place if backward or how == _NONE else Total.SUM
    return op.build(made, elements=prod(shape) if how in (None, _MEAN) else 0, reduction=reduction)


def _apply_product(op: OpByRows, *, first: int) -> ByRows:
    """Apply the rule of a matrix product whose left factor is at position `first`; an addend comes before."""
    left, right = op.get_arg(first), op.get_arg(first + 1)
    added = op.get_arg(0) if first else None
    dims = len(op.get_shape(left))
    down, across = RowDimensions(dims - 2, dims - 2), RowDimensions(dims - 1, dims - 1)
    at_left, at_right = op.known.get(left), op.known.get(right)
    if dims == 3 and RowDimensions(0, 0) in (at_left, at_right):  # each row has products of its own
        made = RowDimensions(0, 0)
        op.require(left, made)
        op.require(right, made)
    elif at_left == across or at_right == down:
        op.require(left, across)
        op.require(right, down)
        if added is not None:
            raise NotByRowsError
        return op.build(Total.PRODUCT)
    elif at_left == down:
        made = down
        op.require(left, down)
        op.require_whole(right)
    elif at_right == across:
        made = across
        op.require(right, across)
        op.require_whole(left)
    else:
        raise NotByRowsError
    if added is not None:
        _add(op, added, made)
    return op.build(made)


def _add(op: OpByRows, added: fx.Node, made: RowDimensions) -> None:
    """Require the addend of a product by rows if it has them, else whole."""
    dims = len(op.get_shape(op.node)) - len(op.get_shape(added))
    if made.first < dims or op.get_shape(added)[made.first - dims] == 1:
        op.require_whole(added)
    else:
        op.require(added, made.shift(-dims))


_COUNTING = (torch.float32, torch.float64)
_MOST_COUNTED = 2**24  # integers below are exact in float32
_NONE, _MEAN = 0, 1  # of ``reduction``: a loss per row, or the mean
_REDUCTION = 3


def _apply_picked_loss(op: OpByRows) -> ByRows:
    """Return the form of ``nll_loss``: the entry of each row's class, summed."""
    if op.get_arg(_REDUCTION) == _NONE or len(op.get_shape(op.get_arg(0))) == 1:
        raise NotByRowsError
    rows = find_rows_behind(op.get_shape(op.get_arg(0)), 1, op.rows)
    op.require(op.get_arg(0), rows)
    op.require(op.get_arg(1), rows)
    exact = (
        op.get_arg(2) is None and op.node.meta["val"][1].dtype in _COUNTING and prod(op.get_shape(op.get_arg(1))) < _MOST_COUNTED
    )
    count = Total.COUNT if exact else Total.SUM
    return op.build(Total.SUM, count, mean=op.get_arg(_REDUCTION) == _MEAN, reduction=_REDUCTION)


def _apply_picked_loss_backward(op: OpByRows) -> ByRows:
    rows = find_rows_behind(op.get_shape(op.get_arg(1)), 1, op.rows)
    op.require(op.get_arg(1), rows)
    op.require(op.get_arg(2), rows)
    if op.get_arg(4) == _NONE:
        op.require(op.get_arg(0), rows)
    return op.build(rows)


def _apply_padding(op: OpByRows) -> ByRows:
    """Return the form of padding along other dimensions than the rows."""
    arg, pad = op.get_arg(0), op.get_arg(1)
    place, dims = op.get_rows(arg), len(op.get_shape(arg))
    if any(place.has_dimension(dims - 1 - i // 2) for i, size in enumerate(pad) if size):
        raise NotByRowsError
    op.require(arg, place)
    return op.build(place)


def _apply_concatenation(op: OpByRows) -> ByRows:
    """Return the form of a concatenation of arguments that all have the rows."""
    args = op.get_arg(0)
    place = op.get_rows(*args)
    if place.has_dimension((op.get_arg(1) or 0) % len(op.get_shape(args[0]))):
        raise NotByRowsError
    for arg in args:
        _require_equal_rows(op, arg, args[0], place)
    return op.build(place)


def _require_equal_rows(op: OpByRows, arg: fx.Node, other: fx.Node, place: RowDimensions) -> None:
    """Require `arg` by rows, with as many elements per row as `other`."""
    op.require(arg, place)
    if place.list_sizes(op.get_shape(arg)) != place.list_sizes(op.get_shape(other)):
        raise NotByRowsError


_RULES: Mapping[Any, Callable[[OpByRows], ByRows]] = {
    **dict.fromkeys((aten.mm.default, aten.bmm.default), partial(_apply_product, first=0)),
    **dict.fromkeys((aten.addmm.default, aten.baddbmm.default), partial(_apply_product, first=1)),
    **dict.fromkeys((aten._softmax.default, aten._safe_softmax.default, aten._log_softmax.default), partial(_apply_along, dim=1)),
    **dict.fromkeys(
        (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default), partial(_apply_along, read=(0, 1), dim=2)
    ),
    **dict.fromkeys((aten.logsumexp.default, aten.amax.default, aten.amin.default, aten.argmax.default), _reduced),
    aten.cumsum.default: partial(_apply_along, dim=1),
    **dict.fromkeys((aten.gather.default, aten.scatter.value), partial(_apply_along, read=(0, 2), dim=1)),
    **dict.fromkeys((aten.scatter.src, aten.scatter_add.default), partial(_apply_along, read=(0, 2, 3), dim=1)),
    **dict.fromkeys((aten.sum.dim_IntList, aten.sum.default, aten.mean.default, aten.mean.dim), _apply_sum),
    **dict.fromkeys(
        (aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default), partial(_apply_loss, reduction=2)
    ),
    **dict.fromkeys(
        (aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default),
        partial(_apply_loss, reduction=3),
    ),
    aten.binary_cross_entropy.default: partial(_apply_loss, reduction=3),
    aten.binary_cross_entropy_with_logits.default: partial(_apply_loss, reduction=4),
    aten.binary_cross_entropy_backward.default: partial(_apply_loss, reduction=4),
    **dict.fromkeys((aten.nll_loss_forward.default, aten.nll_loss2d_forward.default), _apply_picked_loss),
    **dict.fromkeys((aten.nll_loss_backward.default, aten.nll_loss2d_backward.default), _apply_picked_loss_backward),
    aten.constant_pad_nd.default: _apply_padding,
    aten.slice_backward.default: partial(_apply_along, dim=2),
    aten.cat.default: _apply_concatenation,
}

# Ops that sum and divide, by the op that only sums.
MEANS: Mapping[Any, Any] = {aten.mean.default: aten.sum.default, aten.mean.dim: aten.sum.dim_IntList}

# Ops with constant results in the shape of their second argument.
CONSTANTS = frozenset({aten.new_zeros.default, aten.new_ones.default})
