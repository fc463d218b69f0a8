"""Graphs that run without a plan: the memory that they take, for the planned graphs of their steps.

The sizes are those of fake tensors. Kernels' own memory, values inside of branches, and sizes that depend on data are not known.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from planner.capture.rewrites.outputs import list_tensors
from planner.torch_private.capture import TangentAOTInput, boxed_nop
from planner.train.backend.step_memory import Storages, collect_storages


class UnplannedGraph:
    """A graph that runs op by op, as AOTAutograd's ``aot_eager`` does.

    Attributes:
        forward, backward: compilers of its passes, for AOTAutograd.
        peak_bytes: the most bytes that its passes take at once beside its inputs, as far as they are compiled.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._kept_bytes = 0

    def forward(self, module: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        """Return the forward pass."""
        self.peak_bytes, self._kept_bytes = pass_bytes(module.graph)
        return boxed_nop(module, examples)

    def backward(self, module: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        """Return the backward pass."""
        placeholders = module.graph.find_nodes(op="placeholder")
        tangents = [node for node in placeholders if isinstance(node.meta.get("desc"), TangentAOTInput)]
        backward_bytes = pass_bytes(module.graph)[0] + sum(_collect_storages(*tangents).values())
        self.peak_bytes = max(self.peak_bytes, self._kept_bytes + backward_bytes)
        return boxed_nop(module, examples)


def pass_bytes(graph: fx.Graph) -> tuple[int, int]:
    """Return the most bytes that the values of `graph` take at once beside its inputs, and the bytes of its outputs."""
    nodes = list(graph.nodes)
    inputs = {storage for node in graph.find_nodes(op="placeholder") for storage in _collect_storages(node)}
    used = [_collect_storages(node, *node.all_input_nodes) for node in nodes]
    last_use = {storage: i for i, found in enumerate(used) for storage in found}
    live: Storages = {}
    peak_bytes = 0
    for i, found in enumerate(used[:-1]):
        live |= {storage: size_bytes for storage, size_bytes in found.items() if storage not in inputs}
        peak_bytes = max(peak_bytes, sum(live.values()))
        for storage in found:
            if last_use[storage] == i:
                live.pop(storage, None)
    return peak_bytes, sum(live.values())


def _collect_storages(*nodes: fx.Node) -> Storages:
    """Return the storages of the values of `nodes` whose sizes are known."""
    values = (value for node in nodes for value in list_tensors(node.meta.get("val")))
    return collect_storages(v for v in values if v.layout is torch.strided and all(isinstance(size, int) for size in v.shape))
