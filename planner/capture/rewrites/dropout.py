"""Dropout as eager PyTorch computes it.

A captured graph calls the fused ``native_dropout``, which eager PyTorch calls on CUDA only; on the CPU it multiplies by
scaled noise. In float32 eager PyTorch divides by the rounded probability of keeping, and the fused kernel multiplies by a factor
that is computed in float64: for some probabilities, such as 0.15 and 0.45, they differ in the last bit. In half precision the
fused backward kernel does not round the scaled noise, so its gradients differ. If everything is dropped, eager PyTorch draws no
random numbers.
"""

import operator

import numpy as np
import torch
from torch import fx

from planner.capture.rewrites.outputs import call_before, get_fake, is_same_layout

aten = torch.ops.aten


def replace_dropout(graph: fx.Graph) -> None:
    """Replace dropout of everything, and what rounds otherwise on the CPU, in place."""
    _round_factors(graph)
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout_backward.default):
        if node.args[2] == 0.0:
            _replace(node, call_before(node, aten.mul.Tensor, node.args[0], 0.0))
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        if node.args[1] == 1.0:
            for item in list(node.users):  # the results and the mask, which the backward pass does not read
                _replace(item, call_before(node, aten.mul.Tensor, node.args[0], 0.0))
            graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout_backward.default):
        gradient, mask, scale = node.args
        dtype = get_fake(node).dtype
        if get_fake(node).device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
            continue
        mask = call_before(node, aten._to_copy.default, mask, dtype=dtype)
        noise = call_before(node, aten.div.Tensor, mask, 1 / scale)
        product = call_before(node, aten.mul.Tensor, gradient, noise)
        for written in (mask, noise):
            written.meta = {**node.meta, **written.meta}
        _replace(node, product)


def _round_factors(graph: fx.Graph) -> None:
    """Scale float32 tensors on the CPU by eager PyTorch's factors; the fused backward kernel multiplies by any."""
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        x, p, train = node.args
        value, factor = get_fake(x), float(np.float32(1) / np.float32(1 - p)) if p < 1 else 1.0
        if not train or (value.device.type, value.dtype) != ("cpu", torch.float32) or factor == np.float32(1 / (1 - p or 1)):
            continue
        items = {item.args[1]: item for item in node.users}
        with graph.inserting_after(node):
            mask = graph.call_function(operator.getitem, (node, 1))
        mask.meta = {**node.meta, "val": node.meta["val"][1]}
        if 1 in items:
            for reader in graph.find_nodes(op="call_function", target=aten.native_dropout_backward.default):
                if reader.args[1] is items[1]:
                    reader.update_arg(2, factor)
            _replace(items[1], mask)
        if 0 in items:
            _replace(items[0], call_before(mask.next, aten.native_dropout_backward.default, x, mask, factor))


def _replace(node: fx.Node, other: fx.Node) -> None:
    """Replace `node` by `other`, in the same storage if it has the same layout: views of it have its identity."""
    before, value = get_fake(node), get_fake(other)
    same = before.dtype == value.dtype and is_same_layout(before, value)
    other.meta = {**other.meta, **node.meta} if same else {**node.meta, **other.meta}
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)
