"""Steps on the stand-in are traced on the CPU: what is captured says that it is on the device."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from planner.capture import trace
from planner.capture.frontend import joint
from planner.capture.signature import Batch
from planner.capture.step import TrainingStep
from tests.support.cuda_device.tensors import OnDevice, plain as on_the_host


def traced_on_the_cpu() -> Iterator[tuple[object, str, object]]:
    """Patches, by which steps on the device are traced with tensors of the CPU in their place."""
    original = joint.capture_joint_graph

    def capture_joint_graph(step: TrainingStep, batch: Batch, **options: Any) -> joint.Traced:
        place = joint.find_device(step, batch)
        if place.type != "cuda":
            return original(step, batch, **options)
        torch.cuda.synchronize(place)
        # With builds for CUDA, Dynamo would ask for the stream of a device, which the driver has not.
        with _on_the_cpu(step), patch.object(torch.accelerator, "is_available", lambda: False):
            traced, _, branches = original(step, _batch_on_the_cpu(batch), **options)
        _move(traced.graph_module, place)
        return traced, None, branches

    yield trace, "capture_joint_graph", capture_joint_graph


@contextmanager
def _on_the_cpu(step: torch.nn.Module) -> Iterator[None]:
    """Inside, parameters and buffers of `step` are tensors of the CPU in the same memory."""
    made: dict[int, Any] = {}

    def plain(value: Any) -> Any:
        if not isinstance(value, OnDevice):
            return value
        if id(value) not in made:
            same = on_the_host(value.detach())
            made[id(value)] = torch.nn.Parameter(same, value.requires_grad) if isinstance(value, torch.nn.Parameter) else same
        return made[id(value)]

    before = []
    for module in step.modules():
        for values in (module._parameters, module._buffers):
            before.append((values, dict(values)))
            values.update({name: plain(value) for name, value in values.items()})
    try:
        yield
    finally:
        for values, old in before:
            values.update(old)


def _batch_on_the_cpu(batch: Batch) -> Any:
    def plain(value: Any) -> Any:
        return on_the_host(value.detach()).requires_grad_(value.requires_grad) if isinstance(value, OnDevice) else value

    return torch.utils._pytree.tree_map(plain, batch)


def _move(module: torch.fx.GraphModule, place: torch.device) -> None:
    """Let `module` make, read and name what is at `place` where that was the CPU."""

    def named(value: Any) -> Any:
        return place if isinstance(value, torch.device) and value.type == "cpu" else value

    for node in module.graph.nodes:
        node.args = torch.fx.node.map_aggregate(node.args, named)
        node.kwargs = torch.fx.node.map_aggregate(node.kwargs, named)
        for value in torch.utils._pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch._subclasses.FakeTensor) and value.fake_device.type == "cpu":
                value.fake_device = place
        if node.op == "get_attr":
            value = getattr(module, node.target)
            if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dim():
                setattr(module, node.target, value.to(place))
