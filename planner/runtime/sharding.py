"""Sharded parameters of a step: a process holds its part of each, as a DTensor."""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from planner.capture.signature import Batch

T = TypeVar("T")


class Unsharded:
    """A model whose parameters are whole tensors.

    Attributes:
        description: equal for models that are sharded alike, for the cache of plans; empty if one is not.
        keeps_peak: True if no step takes more than its plan, False if one with copies of changed inputs may, within the budget.
    """

    description = ""
    keeps_peak = False

    def enter_captured_state(self) -> AbstractContextManager[None]:
        """Put the model into the state in which it is captured; guards look at it in this state."""
        return nullcontext()

    def agree(self, plan: Hashable, batch: Batch, check: Callable[[], T]) -> T:
        """Return the result of `check`, which refuses `batch` by a MismatchError; processes that run `plan` do the same."""
        return check()

    def unwrap(self, static: Sequence[Any], trained: Sequence[int]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the tensors that a program reads, and the shardings of those that are `trained`, which `wrap` takes."""
        del trained
        return static, ()

    def wrap(self, gradients: Sequence[torch.Tensor | None], shardings: Sequence[Any]) -> Sequence[torch.Tensor | None]:
        """Return the gradients for autograd."""
        del shardings
        return gradients
