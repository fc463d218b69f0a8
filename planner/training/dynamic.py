"""Training on batches whose sizes vary: a plan for each size."""

from collections.abc import Callable
from typing import Any

import torch

from graphs.errors import InfeasibleError, LimitError
from planner.capture.signature import Batch, detach_batch, leaves
from planner.plans.plan import Plan
from planner.training.lru import LRUCache
from planner.training.step import PlannedStep

Shapes = tuple[tuple[int, ...], ...]


class DynamicStep(PlannedStep):
    """A planned step that takes batches of any size: ``loss = step(*batch); loss.backward()``.

    Ops are measured one at a time, so that the first batch of a size stays within the budget too.

    Attributes:
        plan: the plan of the last batch.
    """

    def __init__(
        self,
        first: PlannedStep,
        batch: Batch,
        make: Callable[[Batch, int], PlannedStep],
        *,
        max_plans: int,
    ) -> None:
        """Run `first` for batches like `batch`.

        Args:
            make: a planned step for a batch of another size and a budget in bytes.
            max_plans: number of cached plans; the least recently used one is dropped first.
        """
        super().__init__(first.plan, first._run, first.measured)
        self._budget_bytes = first.plan.budget_bytes
        self._make = make
        self._last = first
        self._kept: LRUCache[Shapes, PlannedStep] = LRUCache(max_plans)
        self._kept.use(shapes_of(batch), lambda: first)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The cached plans, the most recently used last."""
        return tuple(step.plan for step in self._kept.values())

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Return the loss of a batch, as any planned step; plan first if the batch has new sizes.

        Raises:
            InfeasibleError, LimitError: no schedule is found that fits.
            BudgetError: the measured peak stays above the budget.
        """
        if not torch.is_grad_enabled():  # evaluated without a plan
            return super().__call__(*args, **kwargs)
        batch: Batch = kwargs or args
        self._last = self._kept.use(shapes_of(batch), lambda: self._made(detach_batch(batch)))
        returned = self._last(*args, **kwargs)
        self._show(self._last)
        return returned

    def wait(self, seconds: float | None = None) -> Plan:
        """Wait for a better plan for the size of the last batch; see ``PlannedStep.wait``."""
        self._last.wait(seconds)
        self._show(self._last)
        return self.plan

    def _made(self, batch: Batch) -> PlannedStep:
        try:
            return self._make(batch, self._budget_bytes)
        except (InfeasibleError, LimitError) as error:
            sizes = ", ".join(str(list(leaf.shape)) for leaf in leaves(batch) if isinstance(leaf, torch.Tensor))
            raise type(error)(f"for a batch of {sizes}: {error}") from error


def shapes_of(batch: Batch) -> Shapes:
    """Return the shape of each leaf of `batch`; () for a leaf that is no tensor."""
    return tuple(tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else () for leaf in leaves(batch))
