"""Planned steps of one model for batches of several sizes, each made when its first batch comes."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from graphs.errors import InfeasibleError, LimitError
from planner.capture.signature import Batch, detach_batch, list_leaves
from planner.settings.budget import Budget
from planner.train.compile.lru import LRUCache

if TYPE_CHECKING:
    from planner.train.compile.step import PlannedStep

Shapes = tuple[tuple[int, ...], ...]


class SizePlans:
    """Planned steps by the shapes of their batches, all for one budget.

    Args:
        make: a planned step for a batch of another size and a budget.
        max_plans: number of cached plans; the least recently used one is dropped first.
    """

    def __init__(self, make: "Callable[[Batch, Budget], PlannedStep]", budget: Budget, *, max_plans: int) -> None:
        self._make, self._budget = make, budget
        self._kept: LRUCache[Shapes, PlannedStep] = LRUCache(max_plans)

    def list_steps(self) -> "tuple[PlannedStep, ...]":
        """Return the cached steps, the most recently used last."""
        return self._kept.values()

    def add(self, batch: Batch, step: "PlannedStep") -> None:
        """Use `step` for batches of the shapes of `batch`."""
        self._kept.use(list_shapes(batch), lambda: step)

    def step(self, batch: Batch) -> "PlannedStep":
        """Return the step for `batch`; plan first if it has new sizes.

        Raises:
            InfeasibleError, LimitError: no schedule is found that fits.
            BudgetError: the measured peak stays above the budget.
        """
        return self._kept.use(list_shapes(batch), lambda: self._make_step(detach_batch(batch)))

    def _make_step(self, batch: Batch) -> "PlannedStep":
        try:
            return self._make(batch, self._budget)
        except (InfeasibleError, LimitError) as error:
            sizes = ", ".join(str(list(leaf.shape)) for leaf in list_leaves(batch) if isinstance(leaf, torch.Tensor))
            raise type(error)(f"for a batch of {sizes}: {error}") from error


def list_shapes(batch: Batch) -> Shapes:
    """Return the shape of each leaf of `batch`; () for a leaf that is no tensor."""
    return tuple(tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else () for leaf in list_leaves(batch))
