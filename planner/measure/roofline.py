"""Modelled time and workspace of each op of a captured step, for a device that need not be present."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from planner.capture.lowering.lower import Capture
from planner.capture.lowering.statics import compute_allocated_bytes
from planner.capture.options.traced import measure_uses
from planner.capture.program.program import Composed, Repeated
from planner.capture.rewrites.outputs import list_tensors
from planner.graphs.ir import Graph
from planner.graphs.provenance import Times
from planner.settings.devices import DeviceSpec, model_op_time_s, model_workspace_bytes
from planner.torch_private.core import StorageWeakRef, TorchDispatchMode


def model_times(capture: Capture, device: DeviceSpec) -> Graph:
    """Return the captured graph with times and workspaces from the roofline of `device`."""
    ops = []
    known: dict[Hashable, tuple[float, int]] = {}
    for op, node, call in zip(capture.graph.ops, capture.nodes, capture.program.calls, strict=True):
        if (composed := call.composed) is not None:
            part, count = (composed, call.fakes or ()), 1
            key: Hashable = id(composed)
            if isinstance(composed, Repeated):
                part, count, key = composed.part, composed.count, composed.alike
            if key not in known:
                known[key] = model_composed(*part, device)
            time_s, bytes_ = known[key]
            ops.append(replace(op, time_s=count * time_s, workspace_bytes=bytes_))
            continue
        if node is None:
            ops.append(op)  # saving the generator's state runs no kernel
            continue
        time_s, bytes_ = model_node(node, device)
        ops.append(replace(op, time_s=time_s, workspace_bytes=bytes_))
    provenance = capture.graph.provenance.record(times=Times.MODELLED, device=device.name, torch=torch.__version__)
    graph = Graph(tuple(ops), capture.graph.tensors, capture.graph.kept, provenance)
    return measure_uses(replace(capture, graph=graph), None)


def model_node(node: fx.Node, device: DeviceSpec) -> tuple[float, int]:
    """Return the seconds and the workspace of the call of `node`, on its fake values."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    call = (node.target, args, kwargs, node.meta["val"], device)
    return model_op_time_s(*call), model_workspace_bytes(*call)


def model_composed(composed: Composed, fakes: tuple[Any, ...], device: DeviceSpec) -> tuple[float, int]:
    """Return the seconds of all calls of `composed` on `fakes`, and their peak memory in bytes besides its inputs and outputs."""
    with torch.no_grad(), _ModelledCalls(device) as seen:
        made = composed(*fakes)
    return seen.time_s, max(0, seen.peak_bytes - sum(seen.count_bytes(value) for value in made))


class _ModelledCalls(TorchDispatchMode):
    """A mode that adds up the costs of the calls inside, on fake tensors.

    Attributes:
        time_s: total seconds.
        peak_bytes: peak memory of tensors made inside, workspaces included.
    """

    def __init__(self, device: DeviceSpec) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.time_s, self.peak_bytes = 0.0, 0
        self._device = device
        self._planned = torch.device("cpu" if device.name == "cpu" else "cuda")
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def count_bytes(self, value: torch.Tensor) -> int:
        """Return the allocated bytes of the storage of `value`."""
        return compute_allocated_bytes(value.untyped_storage().nbytes(), self._planned)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        read = {value.untyped_storage()._cdata for value in list_tensors((args, dict(named)))}
        result = func(*args, **named)
        if not (made := list_tensors(result)):
            return result  # a query, such as for the device of a tensor
        self.time_s += model_op_time_s(func, args, named, result, self._device)
        for value in made:
            storage = value.untyped_storage()
            if storage._cdata not in read:
                self._made[storage._cdata] = StorageWeakRef(storage), self.count_bytes(value)
        self._made = {key: (ref, size) for key, (ref, size) in self._made.items() if not ref.expired()}
        allocated = sum(size for _, size in self._made.values())
        self.peak_bytes = max(self.peak_bytes, allocated + model_workspace_bytes(func, args, named, result, self._device))
        return result
