"""Polyfills for functions that Dynamo cannot trace as they are, for ``torch.compile(model, backend="planner")``."""

from types import FunctionType

import torch

from planner.torch_private.capture import substitute_in_graph
from planner.torch_private.core import detect_is_causal_mask

_written = detect_is_causal_mask
# A separate function object, because the substitution below would replace the original too.
_as_written = FunctionType(_written.__code__, _written.__globals__, _written.__name__, _written.__defaults__)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _step_is_captured() -> bool:
    """Return True if a step is being exported; before torch 2.13 Dynamo answers True wherever it compiles."""
    return torch.compiler.is_exporting()


@substitute_in_graph(detect_is_causal_mask)
def may_leave_out_mask(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:  # noqa: FBT001 (its signature)
    """Return True if attention may leave out `mask`, because the caller states that it is causal.

    PyTorch's own version also reads the mask's values if `is_causal` is None. That causes a graph break, in code where Dynamo
    does not start a new graph, so that a whole ``nn.Transformer`` runs uncompiled. With the mask, attention computes the same
    values. While a step is exported, with guards on data, the mask's values are read.
    """
    if _step_is_captured():
        return bool(_as_written(mask, is_causal, size))
    return bool(is_causal)
