"""An option in one file, to show that it is all that a new one takes: saved tensors may be kept in bfloat16.

Like each option, it imports torch only when it is applied.
"""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from planner.capture.options.option import EAGER_KERNELS, StepOption
from planner.graphs.ir import Kind, Op, Phase

if TYPE_CHECKING:
    import torch

    from planner.capture.lowering.lower import Capture

NAME = "bfloat16"


def _cast(value: "torch.Tensor", *, dtype: "torch.dtype") -> "tuple[torch.Tensor]":
    return (value.to(dtype),)


def _apply(capture: "Capture") -> "Capture":
    import torch

    from planner.capture.options.additions import Additions

    additions = Additions(capture)
    for op, t, value in _saved(capture):
        name, rounded = capture.graph.tensors[t].name, value.new_empty(value.shape, dtype=torch.bfloat16)
        kept = additions.add_tensor(f"{name}@{NAME}", rounded)
        for dtype, read, made, does, differs in (
            (torch.bfloat16, t, kept, "keep", ""),
            (torch.float32, kept, t, "restore", f"rounding: {name} kept in bfloat16"),
        ):
            additions.add_op(
                partial(_cast, dtype=dtype),
                [read],
                like=op,
                name=f"{name}_{does}_{NAME}",
                target=f"{NAME}.{does}",
                outputs=[made],
                differs=differs,
            )
    return additions.build_capture()


def _saved(capture: "Capture") -> "Iterator[tuple[Op, int, torch.Tensor]]":
    """What the forward pass makes in float32 and the backward pass reads, with the op that makes it and a fake value."""
    import torch

    from planner.capture.options.additions import get_value

    graph = capture.graph
    for op, node, call in zip(graph.program, capture.nodes, capture.program.calls, strict=False):
        for t, path in call.outputs if op.phase is Phase.FORWARD else ():
            read = any(graph.ops[reader].phase is Phase.BACKWARD for reader in graph.consumers[t])
            value = get_value(node, path) if node is not None and graph.tensors[t].kind is Kind.ACTIVATION and read else None
            if value is not None and value.dtype is torch.float32 and value.is_contiguous():
                yield op, t, value


BFLOAT16 = StepOption(
    name=NAME,
    description="saved tensors may be kept in bfloat16",
    refused=EAGER_KERNELS,
    apply=_apply,
)
