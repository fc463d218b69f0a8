"""A planned step that replans when the model or a value that it read has changed."""

from collections.abc import Callable
from typing import Any

from planner.capture.signature import Batch, detach_batch
from planner.graphs.errors import MismatchError
from planner.graphs.short_tracebacks import shorten_traceback, warn_caller
from planner.settings.budget import Budget, Bytes
from planner.train.compile.step import PlannedStep


class ReplannedStep(PlannedStep):
    """A planned step that keeps earlier plans, because values may change back; the first plan that matches runs the call.

    Attributes:
        plan: the plan that was used last.
    """

    def __init__(self, make: Callable[[Batch, Budget], PlannedStep], batch: Batch, budget: Budget, *, max_plans: int) -> None:
        """Plan for `batch`."""
        first = make(batch, budget)
        super().__init__(first.plan, first._run, first.measured)
        self._make, self._max_plans = make, max_plans
        self._shown = first
        self._kept = [first]

    @shorten_traceback
    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Return the loss of a batch, as any planned step; plan first if no cached plan matches."""
        refused: list[str] = []
        for step in self._kept:
            try:
                returned = step(*args, **kwargs)
            except MismatchError as error:
                refused.append(error.what)
            else:
                self._use(step)
                return returned
        warn_caller(f"planned again: {refused[0]}")
        batch: Batch = kwargs or args
        step = self._make(detach_batch(batch), Bytes(self.plan.budget_bytes))
        returned = step(*args, **kwargs)
        self._use(step)
        return returned

    def _use(self, step: PlannedStep) -> None:
        if self._kept[0] is not step:
            self._kept = [step, *(other for other in self._kept if other is not step)][: self._max_plans]
        self._show(step)
