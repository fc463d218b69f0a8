"""The step that a training loop calls."""

import os
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from planner.capture.signature import Batch, Shapes, check_batch, detach_batch
from planner.graphs.errors import MismatchError, NumberMismatchError, PlannerError, SmallerBatchError, UsageError
from planner.graphs.ir import Graph
from planner.graphs.short_tracebacks import shorten_traceback, warn_caller
from planner.plans.plan import Plan
from planner.runtime.executor import Executor
from planner.settings.option_settings import apply_recorded_options
from planner.show.facts.timeline import Timeline
from planner.show.views.plan_views import render_plan
from planner.train.compile.eager_batches import fits_eager, has_earlier_gradients, release_for_eager
from planner.train.compile.improvement import Consultation, PlanSwap
from planner.train.compile.sizes import SizePlans, is_smaller


@dataclass(frozen=True, slots=True)
class PlanUse:
    """A plan, and when it came into use.

    Attributes:
        step: number of the first step that ran by it, from 1.
        seconds: seconds since the step was made.
        reason: the reason for which it replaced the plan before.
    """

    plan: Plan
    step: int
    seconds: float
    reason: str


_EAGER_RUNS = 100  # a smaller size that comes more often is worth a plan: capture takes as long as so many steps gain by it
_MOST_NUMBERS = 8  # that a step keeps captures for, because they may come back
# Makes a step for numbers that have changed: from what has changed, a batch, and the steps for earlier numbers.
Follow = Callable[[str, Batch, "Sequence[PlannedStep]"], "PlannedStep"]


