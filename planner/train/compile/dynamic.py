"""Training on batches whose sizes vary: a plan for each size."""

from typing import Any

import torch

from planner.capture.signature import Batch
from planner.graphs.short_tracebacks import shorten_traceback
from planner.plans.plan import Plan
from planner.train.compile.sizes import SizePlans
from planner.train.compile.step import PlannedStep


class DynamicStep(PlannedStep):
    """A planned step that takes batches of any size: ``loss = step(*batch); loss.backward()``.

    Ops are measured one at a time, so that the first batch of a size stays within the budget too.

    Examples:
        >>> step = planner.compile(model, loss_fn, (x, y), budget="1GB", dynamic=True)
        >>> for size in (8, 16):
        ...     step(x[:size], y[:size]).backward()
    """

    def __init__(self, first: PlannedStep, batch: Batch, sizes: SizePlans[PlannedStep]) -> None:
        """Run `first` for batches like `batch`, and a step of `sizes` for others."""
        super().__init__(first.plan, first._run, first.measured)
        self._shown = first
        self._sizes = sizes
        sizes.add(batch, first)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The cached plans, the most recently used last."""
        return tuple(step.plan for step in self._sizes.list_steps())

    @shorten_traceback
    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Return the loss of a batch, as any planned step; plan first if the batch has new sizes.

        Raises:
            InfeasibleError, LimitError: no schedule is found that fits.
            BudgetError: the measured peak stays above the budget.
        """
        if not torch.is_grad_enabled():  # evaluated without a plan
            return super().__call__(*args, **kwargs)
        self._shown = self._sizes.step(kwargs or args)
        returned = self._shown(*args, **kwargs)
        self._show(self._shown)
        return returned
