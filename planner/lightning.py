"""Planned training in PyTorch Lightning."""

import dis
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from types import FunctionType
from typing import Any

from planner.errors import explain_missing_packages
from planner.graphs.short_tracebacks import shorten_traceback

with explain_missing_packages():
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    try:
        from lightning import pytorch as pl
    except ImportError:  # its old name
        import pytorch_lightning as pl  # type: ignore[no-redef]

from planner.capture.frontend.fake_execution import run_on_fakes
from planner.capture.frontend.later_values import skip_metrics
from planner.capture.frontend.preserved_state import preserve_training_state
from planner.capture.guards.later_calls import Collector, is_metric
from planner.capture.signature import Shapes, list_shapes
from planner.graphs.errors import PlannerError, TraceError
from planner.progress import LoggingView
from planner.settings.budget import read_budget_or_overhead
from planner.train.compile.per_batch import BatchPlans, check_options
from planner.train.compile.step import PlannedStep
from planner.train.distributed.wrappers import InReplicated, unwrap

_LOGGED = "logged by training_step"


class PlannedTraining(pl.Callback):
    """A callback that plans ``training_step``: ``Trainer(callbacks=[PlannedTraining(budget="8GB")])``.

    The first batch is planned for when it comes. Values that ``training_step`` logs are logged as usual: tensors and numbers. If
    a number that it reads has changed, such as ``self.current_epoch``, the step is captured again and keeps its plan, in one
    process.
    """

    @shorten_traceback
    def __init__(
        self,
        budget: str | float | None = None,
        *,
        max_overhead: str | float | None = None,
        log_plan: bool = False,
        **options: Any,
    ) -> None:
        """Create the callback with the settings of the plan.

        Args:
            budget, max_overhead: as in ``planner.compile``; one of them.
            log_plan: True to log ``PlannedStep.scalars`` in each step, with the trainer's loggers.
            options: further keyword arguments of ``planner.compile``. The optimizer and gradient accumulation are the trainer's.

        Raises:
            PlannerError: an option is unknown, or not exactly one of budget and overhead is given.
        """
        check_options(options)
        self._budget, self._options = read_budget_or_overhead(budget, max_overhead), options
        self._log_plan = log_plan
        self.batch_plans: BatchPlans | None = None

    @property
    def planned(self) -> PlannedStep | None:
        """The step for the most frequent size, with its plan; None before the first batch."""
        return None if self.batch_plans is None else self.batch_plans.main

    @shorten_traceback
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Replace ``training_step`` by the planned step; under DDP, inside the wrapper's forward pass.

        Raises:
            PlannerError: the module optimizes manually, or its strategy is not planned (a TraceError if parts are sharded).
        """
        if not pl_module.automatic_optimization:
            raise PlannerError("a module with automatic_optimization=False is not planned: use planner.compile in training_step")
        step, trained = _TrainingStepModule(pl_module), trainer.strategy.model
        if trained is pl_module:
            wrapper = unwrap(step)
        elif isinstance(trained, DistributedDataParallel):
            wrapper = InReplicated(trained, step)
        else:
            raise PlannerError(
                f"strategy {type(trainer.strategy).__name__} is not planned: use a single device, strategy='ddp', or "
                "ModelParallelStrategy with fully_shard"
            )
        self.batch_plans = BatchPlans(wrapper, self._budget, self._options)
        vars(pl_module)["training_step"] = _planned(step, self.batch_plans, trainer)

    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the numbers of the plan, if `log_plan` was set."""
        if self._log_plan and self.planned is not None:
            pl_module.log_dict(self.planned.scalars())

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Restore the module."""
        vars(pl_module).pop("training_step", None)

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """Restore the module."""
        vars(pl_module).pop("training_step", None)


def _planned(step: "_TrainingStepModule", plans: BatchPlans, trainer: "pl.Trainer") -> Callable[[Any, int], Any]:
    """Return the function that replaces a module's ``training_step``."""
    shown = LoggingView(logging.getLogger(f"{pl.__name__}.planner"), stages=False)

    @shorten_traceback
    def training_step(batch: Any, batch_idx: int) -> Any:
        given = step.arguments(batch, batch_idx, follows=plans.follow_numbers)
        with step.recording():
            accumulate = trainer.accumulate_grad_batches > 1
            optimizer = trainer.optimizers[0]
            step_of_size = plans.step(None, given, optimizer=optimizer, accumulate=accumulate, on_progress=shown)
            if not accumulate and _zeroes_gradients_as_usual(trainer, step.module):
                optimizer.zero_grad()  # Lightning does so between the forward and the backward pass
            returned = step_of_size(*given)
            logged = returned.pop(_LOGGED)
            options = step.options_of_logs(given, logged.keys())
        for name, value in logged.items():
            step.module.log(name, value, **options[name])
        step.log_metrics()
        return returned if returned.keys() > {"loss"} else returned["loss"]

    return training_step


