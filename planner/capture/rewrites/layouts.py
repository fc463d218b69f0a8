"""The layouts of tensors in eager PyTorch, for ops whose rounding depends on them.

A captured graph is functional: a part of a tensor that eager PyTorch writes in place (a gate of ``nn.GRU``, a slice) is a
tensor of its own there, without gaps between its rows. Kernels process memory without gaps as a whole and other memory row
by row, with vector instructions up to the rest of a row and one by one for the rest, which rounds differently.

Only ops that may round are given the layout; elementwise ops of one rounding (``_EXACT``) give the same bits in any order. Known
weakness: the copy with gaps is made again for each reader, and costs time and memory beyond eager PyTorch's.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from planner.capture.rewrites.outputs import is_same_layout, list_tensors
from planner.torch_private.core import (
    PROXY_MODE,
    FakeTensorMode,
    FunctionalTensor,
    FunctionalTensorMode,
    OpOverload,
    compute_elementwise_output_strides,
    detect_fake_mode,
    from_functional_tensor,
    get_dispatch_mode,
    has_free_unbacked_symbols,
    pytree,
    suggest_memory_format,
)
from planner.torch_private.patches import wrap

aten = torch.ops.aten

_WRITTEN = "written_strides"
_WRITER = "written_by"
_READ = "read_strides"

# Each element of the result is an element of an input, or one rounding of one operation, or inputs are made contiguous: no layout
# can change it.
_EXACT = {
    aten.add,
    aten.sub,
    aten.mul,
    aten.div,
    aten.neg,
    aten.relu,
    aten.threshold_backward,
    aten.where,
    aten.masked_fill,
    aten.clone,
    aten.copy,
    aten.copy_,
    aten._to_copy,
    aten.cat,
    aten.slice_scatter,
    aten.select_scatter,
    aten.diagonal_scatter,
    aten.as_strided_scatter,
    aten.native_layer_norm,
    aten.native_layer_norm_backward,
    aten.native_group_norm_backward,  # by its formula, which is captured with contiguous gradients
}

# Ops whose kernels give another layout than their fake kernels, which follow a decomposition: that of the memory format of the
# input at a position, or contiguous (ATen/native/Normalization.cpp, group_norm.cpp, layer_norm.cpp, Loss.cpp, Activation.cpp).
# Forward kernels for CUDA keep the strides of what they read.
_FORMATS: dict[Callable[..., Any], int | None] = {
    aten._native_batch_norm_legit.default: 0,
    aten._native_batch_norm_legit.no_stats: 0,
    aten._native_batch_norm_legit_functional.default: 0,
    aten._native_batch_norm_legit_no_training.default: 0,
    aten.native_batch_norm_backward.default: 1,
    aten.batch_norm_backward.default: 1,
    aten.native_group_norm_backward.default: 1,
    aten.channel_shuffle.default: 0,
    aten.max_unpool2d.default: 0,
    **dict.fromkeys(
        (
            aten.native_layer_norm_backward.default,
            aten._log_softmax_backward_data.default,
            aten.mse_loss_backward.default,
            aten.huber_loss_backward.default,
            aten.smooth_l1_loss_backward.default,
            aten.log_sigmoid_forward.default,
            aten.normal.Tensor_Tensor,
            aten.pow.Scalar,
        )
    ),
}

# Elementwise ops without the tag.
_ELEMENTWISE = {
    aten.floor_divide.default,
    aten.hardswish_backward.default,
    aten.hardtanh_backward.default,
    aten.leaky_relu_backward.default,
}
# Those whose kernels take the input before the gradient.
_SECOND_FIRST = {aten.leaky_relu_backward.default, aten.threshold_backward.default}

# In-place ops whose results do not depend on earlier values.
_FILLING = {
    aten.bernoulli_,
    aten.cauchy_,
    aten.exponential_,
    aten.geometric_,
    aten.log_normal_,
    aten.normal_,
    aten.random_,
    aten.uniform_,
}


def record_written_strides() -> AbstractContextManager[object]:
    """Record the strides of tensors that in-place ops write, at the nodes that are captured for these ops."""
    return wrap(FunctionalTensorMode, "__torch_dispatch__", _dispatch_and_record)


def _dispatch_and_record(
    dispatch: Callable[..., Any], mode: FunctionalTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    result = dispatch(mode, func, types, args, kwargs)
    if isinstance(func, OpOverload) and _is_first_written(func) and isinstance(args[0], FunctionalTensor):
        _record(func, args[0])
    return result


def _is_first_written(op: OpOverload) -> bool:
    alias = op._schema.arguments[0].alias_info if op._schema.arguments else None
    return alias is not None and alias.is_write


def _record(op: OpOverload, written: FunctionalTensor) -> None:
    proxies = get_dispatch_mode(PROXY_MODE)
    value = from_functional_tensor(written.elem)
    if proxies is None or value not in proxies.tracer.tensor_tracker or value.stride() == written.stride():
        return
    node = proxies.tracer.tensor_tracker[value].proxy.node
    if isinstance(node.target, OpOverload) and node.target._opname == op._opname.removesuffix("_"):
        node.meta[_WRITTEN] = written.stride()
        node.meta[_WRITER] = op


def lay_out_as_kernel(op: Callable[..., Any], args: Sequence[Any], results: Any) -> Any:
    """Return the fake `results` of `op` in the layout that its kernel gives them."""
    if _is_elementwise(op):
        return _lay_out_as_inputs(op, args, results)
    tensors = list_tensors(results) if op in _FORMATS else []
    if not tensors or (tensors[0].device.type != "cpu" and "backward" not in op.__name__):
        return results
    if (position := _FORMATS[op]) is None:
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.contiguous, results)
    memory_format = suggest_memory_format(args[position])
    if isinstance(results, torch.Tensor):
        return results.contiguous(memory_format=memory_format)
    return (results[0] if results[0] is None else results[0].contiguous(memory_format=memory_format), *results[1:])


@cache
def _is_elementwise(op: Callable[..., Any]) -> bool:
    """Return True if the kernel of `op` allocates its result in the order in which it goes over the elements of its inputs."""
    if not isinstance(op, OpOverload) or op in _FORMATS or op._schema.is_mutable or op.overloadpacket is aten.masked_fill:
        return False  # masked_fill fills a copy
    return torch.Tag.pointwise in op.tags or op in _ELEMENTWISE


def _lay_out_as_inputs(op: Callable[..., Any], args: Sequence[Any], result: Any) -> Any:
    """Return the fake `result` of an elementwise `op` in the layout in which its kernel goes over several inputs."""
    read = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if not isinstance(result, torch.Tensor) or len(read) < 2 or any(arg.layout is not torch.strided for arg in read):
        return result  # of sparse ones, none has strides
    if has_free_unbacked_symbols(result) or all(arg.is_contiguous() for arg in read):
        return result  # sizes that depend on data are refused by their line
    if len({arg.dtype for arg in read if arg.dim()} - {torch.bool}) > 1:
        return result  # some are cast, and expanded ones then whole, in fake kernels too
    read = read[::-1] if op in _SECOND_FIRST else read
    strides = compute_elementwise_output_strides(*(arg.expand_as(result) for arg in read))
    return result if result.stride() == strides else allocate_with_strides(result, strides)


def record_eager_layouts(graph: fx.Graph) -> None:
    """Record at each op of `graph` which inputs have another layout in eager PyTorch, if its result may depend on it."""
    for node, strides in find_eager_layouts(graph).items():
        node.meta[_READ] = strides


def find_eager_layouts(
    graph: fx.Graph, given: Mapping[fx.Node, Sequence[int] | None] = MappingProxyType({})
) -> dict[fx.Node, dict[fx.Node, Sequence[int]]]:
    """Return the strides of inputs that have another layout in eager PyTorch, by op whose result may depend on it.

    Args:
        given: the strides that inputs of the graph have there; None for zeros that are not there. A sum with an expanded tensor
            has the layout of the other, so that what is computed of such zeros counts as expanded.
    """
    found: dict[fx.Node, dict[fx.Node, Sequence[int]]] = {}
    missing = {node for node, strides in given.items() if strides is None}
    reached = given.keys() - missing
    eager = {node: value for node, s in given.items() if not is_same_layout(value := _lay_out(node, s), node.meta["val"])}
    nodes: Iterable[fx.Node] = graph.nodes
    for node in nodes:
        if not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
        elif not missing.isdisjoint(node.all_input_nodes):
            missing.add(node)
            eager[node] = _lay_out(node, None)
            continue
        differing = {arg: eager[arg] for arg in node.all_input_nodes if arg in eager}
        if node.op != "call_function" or not (differing or _WRITTEN in node.meta):
            continue
        if isinstance(node.target, OpOverload) and not node.target.is_view and not _is_exact(node):
            found[node] = {
                arg: value.stride()
                for arg, value in differing.items()
                if isinstance(value, torch.Tensor)
                and arg not in missing
                and _is_writable(value)
                and not (_is_pointwise(node) and _has_same_rows(value, arg.meta["val"]))
            }
        # The layout of a result follows from those of its inputs, so it is carried on to the next reader.
        present = [arg for arg in node.all_input_nodes if arg not in missing]
        value = _compute_eager_value(node, differing)
        if node.target is aten.add.Tensor and len(present) < len(node.all_input_nodes):  # nothing is added there
            value = eager.get(present[0], value).expand_as(value)
        if _list_strides(value) != _list_strides(node.meta["val"]):
            eager[node] = value
    return found


def read_strides(node: fx.Node) -> Mapping[fx.Node, Sequence[int]]:
    """Return the strides of the inputs that `node` should read with other strides than they have."""
    found: Mapping[fx.Node, Sequence[int]] = node.meta.get(_READ, {})
    return found


def find_in_place_random_op(node: fx.Node) -> tuple[OpOverload, Sequence[int]] | None:
    """Return the in-place random op that `node` was captured for, and the strides of its target; None for other nodes.

    On some processors, the order in which random numbers are assigned to elements depends on the layout.
    """
    op = node.meta.get(_WRITER)
    return (op, node.meta[_WRITTEN]) if op is not None and op.overloadpacket in _FILLING else None


def allocate_with_strides(value: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return uninitialized memory like `value`, with `strides`."""
    return value.new_empty_strided(value.shape, strides)


