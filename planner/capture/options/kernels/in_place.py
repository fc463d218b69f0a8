"""Chains of ops as one op, each of which overwrites the result of the one before.

The program makes a new tensor for each of them, so that two are in memory at once: logits and their log-softmax, or the gradients
of a loss and of its logits. The kernels read an element, or a row, before they write it, so that results are bit-identical.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx

from planner.capture.frontend.eager_ops import get_callable
from planner.capture.options.in_place_variants import find_in_place_variant, find_out_variant, is_covering
from planner.capture.options.kernels.alternative import Alternative, Bundle, ReplaceableOp
from planner.capture.rewrites.outputs import get_fake, get_storage

aten = torch.ops.aten


# Elementwise ops, with the positions of the arguments that may be overwritten.
_ELEMENTWISE: Mapping[Any, tuple[int, ...]] = {
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor), (0, 1)),
    **dict.fromkeys((aten.gelu.default, aten.silu.default, aten.tanh.default, aten.sigmoid.default), (0,)),
    **dict.fromkeys((aten.relu.default, aten.masked_fill.Scalar, aten.threshold_backward.default), (0,)),
    **dict.fromkeys((aten.gelu_backward.default, aten.silu_backward.default), (0,)),
    **dict.fromkeys((aten.tanh_backward.default, aten.sigmoid_backward.default), (0,)),
}
# Ops that read a row before they write it over their first argument, with the position of the dimension argument: rows are in the
# last dimension.
_BY_ROWS: Mapping[Any, int] = {
    **dict.fromkeys((aten._softmax.default, aten._log_softmax.default), 1),
    **dict.fromkeys((aten._softmax_backward_data.default, aten._log_softmax_backward_data.default), 2),
}


def iterate_alternatives(op: ReplaceableOp) -> Iterator[Bundle]:
    """Yield the chain of ops that begins with this one."""
    row = [op]
    if any((before := op.calls.find_producer(arg)) is not None and _is_continued(before, op) for arg in op.node.all_input_nodes):
        return
    while (after := _find_next(row[-1])) is not None:
        row.append(after)
    if len(row) > 1:
        reads, compute = _build_written_over(row)
        yield (Alternative("in_place", tuple(op.node for op in row), reads, row[-1].results, compute, always_exact=True),)


def _find_next(op: ReplaceableOp) -> ReplaceableOp | None:
    """Return the op that reads the result of `op` and may overwrite it; None if there is none, or there are other readers."""
    graph = op.calls.capture.graph
    if len(op.results) != 1 or op.is_bound:
        return None
    (made,) = op.graph_op.outputs
    readers = [reader for reader in graph.consumers[made] if reader < len(graph.program)]
    if made in graph.kept or len(readers) != 1 or graph.ops[readers[0]].phase is not op.graph_op.phase:
        return None
    after = op.calls[readers[0]]
    return after if after is not None and _find_overwritten(after, op) is not None else None


def _is_continued(before: ReplaceableOp, op: ReplaceableOp) -> bool:
    after = _find_next(before)
    return after is not None and after.node is op.node


def _find_overwritten(op: ReplaceableOp, before: ReplaceableOp) -> fx.Node | None:
    """Return the argument of `op` that it may overwrite: the whole result of `before`, laid out as its own result."""
    target = op.node.target
    if op.is_bound or len(op.results) != 1:
        return None
    result = op.results[0].value
    if target in _BY_ROWS and op[_BY_ROWS[target]] not in (-1, result.dim() - 1):
        return None
    where = get_storage(before.results[0].value)
    inside = [arg for arg in op.node.all_input_nodes if get_storage(get_fake(arg)) == where]
    for position in _ELEMENTWISE.get(target, (0,) if target in _BY_ROWS else ()):
        if inside == [arg := op[position]] and is_covering(get_fake(arg), result) and _read_once(op.node, arg):
            return inside[0]
    return None


def _read_once(node: fx.Node, arg: fx.Node) -> bool:
    return sum(other is arg for other in (*node.args, *node.kwargs.values())) == 1


def _build_written_over(row: list[ReplaceableOp]) -> tuple[tuple[fx.Node, ...], Any]:
    """Return the outside inputs of the ops of `row`, and a function of them that computes all the ops."""
    graph = fx.Graph()
    inside = {get_storage(op.results[0].value) for op in row}
    given: dict[fx.Node, fx.Node] = {}
    made: dict[fx.Node, fx.Node] = {}
    for op in row:
        for arg in op.node.all_input_nodes:
            if get_storage(get_fake(arg)) not in inside and arg not in given:
                given[arg] = graph.placeholder(f"given_{len(given)}")

    get_value = partial(_make_value, graph, given, made)
    for before, op in zip([None, *row], row, strict=False):
        args, kwargs = fx.map_arg((op.node.args, op.node.kwargs), get_value)
        target: Any = op.node.target
        function: Any = get_callable(target)
        if before is not None and (out := find_out_variant(target)) is not None:
            over = _find_overwritten(op, before)
            assert over is not None
            function, kwargs = out[0], {**kwargs, out[1]: get_value(over)}
        elif before is not None:
            function = find_in_place_variant(target)
        made[op.node] = graph.call_function(function, args, kwargs)
    graph.output((made[row[-1].node],))
    return tuple(given), fx.GraphModule(torch.nn.Module(), graph).forward


def _make_value(graph: fx.Graph, given: dict[fx.Node, fx.Node], made: dict[fx.Node, fx.Node], arg: fx.Node) -> fx.Node:
    if arg in given:
        return given[arg]
    if arg not in made:  # a view of a tensor made inside
        arguments = fx.map_arg((arg.args, arg.kwargs), partial(_make_value, graph, given, made))
        made[arg] = graph.call_function(get_callable(arg.target), *arguments)
    return made[arg]
