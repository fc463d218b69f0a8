"""The gradient of dropout, rounded as eager PyTorch rounds it on the CPU.

A captured graph calls the fused ``native_dropout``, which eager PyTorch calls on CUDA only; on the CPU it multiplies by
scaled noise. In float32 both round alike. In half precision the fused backward kernel does not round the scaled noise,
so its gradients differ in the last bit.
"""

import torch
from torch import fx

from planner.capture.rewrites.outputs import call_before, fake

aten = torch.ops.aten


def dropout_as_eager(graph: fx.Graph) -> None:
    """Replace the backward pass of each half-precision dropout on the CPU by gradient times scaled noise, in place."""
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout_backward.default):
        gradient, mask, scale = node.args
        dtype = fake(node).dtype
        if fake(node).device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
            continue
        mask = call_before(node, aten._to_copy.default, mask, dtype=dtype)
        noise = call_before(node, aten.div.Tensor, mask, 1 / scale)
        product = call_before(node, aten.mul.Tensor, gradient, noise)
        for written in (mask, noise, product):
            written.meta = {**node.meta, **written.meta}
        node.replace_all_uses_with(product)
        graph.erase_node(node)
