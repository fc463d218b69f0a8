"""Random ops that can be executed again while others draw.

An op that is executed again must draw the same numbers. PyTorch's default generator is one for all threads: between reading
its state and drawing, and while an earlier state stands in it, another thread may draw. So an op that will be executed again
draws from a generator of its own, which is set to the state that was read; the default one is moved on to where it would have
come by the op itself. All that planned steps draw, they draw under one lock.
"""

import threading
from typing import Any

import torch
from torch import Tensor, fx

from planner.torch_private.core import OpOverload

aten = torch.ops.aten

LOCK = threading.RLock()


def drawing_from(node: fx.Node) -> Any:
    """What computes the same as `node`, and has an argument ``generator``; None where nothing does."""
    target = node.target
    if target is aten.native_dropout.default:
        probability, train = node.args[1], node.args[2]
        on_cpu = node.meta["val"][0].device.type == "cpu"
        return dropout_from if on_cpu and train is not False and 0.0 < probability < 1.0 else None  # type: ignore[operator]
    if not isinstance(target, OpOverload):
        return None
    names = _names(target)
    if "generator" in names:
        return target
    packet = target.overloadpacket
    for overload in (getattr(packet, name) for name in packet.overloads()):
        others = _names(overload)
        if "generator" in others and [name for name in others if name != "generator"] == names:
            return overload
    return None


def dropout_from(x: Tensor, p: float, train: bool | None, *, generator: torch.Generator) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """``native_dropout`` on the CPU, as it is written in PyTorch, drawing from `generator`."""
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    kept = x.mul(mask)  # before there is a scale: the kernel, too, takes most here
    scale = torch.tensor(1 / (1 - p), dtype=x.dtype)  # rounded as the kernel rounds it
    return kept.mul_(scale), mask


def _names(overload: OpOverload) -> list[str]:
    return [argument.name for argument in overload._schema.arguments]


def generator_of(device: torch.device) -> torch.Generator:
    """The one that random ops on `device` draw from."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator
