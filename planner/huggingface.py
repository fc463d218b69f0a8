"""Planned training in the ``Trainer`` of Hugging Face Transformers."""

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from planner.errors import explain_missing_packages
from planner.graphs.short_tracebacks import shorten_traceback

with explain_missing_packages():
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from transformers import Trainer
    from transformers.trainer_utils import unwrap_peft_model

from planner.graphs.errors import PlannerError
from planner.progress import Event, LoggingView, OnProgress, Progress, list_default_views
from planner.progress.describe import describe
from planner.settings.budget import read_budget_or_overhead
from planner.train.compile.per_batch import BatchPlans, check_options
from planner.train.compile.step import PlannedStep
from planner.train.distributed.wrappers import Replicated, Unwrapped, unwrap

_BAR_EVERY_S = 0.2  # the shortest time between two updates of one stage


class PlannedTrainerMixin:
    """A mixin before a subclass of ``Trainer``: ``class Mine(PlannedTrainerMixin, Seq2SeqTrainer): ...``.

    Training steps are planned; evaluation and all else are the trainer's. A ``compute_loss`` of the next class is part of the
    plan, with whatever it does with the model.
    """

    @shorten_traceback
    def __init__(
        self,
        *args: Any,
        budget: str | float | None = None,
        max_overhead: str | float | None = None,
        plan_options: Mapping[str, Any] | None = None,
        log_plan: bool = False,
        **kwargs: Any,
    ) -> None:
        """Create a trainer with a plan.

        Args:
            budget, max_overhead: as in ``planner.compile``; one of them.
            plan_options: its other keyword arguments, such as ``time_limit_s`` or ``cache``. The optimizer and
                gradient accumulation are taken from the trainer.
            log_plan: True to log ``PlannedStep.scalars`` with each loss, wherever the trainer reports to.
            args, kwargs: arguments of the trainer.

        Raises:
            PlannerError: an option is unknown, not exactly one of budget and overhead is given, or ``compute_loss`` is
                overridden where no plan is used.
        """
        if type(self).compute_loss is not PlannedTrainerMixin.compute_loss:
            raise PlannerError(
                f"{type(self).__name__}.compute_loss would hide the planned one: define it in a class after "
                "PlannedTrainerMixin, as in class Planned(PlannedTrainerMixin, YourTrainer)"
            )
        check_options(plan_options or {})
        self._budget, self._options = read_budget_or_overhead(budget, max_overhead), plan_options or {}
        self._log_plan = log_plan
        self._planned_model: nn.Module | None = None
        self.batch_plans: BatchPlans | None = None
        super().__init__(*args, **kwargs)

    @property
    def planned(self) -> PlannedStep | None:
        """The step for the most frequent size, with its plan; None before the first batch."""
        return None if self.batch_plans is None else self.batch_plans.main

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as the trainer does; with a loss also the numbers of the plan, if `log_plan` was set."""
        if self._log_plan and "loss" in logs and self.planned is not None:
            logs = {**logs, **self.planned.scalars()}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    @shorten_traceback
    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,  # noqa: FBT001, FBT002  # the trainer's own signature
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Compute the loss as the trainer does, planned while it trains."""
        ordinary = super().compute_loss  # type: ignore[misc]
        this: Any = self
        if return_outputs or not (model.training and torch.is_grad_enabled()):
            return ordinary(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        of_the_trainer = ordinary.__func__ is Trainer.compute_loss
        if this.compute_loss_func is None and this.label_smoother is not None and "labels" in inputs:
            if not of_the_trainer:
                raise PlannerError(
                    f"label_smoothing_factor is not planned with {ordinary.__qualname__}: leave it out, and smooth in that "
                    "function, with cross_entropy(..., label_smoothing=...)"
                )
            return self._smoothed(model, ordinary, inputs, num_items_in_batch)
        if this.compute_loss_func is None and of_the_trainer:
            return ordinary(partial(self._return_loss, model), inputs, num_items_in_batch=num_items_in_batch)

        batch = {"inputs": dict(inputs), "num_items_in_batch": num_items_in_batch}
        return self._loss(model, None, batch, compute_loss=ordinary)

    def _return_loss(self, model: nn.Module, **given: Any) -> Any:
        outputs = self._loss(model, None, given)
        return outputs if isinstance(outputs, dict | tuple) else {"loss": outputs}

    def _smoothed(self, model: nn.Module, ordinary: Callable[..., Any], inputs: dict[str, Any], items: Any) -> Any:
        """Return the loss of the trainer's ``LabelSmoother`` on the model's outputs: both are in the plan.

        The code between them looks for libraries that wrap models, which cannot be captured.
        """
        this: Any = self
        smoother = this.label_smoother

        def loss_fn(outputs: Any, smoothed: dict[str, Any]) -> Any:
            return smoother(outputs, **smoothed)

        def planned(given: dict[str, Any], labels: torch.Tensor, **options: Any) -> Any:
            return self._loss(model, loss_fn, {**given, "smoothed": {"labels": labels, **options}})

        this.label_smoother = planned
        try:
            return ordinary(_EchoModel(this.accelerator.unwrap_model(model)), inputs, num_items_in_batch=items)
        finally:
            this.label_smoother = smoother

    def _loss(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        batch: dict[str, Any],
        compute_loss: Callable[..., Any] | None = None,
    ) -> Any:
        this: Any = self
        if self.batch_plans is None or model is not self._planned_model:  # each run of the trainer has another model
            self.batch_plans = None
            self._planned_model = model
            self.batch_plans = BatchPlans(_unwrap(model, compute_loss), self._budget, self._options)
        accumulate = this.args.gradient_accumulation_steps > 1
        shown: OnProgress = _TrainerView(this) if self.planned is None else False
        return self.batch_plans.step(loss_fn, batch, optimizer=this.optimizer, accumulate=accumulate, on_progress=shown)(**batch)


class PlannedTrainer(PlannedTrainerMixin, Trainer):
    """A trainer with a plan: ``PlannedTrainer(..., budget="8GB")``."""


class _TrainerView:
    """A view in the log of Transformers, and next to the trainer's bar of training steps or, without one, by itself."""

    def __init__(self, trainer: Trainer) -> None:
        logger = logging.getLogger("transformers.planner")
        quiet = logging.getLogger("transformers").getEffectiveLevel() > logging.WARNING  # their default shows no INFO
        logger.setLevel(logging.NOTSET if quiet else logging.INFO)
        self._log = LoggingView(logger, stages=False)
        bars = (getattr(callback, "training_bar", None) for callback in trainer.callback_handler.callbacks)
        self._bar = next((bar for bar in bars if bar is not None), None)
        self._views = () if self._bar is not None else list_default_views()
        self._next_s = 0.0

    def __call__(self, progress: Progress) -> None:
        if progress.event is Event.BEGIN:
            self._write(progress)
        for view in self._views:
            view(replace(progress, summary=""))  # the log has it
        if self._bar is not None and (progress.event is not Event.ADVANCE or progress.seconds >= self._next_s):
            self._next_s = progress.seconds + _BAR_EVERY_S
            self._bar.set_postfix_str("" if progress.event in (Event.DONE, Event.FAILED) else describe(progress))
        if progress.event in (Event.DONE, Event.FAILED):
            self._write(progress)

    def _write(self, progress: Progress) -> None:
        """Log `progress` above the bar."""
        with nullcontext() if self._bar is None else self._bar.external_write_mode(sys.stderr):
            self._log(progress)


class _EchoModel:
    """A model that returns its arguments: its outputs are computed together with the loss."""

    _modules: Mapping[str, nn.Module] = {}  # Accelerate looks for compiled ones

    def __init__(self, model: nn.Module) -> None:
        self._name = unwrap_peft_model(model)._get_name()  # type: ignore[no-untyped-call]

    def __call__(self, **given: Any) -> dict[str, Any]:
        return given

    def _get_name(self) -> str:
        return str(self._name)


class _OwnLoss(nn.Module):
    """A trainer's own ``compute_loss`` as a model, which may call the real one several times, or only parts of it."""

    def __init__(self, model: nn.Module, compute_loss: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.compute_loss = compute_loss

    def forward(self, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None) -> Any:
        return self.compute_loss(self.model, dict(inputs), num_items_in_batch=num_items_in_batch)


def _unwrap(model: nn.Module, compute_loss: Callable[..., Any] | None) -> Unwrapped:
    """Return the wrapper of `model`, or of `compute_loss` on it."""
    if compute_loss is None:
        return unwrap(model)
    if isinstance(model, DistributedDataParallel):
        return Replicated(model, _OwnLoss(model.module, compute_loss))
    return unwrap(_OwnLoss(model, compute_loss))
