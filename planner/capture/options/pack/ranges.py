"""Integer results of ops, with a range known from shapes, in fewer bytes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from graphs.ir import Phase
from planner.capture.options.additions import get_value
from planner.capture.options.pack.finder import PackFinder, allocate_like
from planner.capture.program.program import Path
from planner.capture.rewrites.outputs import get_fake, is_dense

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Positions:
    """The positions that a kernel returns along a dimension.

    Attributes:
        path: path of the positions in the kernel's value, as in ``Statement.outputs``.
        argument: position of the dimension argument.
        default: the default dimension; None counts through all elements.
    """

    path: Path
    argument: int
    default: int | None = -1

    def count(self, node: fx.Node) -> int:
        """Return the number of positions."""
        x = node.args[0]
        assert isinstance(x, fx.Node)
        given = node.args[self.argument :][:1]
        dimension: Any = given[0] if given else node.kwargs.get("dim", self.default)
        return get_fake(x).numel() if dimension is None or not get_fake(x).dim() else get_fake(x).shape[dimension]


POSITIONS: Mapping[Any, Positions] = MappingProxyType(
    {
        aten.argmax.default: Positions((), 1, None),
        aten.argmin.default: Positions((), 1, None),
        aten.max.dim: Positions((1,), 1),
        aten.min.dim: Positions((1,), 1),
        aten.median.dim: Positions((1,), 1),
        aten.cummax.default: Positions((1,), 1),
        aten.cummin.default: Positions((1,), 1),
        aten.mode.default: Positions((1,), 1),
        aten.topk.default: Positions((1,), 2),
        aten.kthvalue.default: Positions((1,), 2),
        aten.sort.default: Positions((1,), 1),
        aten.sort.stable: Positions((1,), 2),
    }
)

_TYPES = {torch.uint8: 2**8, torch.int16: 2**15, torch.int32: 2**31}


def convert_integers(numbers: torch.Tensor, *, like: torch.Tensor) -> tuple[torch.Tensor]:
    """Return the same integers, in the dtype and the layout of the fake `like`."""
    return (allocate_like(like, numbers).copy_(numbers),)


def offer(finder: PackFinder) -> None:
    """Add two ops for the positions of each such kernel: to the narrowest dtype that holds them, and back."""
    for op, node in finder.iterate_calls(POSITIONS, Phase.FORWARD):
        found = POSITIONS[node.target]
        value = get_value(node, found.path)
        made_here = dict(zip((path for _, path in finder.capture.program.calls[op.id].outputs), op.outputs, strict=True))
        t, count = made_here[found.path], found.count(node)
        dtype = next((dtype for dtype, limit in _TYPES.items() if count <= limit), None)
        if dtype is not None and finder.is_worth(t) and is_dense(value):
            narrow = value.new_empty_strided(value.shape, value.stride(), dtype=dtype)
            name = finder.graph.tensors[t].name
            made = finder.additions.add_tensor(f"{name}@narrow", narrow)
            finder.add(partial(convert_integers, like=narrow), [t], like=op, of=name, does="to_narrow", makes=made)
            finder.add(partial(convert_integers, like=value), [made], like=op, of=name, does="from_narrow", makes=t)
