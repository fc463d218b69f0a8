"""Random ops that can be recomputed while other threads draw random numbers.

A recomputed op must draw the same numbers again. All threads share PyTorch's default generator: between reading its state and
drawing, and while an earlier state is set in it, another thread may draw. So an op that will be recomputed draws from a
generator of its own, which is set to the state that was read, and the default one is advanced as by the op itself. All draws
of planned steps are made under one lock (``planner.capture.program.draws``).
"""

from typing import Any

import torch
from torch import Tensor, fx

from planner.torch_private.core import OpOverload

aten = torch.ops.aten


def find_function_with_generator(node: fx.Node) -> Any:
    """Return a function that computes the same as `node` and has an argument ``generator``; None if there is none."""
    target = node.target
    if target is aten.native_dropout.default:
        probability, train = node.args[1], node.args[2]
        on_cpu = node.meta["val"][0].device.type == "cpu"
        return draw_dropout if on_cpu and train is not False and 0.0 < probability < 1.0 else None  # type: ignore[operator]
    if not isinstance(target, OpOverload):
        return None
    names = _list_names(target)
    if "generator" in names:
        return target
    packet = target.overloadpacket
    for overload in (getattr(packet, name) for name in packet.overloads()):
        candidate = _list_names(overload)
        if "generator" in candidate and [name for name in candidate if name != "generator"] == names:
            return overload
    return None


def draw_dropout(  # the signature of the operator
    x: Tensor,
    p: float,
    train: bool | None,  # noqa: FBT001
    *,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Compute ``native_dropout`` on the CPU, as PyTorch does, drawing from `generator`."""
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    out = x.mul(mask)  # before the scale is made, as in the kernel: memory is at its peak here
    scale = torch.scalar_tensor(1 / (1 - p), dtype=x.dtype)  # rounded as in the kernel
    return out.mul_(scale), mask


def _list_names(overload: OpOverload) -> list[str]:
    return [argument.name for argument in overload._schema.arguments]
