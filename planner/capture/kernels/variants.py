"""Variants of Inductor's compilation of a step: their kernels differ, and none is the best for every budget.

A fused kernel of the backward pass recomputes cheaply, but no schedule can undo that; a schedule can keep or recompute tensors
that the forward pass saves. If Inductor writes each part of a concatenation in place, the concatenation cannot be recomputed,
since its parts are no tensors; if one kernel makes it, it can.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from torch import fx

from planner.torch_private.capture import default_partition, functorch_config, inductor_config
from planner.torch_private.inductor import CustomPartitionerFn

_BUDGET = 0.8  # of the bytes that min-cut would save, by PyTorch's estimate


class CompileVariant(StrEnum):
    """A variant of the compilation of a step.

    Attributes:
        DEFAULT: as ``torch.compile`` does: the forward pass saves as few bytes as possible at no cost (min-cut).
        WHOLE: the same, with each concatenation made by one kernel.
        BUDGET: with an ``activation_memory_budget`` of 0.8, and each concatenation made by one kernel.
        KEEP: the forward pass saves what autograd would, and each concatenation is made by one kernel.
    """

    DEFAULT = "default"
    WHOLE = "whole"
    BUDGET = "budget"
    KEEP = "keep"

    @contextmanager
    def choose(self) -> Iterator[None]:
        """Compile as this variant inside the context."""
        if self is CompileVariant.DEFAULT:
            yield
            return
        settings: dict[str, Any] = {"force_pointwise_cat": True}
        if self is CompileVariant.KEEP:
            settings["custom_partitioner_fn"] = _KeepAutogradSaved()
        budget = {"activation_memory_budget": _BUDGET} if self is CompileVariant.BUDGET else {}
        with functorch_config.patch(budget), inductor_config.patch(settings):
            yield


class _KeepAutogradSaved(CustomPartitionerFn):
    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        del kwargs["compiler"]
        return default_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        """Return the key for Inductor's cache."""
        return "planner: what autograd keeps"
