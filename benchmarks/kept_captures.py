"""A model that is planned for many budgets: what is captured for one of them is kept for the others."""

import time
from typing import TYPE_CHECKING

from torch import nn

from planner.capture.lowering.lower import Capture
from planner.capture.signature import Batch
from planner.capture.step import LossFn
from planner.distributed.ranks import SingleProcess
from planner.distributed.wrappers import Unwrapped
from planner.settings import TraceSettings

if TYPE_CHECKING:
    from planner.capture.kernels.variants import Variant  # importing Inductor takes a second


class KeptCaptures(Unwrapped):
    """A model for ``planner.compile``, always with one loss function, batch and optimizer: each capture is made once.

    Attributes:
        captures: those that were made, by how Inductor compiled the kernels; None: those of eager PyTorch.
        asked_s: seconds to make what was asked for, each time that it was: what plans take of which nothing is kept.
        kept_s: the part of it that was not spent, for it was kept.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, SingleProcess())
        self.captures: dict[Variant | None, Capture] = {}
        self.asked_s = self.kept_s = 0.0
        self._seconds: dict[Variant | None, float] = {}

    def capture(self, loss_fn: LossFn | None, batch: Batch, settings: TraceSettings, variant: "Variant | None" = None) -> Capture:
        """As of an ``Unwrapped``, where it was not made before."""
        if variant in self.captures:
            self.kept_s += self._seconds[variant]
        else:
            begin = time.perf_counter()
            made = super().capture(loss_fn, batch, settings, variant)
            self.captures[variant], self._seconds[variant] = made, time.perf_counter() - begin
        self.asked_s += self._seconds[variant]
        return self.captures[variant]
