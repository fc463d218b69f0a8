"""Chains of ops as one op, each of which overwrites the result of the one before.

The program makes a new tensor for each of them, so that two are in memory at once: logits and their log-softmax, or the gradients
of a loss and of its logits. The kernels read an element, or a row, before they write it, so that results are bit-identical.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from planner.capture.frontend.eager_ops import called
from planner.capture.options.kernels.alternative import Alternative, Bundle, ReplaceableOp
from planner.capture.rewrites.outputs import fake, storage

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Into:
    """The in-place form of an op.

    Attributes:
        target: the function to call.
        out: name of the output argument; "" if the first argument is overwritten.
        positions: positions of the arguments that may be overwritten.
        dim: position of the dimension argument, which must be the last dimension: a row is read before it is written; None for
            elementwise ops.
    """

    target: Any
    out: str = "out"
    positions: tuple[int, ...] = (0,)
    dim: int | None = None


_INTO: Mapping[Any, _Into] = {
    aten._softmax.default: _Into(aten._softmax.out, dim=1),
    aten._log_softmax.default: _Into(aten._log_softmax.out, dim=1),
    aten._softmax_backward_data.default: _Into(aten._softmax_backward_data.out, "grad_input", dim=2),
    aten._log_softmax_backward_data.default: _Into(aten._log_softmax_backward_data.out, dim=2),
    aten.add.Tensor: _Into(aten.add.out, positions=(0, 1)),
    aten.sub.Tensor: _Into(aten.sub.out, positions=(0, 1)),
    aten.mul.Tensor: _Into(aten.mul.out, positions=(0, 1)),
    aten.div.Tensor: _Into(aten.div.out, positions=(0, 1)),
    aten.gelu.default: _Into(aten.gelu.out),
    aten.silu.default: _Into(aten.silu.out),
    aten.tanh.default: _Into(aten.tanh.out),
    aten.sigmoid.default: _Into(aten.sigmoid.out),
    aten.relu.default: _Into(aten.relu_.default, ""),
    aten.masked_fill.Scalar: _Into(aten.masked_fill_.Scalar, ""),
    aten.gelu_backward.default: _Into(aten.gelu_backward.grad_input, "grad_input"),
    aten.silu_backward.default: _Into(aten.silu_backward.grad_input, "grad_input"),
    aten.tanh_backward.default: _Into(aten.tanh_backward.grad_input, "grad_input"),
    aten.sigmoid_backward.default: _Into(aten.sigmoid_backward.grad_input, "grad_input"),
    aten.threshold_backward.default: _Into(aten.threshold_backward.grad_input, "grad_input"),
}


def alternatives(asked: ReplaceableOp) -> Iterator[Bundle]:
    """Yield the chain of ops that begins with this one."""
    row = [asked]
    if any((before := asked.calls.maker(arg)) is not None and _continues(before, asked) for arg in asked.node.all_input_nodes):
        return
    while (after := _next(row[-1])) is not None:
        row.append(after)
    if len(row) > 1:
        reads, compute = _written_over(row)
        yield (Alternative("in_place", tuple(op.node for op in row), reads, row[-1].results, compute, always_exact=True),)


def _next(asked: ReplaceableOp) -> ReplaceableOp | None:
    """Return the op that reads the result of `asked` and may overwrite it; None if there is none, or there are other readers."""
    graph = asked.calls.capture.graph
    if len(asked.results) != 1 or asked.is_bound:
        return None
    (made,) = asked.op.outputs
    readers = [reader for reader in graph.consumers[made] if reader < len(graph.program)]
    if made in graph.kept or len(readers) != 1 or graph.ops[readers[0]].phase is not asked.op.phase:
        return None
    after = asked.calls[readers[0]]
    return after if after is not None and _overwritten(after, asked) is not None else None


def _continues(before: ReplaceableOp, asked: ReplaceableOp) -> bool:
    after = _next(before)
    return after is not None and after.node is asked.node


def _overwritten(asked: ReplaceableOp, before: ReplaceableOp) -> fx.Node | None:
    """Return the argument of `asked` that it may overwrite: the whole result of `before`, laid out as its own result."""
    into = _INTO.get(asked.node.target)
    if into is None or asked.is_bound or len(asked.results) != 1:
        return None
    result = asked.results[0].value
    if into.dim is not None and asked[into.dim] not in (-1, result.dim() - 1):
        return None
    where = storage(before.results[0].value)
    inside = [arg for arg in asked.node.all_input_nodes if storage(fake(arg)) == where]
    for position in into.positions:
        if inside == [arg := asked[position]] and _laid_out_alike(fake(arg), result) and _read_once(asked.node, arg):
            return inside[0]
    return None


def _read_once(node: fx.Node, arg: fx.Node) -> bool:
    return sum(other is arg for other in (*node.args, *node.kwargs.values())) == 1


def _laid_out_alike(value: torch.Tensor, result: torch.Tensor) -> bool:
    whole_bytes = value.numel() * value.element_size()
    return (
        value.shape == result.shape
        and value.stride() == result.stride()
        and value.dtype == result.dtype
        and value.untyped_storage().nbytes() == result.untyped_storage().nbytes() == whole_bytes
    )


def _written_over(row: list[ReplaceableOp]) -> tuple[tuple[fx.Node, ...], Any]:
    """Return the outside inputs of the ops of `row`, and a function of them that computes all the ops."""
    graph = fx.Graph()
    inside = {storage(op.results[0].value) for op in row}
    given: dict[fx.Node, fx.Node] = {}
    made: dict[fx.Node, fx.Node] = {}
    for op in row:
        for arg in op.node.all_input_nodes:
            if storage(fake(arg)) not in inside and arg not in given:
                given[arg] = graph.placeholder(f"given_{len(given)}")

    def value(arg: fx.Node) -> fx.Node:
        if arg in given:
            return given[arg]
        if arg not in made:  # a view of a tensor made inside
            made[arg] = graph.call_function(called(arg.target), *fx.map_arg((arg.args, arg.kwargs), value))
        return made[arg]

    for before, op in zip([None, *row], row, strict=False):
        args, kwargs = fx.map_arg((op.node.args, op.node.kwargs), value)
        if before is None:
            made[op.node] = graph.call_function(called(op.node.target), args, kwargs)
            continue
        over, into = _overwritten(op, before), _INTO[op.node.target]
        assert over is not None
        made[op.node] = graph.call_function(into.target, args, {**kwargs, into.out: value(over)} if into.out else kwargs)
    graph.output((made[row[-1].node],))
    return tuple(given), fx.GraphModule(torch.nn.Module(), graph).forward
