"""Calls of hooks on gradients in a joint graph: an op for each, which calls Python once in a backward pass, in program order.

A hook gets copies, and what it returns is copied: the plan may overwrite the memory of its own tensors, which the hook may keep.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from planner.torch_private.core import is_in_backward_pass


@torch.library.custom_op("planner::call_hook", mutates_args=())
def _call_hook(gradients: Sequence[Tensor], returned: int, number: int) -> list[Tensor]:
    """Stand for the call of a hook (``GradientHook``), which returns gradients in place of the first ones."""
    raise NotImplementedError  # the program has the hook itself


@_call_hook.register_fake
def _(gradients: Sequence[Tensor], returned: int, number: int) -> list[Tensor]:
    return [gradient.clone() for gradient in gradients[:returned]]


CALL_HOOK = torch.ops.planner.call_hook.default
# Key in the meta of a node that calls a hook.
HOOK = "planner_hook"


@dataclass(frozen=True, slots=True, eq=False)
class GradientHook:
    """The function that a program calls for a hook.

    Attributes:
        call: called with the gradients; returns those in place of the first ones, or None.
    """

    call: Callable[[Sequence[Tensor]], Sequence[Tensor] | None]

    def __call__(self, gradients: Sequence[Tensor], returned: int) -> list[Tensor]:
        """Return the gradients with which the backward pass goes on; no hook is called where the op is measured alone."""
        given = [gradient.clone() for gradient in gradients]
        found = self.call(given) if is_in_backward_pass() else None
        return [gradient.clone() for gradient in (given if found is None else found)[:returned]]
