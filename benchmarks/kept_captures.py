"""A model that is planned for many budgets and captured once."""

import time
from typing import TYPE_CHECKING

from torch import nn

from planner.capture.lowering.lower import Capture
from planner.capture.signature import Batch
from planner.capture.step import LossFn
from planner.settings.plan import PlanSettings
from planner.train.distributed.ranks import SingleProcess
from planner.train.distributed.wrappers import Unwrapped

if TYPE_CHECKING:
    from planner.capture.kernels.variants import CompileVariant  # importing Inductor takes a second


class KeptCaptures(Unwrapped):
    """A model for ``planner.compile``, always with one loss function, batch and optimizer, which caches its captures.

    Attributes:
        captures: by Inductor's compile variant; None: that of eager PyTorch.
        asked_s: seconds that all requested captures would take without the cache.
        kept_s: the part of it that the cache saved.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, SingleProcess())
        self.captures: dict[CompileVariant | None, Capture] = {}
        self.asked_s = self.kept_s = 0.0
        self._seconds: dict[CompileVariant | None, float] = {}

    def capture(
        self, loss_fn: LossFn | None, batch: Batch, settings: PlanSettings, variant: "CompileVariant | None" = None
    ) -> Capture:
        """Return the capture of ``Unwrapped.capture``, from the cache if it has it."""
        if variant in self.captures:
            self.kept_s += self._seconds[variant]
        else:
            begin = time.perf_counter()
            made = super().capture(loss_fn, batch, settings, variant)
            self.captures[variant], self._seconds[variant] = made, time.perf_counter() - begin
        self.asked_s += self._seconds[variant]
        return self.captures[variant]
