"""Modelled time and workspace of each op of a captured step, for a device that need not be here."""

from dataclasses import replace

import torch
from torch import fx

from graphs.capture.lower import Capture
from graphs.cost.devices import Device, op_time_s, workspace_bytes
from graphs.ir import Graph


def model_times(capture: Capture, device: Device) -> Graph:
    """The captured graph with the times and workspaces that a roofline of `device` gives its ops."""
    ops = []
    for op, node in zip(capture.graph.ops, capture.nodes, strict=True):
        if node is None:
            ops.append(op)  # saving the generator's state starts no kernel
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
        call = (node.target, args, kwargs, node.meta["val"], device)
        ops.append(replace(op, time_s=op_time_s(*call), workspace_bytes=workspace_bytes(*call)))
    provenance = {**capture.graph.provenance, "times": "modelled", "device": device.name, "torch": torch.__version__}
    return Graph(tuple(ops), capture.graph.tensors, capture.graph.kept, provenance)