def _zeroes_gradients_as_usual(trainer: "pl.Trainer", module: "pl.LightningModule") -> bool:
    """Return True if no hook looks at the gradients when Lightning frees them, or frees them differently."""
    usual = type(module).optimizer_zero_grad is pl.LightningModule.optimizer_zero_grad
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    hooked = [type(module).on_before_zero_grad, *(type(callback).on_before_zero_grad for callback in callbacks)]
    return usual and all(hook in (pl.LightningModule.on_before_zero_grad, pl.Callback.on_before_zero_grad) for hook in hooked)


class _TrainingStepModule(nn.Module):
    """A ``training_step`` as a model that returns its loss and the values that it logs."""

    def __init__(self, module: "pl.LightningModule") -> None:
        super().__init__()
        self.module = module
        self._logs = _Logs(next(module.parameters()).device)
        self._options: dict[Shapes, dict[str, dict[str, Any]]] = {}
        names = list(signature(type(module).training_step).parameters)[2:3]  # after self and batch
        self._index = (_BatchIndex(),) * len(names)
        self._reads_index = any(_is_read(type(module).training_step, name) for name in names)

    def arguments(self, batch: Any, batch_idx: int, *, follows: bool) -> tuple[Any, ...]:
        """Return the arguments of a step; `follows` is True if it follows numbers."""
        return (batch, batch_idx) if self._reads_index and follows else (batch,)

    def forward(self, batch: Any, *index: int) -> dict[str, Any]:
        self._logs.values, self._logs.options = {}, {}
        returned = type(self.module).training_step(self.module, batch, *(index or self._index))
        returned = dict(returned) if isinstance(returned, Mapping) else {"loss": returned}
        return {**returned, _LOGGED: self._logs.values}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Collect the values that the module logs instead of logging them; yield them."""
        vars(self.module).update(log=self._logs.log, log_dict=self._logs.log_dict)
        try:
            yield
        finally:
            del vars(self.module)["log"], vars(self.module)["log_dict"]

    def log_metrics(self) -> None:
        """Log the metrics of the last step, which are updated after it. Call outside of ``recording``."""
        taken, self._logs.taken = self._logs.taken, []
        for method, args, options in taken:
            getattr(self.module, method)(*args, **options)

    def options_of_logs(self, given: tuple[Any, ...], names: Collection[str]) -> dict[str, dict[str, Any]]:
        """Return the options that the values `names` are logged with for arguments of these sizes. Call inside ``recording``."""
        shapes = list_shapes(given)
        if not self._options.get(shapes, {}).keys() >= set(names):
            try:
                with torch.no_grad(), preserve_training_state(self, given):
                    self(*given)
            except RuntimeError:  # the step computes gradients itself: on real tensors it would take eager PyTorch's memory
                with preserve_training_state(self, given), run_on_fakes(self, given) as run, skip_metrics(self):
                    run()
            self._options[shapes] = {**self._options.get(shapes, {}), **self._logs.options}
        return self._options.get(shapes, {})


class _Logs(Collector):
    """The values that a step logs, in place of ``LightningModule.log``.

    Attributes:
        values: the values of the present step, by name.
        options: the options of ``log``, by name.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.values: dict[str, torch.Tensor] = {}
        self.options: dict[str, dict[str, Any]] = {}

    def log_dict(self, dictionary: Any, *args: Any, **options: Any) -> None:
        """Record values, as ``LightningModule.log_dict`` would log them."""
        if not self.is_known(dictionary) or not isinstance(dictionary, dict):
            self.take_later("log_dict", dictionary, *args, **options)
            return
        for name, value in dictionary.items():
            self.log(name, value, *args, **options)

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Record a value, as ``LightningModule.log`` would log it."""
        if not self.is_known(value) or is_metric(value):
            self.take_later("log", name, value, *args, **options)
            return
        if isinstance(value, int | float):  # an op that takes it, also once it is an input of the step
            value = torch.full((), value, dtype=torch.get_default_dtype(), device=self._device)
        if not isinstance(value, torch.Tensor):
            raise TraceError(
                f"training_step logs {name!r}, which is {type(value).__name__}, neither a tensor, a number nor a metric: log "
                "what it computes, or log it in on_train_batch_end"
            )
        self.values[name] = value
        self.options[name] = {**dict(zip(_LOG_OPTIONS, args, strict=False)), **options}


def _is_read(function: Callable[..., Any], parameter: str) -> bool:
    """Return True unless the code of `function` leaves a parameter alone."""
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        return True
    read = (instruction.argval for instruction in dis.get_instructions(function))
    return any(parameter in (names if isinstance(names, tuple) else (names,)) for names in read)


_LOG_OPTIONS = list(signature(pl.LightningModule.log).parameters)[3:]  # after self, name and value


class _BatchIndex:
    """A replacement of ``batch_idx`` where plans do not follow numbers: any use is an error."""

    def _refuse(self, *others: object) -> Any:
        raise TraceError(
            "training_step uses batch_idx, which would be the same in every step of a plan on several processes, with "
            "cuda_graph=True or replan=False: do what depends on it in on_train_batch_start or on_train_batch_end"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __truediv__ = __mod__ = __pow__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __bool__ = __int__ = __index__ = __float__ = __str__ = __format__ = _refuse
    __hash__ = object.__hash__