def copy_with_strides(value: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return a copy of `value` with `strides`, with gaps between its rows; strides of 0 stay expanded."""
    whole = value.shape
    for dim, stride in enumerate(strides):
        value = value.narrow(dim, 0, 1) if stride == 0 else value
    return allocate_with_strides(value, strides).copy_(value).expand(whole)


def _lay_out(node: fx.Node, strides: Sequence[int] | None) -> Any:
    """Return the value of `node` with `strides`; None for expanded tensors."""
    value = node.meta.get("val")
    if value is None:
        return None
    with _get_fake_mode(value):
        return pytree.tree_map_only(
            torch.Tensor, lambda t: allocate_with_strides(t, (0,) * t.dim() if strides is None else strides), value
        )


def _is_exact(node: fx.Node) -> bool:
    return node.target.overloadpacket in _EXACT and "alpha" not in node.kwargs  # type: ignore[union-attr]


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in node.target.tags  # type: ignore[union-attr]


def _has_same_rows(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if the strides of two tensors of one shape are equal but for dimensions of size 1, which pointwise ops skip."""
    return all(a == b or size == 1 for size, a, b in zip(value.shape, value.stride(), other.stride(), strict=True))


def _compute_eager_value(node: fx.Node, eager: Mapping[fx.Node, Any]) -> Any:
    """Return a fake tensor like the result of `node` in eager PyTorch; `eager` has the inputs that differ there."""
    captured = node.meta["val"]
    if _WRITTEN in node.meta:
        with _get_fake_mode(captured):
            return allocate_with_strides(captured, node.meta[_WRITTEN])
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: eager[arg] if arg in eager else arg.meta["val"])
    # A gradient that has no such view is copied: the view's own backward pass reshapes.
    target: Any = aten.reshape.default if node.target is aten.view.default else node.target
    with _get_fake_mode(captured), torch.no_grad():
        return lay_out_as_kernel(target, args, target(*args, **kwargs))


def _get_fake_mode(value: Any) -> FakeTensorMode:
    mode = detect_fake_mode(pytree.tree_leaves(value))
    assert mode is not None
    return mode


def _list_strides(value: Any) -> list[tuple[int, ...]]:
    return [tensor.stride() for tensor in list_tensors(value)]


def _is_writable(value: torch.Tensor) -> bool:
    """Return True if no two elements share memory, except in expanded dimensions."""
    dims = sorted((stride, size) for stride, size in zip(value.stride(), value.shape, strict=True) if stride and size > 1)
    return all(stride * size <= larger for (stride, size), (larger, _) in pairwise(dims))