class PlannedStep:
    """A training step that runs by its plan: ``loss = step(*batch); loss.backward()``.

    A step that was planned for a mapping is called as ``step(**batch)``. A batch that is smaller in its first dimension, such as
    the last one of an epoch, runs by eager PyTorch if that fits the budget, and by a plan of its own otherwise, or if its size
    comes often. While it trains, a faster plan with the same bits and budget may replace the current one between two steps.

    Attributes:
        plan: the plan in use: its schedule, what it was planned for, predicted and measured.
        measured: the graph that was planned, with the times of its ops; None if the plan was loaded from a cache.
        history: the plans that were in use, the present one last.

    Examples:
        >>> step = planner.compile(model, loss_fn, (x, y), budget="100%")
        >>> step(x, y).backward()
        >>> print(step.plan.status)
        optimal
    """

    def __init__(
        self,
        plan: Plan,
        run: Callable[..., Any],
        measured: Graph | None,
        *,
        refreshed: "Callable[[Batch], PlannedStep] | None" = None,
        copying: "Callable[[Batch, Set[int]], PlannedStep] | None" = None,
        executor: Executor | None = None,
        improving: Consultation | None = None,
    ) -> None:
        """Run `plan` by calling `run`.

        Args:
            refreshed: makes a step after measuring sensitivity on a batch; None if nothing is lossy.
            copying: makes a step that keeps copies of the given tensors; None if the step is not planned again.
            executor: the executor that `run` calls; None if its plan stays.
            improving: the search for better plans; None if the plan stays.
        """
        self.plan = plan
        self.measured = measured
        self._run = run
        self._refreshed = refreshed
        self._copying, self._executor = copying, executor
        self._counted_copies = 0
        self._improving = improving
        self._followed: Follow | None = None
        self._earlier: list[PlannedStep] = []  # for other numbers, which may come back
        self._smaller: SizePlans[PlannedStep] | None = None
        self._modes: SizePlans[PlannedStep] | None = None
        self._after_eager: Executor | None = None  # if the last batch ran by eager PyTorch
        self._keep: Callable[[Plan], None] | None = None
        self._began = time.monotonic()
        self._steps = 0
        self._shown: PlannedStep = self  # the one whose plan is in use
        self.history: tuple[PlanUse, ...] = (PlanUse(plan, 1, 0.0, "planned"),)

    @shorten_traceback
    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Return the loss of a batch, ready for ``backward()``, and the other outputs of the loss function, detached.

        Under ``torch.no_grad()`` the step evaluates by eager PyTorch: a batch of any size, in train or eval mode.

        Raises:
            MismatchError: larger shapes, other dtypes or values than planned for, or the model's mode has changed.
            InfeasibleError, LimitError, BudgetError: as ``planner.compile``, when it plans for a smaller batch.
        """
        if self._modes is not None and torch.is_grad_enabled() and self._modes.in_other_mode:
            return self._modes.step(kwargs or args)(*args, **kwargs)
        if self._after_eager is not None:
            release_for_eager(self._after_eager)
            self._after_eager = None
        if self._improving is not None and torch.is_grad_enabled():
            self._steps += 1
            self._take(self._improving.begin_step())
        if self._executor is not None and len(self._executor.changed_inputs.changed) > self._counted_copies:
            self._count_copies(*args, **kwargs)
        try:
            return self._run(*args, **kwargs)
        except SmallerBatchError:
            if self._smaller is None:
                raise
            return self._run_smaller(self._smaller, *args, **kwargs)
        except NumberMismatchError as error:
            if self._followed is None:
                raise
            self._follow(error.what, self._followed, *args, **kwargs)
        return self._run(*args, **kwargs)

    def _run_smaller(self, sizes: "SizePlans[PlannedStep]", *args: object, **kwargs: object) -> Any:
        """Run a smaller batch: by eager PyTorch if that fits and its size does not come often, else by a plan of its own."""
        batch, executor = kwargs or args, self._executor
        times = sizes.count(batch)
        if times == 1:
            check_batch(batch)
        if (
            executor is None
            or times > _EAGER_RUNS
            or has_earlier_gradients(executor)
            or not sizes.fits_eager(batch, lambda: fits_eager(executor, self.plan, batch))
        ):
            return sizes.step(batch)(*args, **kwargs)
        release_for_eager(executor)
        self._after_eager = executor
        return executor.evaluate(*args, **kwargs)

    def takes(self, shapes: Shapes, planned: Shapes) -> bool:
        """Return True if the step, which was planned for batches of the shapes `planned`, runs smaller ones of these shapes."""
        return self._smaller is not None and is_smaller(shapes, planned)

    @property
    def code(self) -> str:
        """The code of both passes, for reading: each op that the plan executes, and each tensor that it frees, in order.

        Examples:
            >>> step = planner.compile(model, loss_fn, (x, y), budget="100%")
            >>> print(step.code)
            def forward(static):
            ...
        """
        executor = self._shown._executor
        assert executor is not None
        return executor.launched.source

    @property
    def debug(self) -> Callable[..., Any]:
        """The function that runs the plan, an executor unless the step is compiled; for tests and debugging, and may change."""
        return self._run

    def __reduce__(self) -> NoReturn:
        raise PlannerError(
            "a planned step is compiled for its model, and is neither copied nor pickled: copy the model, and call "
            "planner.compile for it (cache= keeps the plan)"
        )

    def __repr__(self) -> str:
        return f"PlannedStep({self.plan!r})"

    def __str__(self) -> str:
        uses = [f"plan {i} from step {use.step} on: {use.reason}" for i, use in enumerate(self.history, start=1)]
        return "\n".join((str(self.plan), *(uses if len(uses) > 1 else ())))

    def _repr_html_(self) -> str:
        """Return the current plan as HTML, with the chart of its memory if the ops were measured."""
        return render_plan(self.plan, self.measured)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan in use, and those for smaller batches, or for batches whose gradients are added; the last used one last."""
        others = self._smaller or self._modes
        return (self.plan, *(() if others is None else (step.plan for step in others.list_steps())))

    def scalars(self) -> dict[str, float]:
        """Return numbers of the plan in use by name, for a log such as TensorBoard's; what is unknown is left out.

        Budget and peaks in bytes, the predicted overhead over keeping everything, the measured one over eager PyTorch, the gap,
        and how often a plan was replaced.
        """
        plan = self.plan
        numbers = {
            "budget_bytes": plan.budget_bytes,
            "peak_bytes": plan.peak_bytes,
            "measured_peak_bytes": plan.measured_peak_bytes,
            "overhead": plan.overhead,
            "overhead_over_eager": None if plan.eager is None else plan.eager.overhead,
            "gap": plan.gap,
            "swaps": len(self.history) - 1,
        }
        return {f"plan/{name}": float(number) for name, number in numbers.items() if number is not None}

    @property
    def improves(self) -> bool:
        """True if better plans may replace the current one."""
        return self._improving is not None

    @shorten_traceback
    def wait(self, seconds: float | None = None) -> Plan:
        """Wait until the background solve has ended, at most `seconds`; return the plan of the next step.

        If several processes train, all call this.
        """
        if seconds is not None and not (isinstance(seconds, int | float) and seconds >= 0):
            raise UsageError(f"seconds is {seconds!r}: must be a number, 0 or more, or None to wait for the end")
        if self._shown is not self:
            self._shown.wait(seconds)
            self._show(self._shown)
        elif self._improving is not None:
            self._take(self._improving.wait(seconds))
        return self.plan

    def take_smaller(self, sizes: "SizePlans[PlannedStep]") -> None:
        """Run batches that are smaller in their first dimension by the steps of `sizes`."""
        self._smaller = sizes

    def take_modes(self, others: "SizePlans[PlannedStep]") -> None:
        """Run batches with which the model does something else with gradients by the steps of `others`."""
        self._modes = others

    def follow_with(self, followed: Follow | None) -> "PlannedStep":
        """Follow numbers that change by `followed`; None if that is an error. Return this step."""
        self._followed = followed
        return self

    def keep_with(self, keep: Callable[[Plan], None]) -> None:
        """Call `keep` with the current plan, and with each later plan once its peak has been measured."""
        keep(self.plan)
        self._keep = keep

    def _take(self, swap: PlanSwap | None) -> None:
        assert self._improving is not None
        before, self.plan = self.plan, self._improving.plan
        if self._keep is not None and swap is None and before.measured_peak_bytes is None is not self.plan.measured_peak_bytes:
            self._keep(self.plan)
        if self.measured is not None and self.plan is not before and self.plan.graph != before.graph:
            self.measured = self._improving.improvement.graph
        if swap is not None:
            self.measured, self._run = swap.graph, self._improving.wrapped(swap.executor)
            self._executor = swap.executor
            self._earlier = [step for step in self._earlier if step.plan.schedule != before.schedule]
            self._note_use(swap.reason)

    def _note_use(self, reason: str) -> None:
        self.history += (PlanUse(self.plan, max(1, self._steps), time.monotonic() - self._began, reason),)

    def _count_copies(self, *args: object, **kwargs: object) -> None:
        """Replan with copies of the tensors that were written between the passes, unless this batch is of another size."""
        assert self._executor is not None
        changed, names = set(self._executor.changed_inputs.changed), self._executor.changed_names
        if self._copying is None:
            warn_caller(f"{names} changed between forward and backward pass: copies are kept beside the plan")
        else:
            try:
                self._executor.check(*args, **kwargs)
            except MismatchError:
                return
            warn_caller(f"planned again: {names} changed between forward and backward pass, so the plan keeps copies")
            batch: Batch = kwargs or args
            self._stop_improvement()
            self._replace_by(self._copying(detach_batch(batch), changed))
            self._note_use("it keeps copies of what changes between the passes")
        self._counted_copies = len(changed)

    def _follow(self, what: str, followed: Follow, *args: object, **kwargs: object) -> None:
        """Run by the plan for the present numbers from now on: an earlier capture, another one, or another plan."""
        batch: Batch = kwargs or args
        improving, copying, executor = self._improving, self._copying, self._executor
        before = PlannedStep(self.plan, self._run, self.measured, copying=copying, executor=executor, improving=improving)
        steps = [before, *self._earlier]
        known = next((step for step in self._earlier if step._accepts(*args, **kwargs)), None)
        step = known or followed(what, detach_batch(batch), steps)
        self._earlier = [other for other in steps if other is not step][:_MOST_NUMBERS]
        if step.plan.schedule != self.plan.schedule:
            self._replace_by(step)
            if known is None:
                self._note_use(f"{what}, which chooses other ops")
            return
        assert step._executor is not None
        self._run, self._executor, self._copying, self._counted_copies = step._run, step._executor, step._copying, 0
        if self._improving is not None:
            self._improving.improvement.follow(step._executor)

    def _accepts(self, *args: object, **kwargs: object) -> bool:
        """Return True if the step was planned for such a batch, and for the present numbers."""
        assert self._executor is not None
        try:
            self._executor.check(*args, **kwargs)
        except MismatchError:
            return False
        return True

    def _stop_improvement(self) -> None:
        if self._improving is not None:
            self._improving.improvement.stop()

    def _replace_by(self, step: "PlannedStep") -> None:
        """Run by `step`, and search for better plans as it does."""
        self.plan, self.measured, self._run, self._keep = step.plan, step.measured, step._run, None
        self._refreshed, self._improving = step._refreshed, step._improving
        self._copying, self._executor = step._copying, step._executor

    def _show(self, step: "PlannedStep") -> None:
        """Take over the plan and the history of `step`."""
        self.plan, self.measured, self.history, self._run = step.plan, step.measured, step.history, step._run
        self._shown = step

    @shorten_traceback
    def refresh_sensitivity(self, *args: object, **kwargs: object) -> None:
        """Measure the sensitivity to compression again, on a batch and with the current parameters, and replan with that.

        Times are not measured again. The batch is passed as in calls of the step.

        Raises:
            PlannerError: the step was planned without the option ``compress``, from a cache, on several processes, or with
                ``replan=True``.
            InfeasibleError, LimitError, BudgetError: as ``planner.compile``.
        """
        if self._refreshed is None:
            raise PlannerError(
                "nothing is known of how lossy this step is: only a step that planner.compile has made in this process with "
                "options=['compress:4'], without replan=True, can be refreshed"
            )
        batch: Batch = kwargs or args
        step = self._refreshed(detach_batch(batch))
        self._stop_improvement()
        self._replace_by(step)
        self.history = step.history

    @shorten_traceback
    def report(self, path: str | os.PathLike[str], *, trace: str | os.PathLike[str] | None = None) -> None:
        """Write the report page of the plan to `path`, and its Chrome trace to `trace`: docs/report.md.

        Raises:
            OutputError: a file cannot be written.
            PlannerError: the plan was loaded from a cache, so that op times are unknown.
        """
        if self.measured is None:
            raise PlannerError(
                "the plan was loaded from a cache, and its ops were not measured: there are no times to show; call "
                "planner.compile without cache= for a report"
            )
        from planner.show.report.page import write_pages  # with Jinja, whose memory training spares

        write_pages(Timeline(apply_recorded_options(self.measured, self.plan.settings), self.plan), path, trace)
