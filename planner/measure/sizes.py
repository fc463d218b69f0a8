"""Sizes of tensors: computed from their shapes, and as kernels allocate them."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from planner.capture.lowering.lower import Capture
from planner.capture.lowering.statics import compute_allocated_bytes
from planner.graphs.ir import Op, Tensor
from planner.graphs.provenance import Provenance


def set_dense_sizes(capture: Capture) -> Capture:
    """Return `capture` with the size of each tensor computed from its shape.

    The storages of fake tensors give no sizes: they are larger the first time that an op is captured in a process than later.
    """
    device, tensors = torch.device(capture.graph.device), list(capture.graph.tensors)
    for tensor in capture.graph.tensors:
        if not tensor.static and tensor.dtype and tensor.size_bytes:
            size_bytes = math.prod(tensor.shape) * getattr(torch, tensor.dtype).itemsize
            tensors[tensor.id] = replace(tensor, size_bytes=compute_allocated_bytes(size_bytes, device))
    return replace_ops_and_tensors(capture, capture.graph.ops, tensors)


def set_recorded_sizes(capture: Capture, provenance: Provenance) -> Capture:
    """Return `capture` with the allocated sizes that a profile of the same step recorded in `provenance`."""
    sizes = dict(provenance.allocated_bytes)
    tensors = [replace(t, size_bytes=sizes.get(t.id, t.size_bytes)) for t in capture.graph.tensors]
    return replace_ops_and_tensors(capture, capture.graph.ops, tensors)


def replace_ops_and_tensors(capture: Capture, ops: Sequence[Op], tensors: Sequence[Tensor]) -> Capture:
    """Return `capture` with these ops and tensors; outputs overwrite only inputs of their own size."""
    sizes = [t.size_bytes for t in tensors]
    ops = [replace(op, overwrites=tuple(p for p in op.overwrites if sizes[p[0]] == sizes[p[1]])) for op in ops]
    return replace(capture, graph=replace(capture.graph, ops=tuple(ops), tensors=tuple(tensors)))
