"""Training by a plan: one call that traces, measures, solves and compiles a step, and what is called in the loop."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphs.errors import BudgetError, PlannerError
from graphs.ir import Graph
from graphs.jsonfile import check_writable, write_text
from graphs.plan import Plan
from graphs.profile import profile
from graphs.trace import LossFn, TrainingStep
from graphs.trace_lower import Capture
from graphs.trace_signature import Batch
from graphs.units import format_bytes
from planner.api import measured_peak
from planner.cache import PlanCache, warn_unusable
from planner.chrome_trace import chrome_trace
from planner.executor import Executor
from planner.machine import machine
from planner.page import page
from planner.playback import Playback
from planner.solving import check_same_graph, solve, summarize
from planner.wrappers import Plain, unwrap
from solvers.result import Progress

# How often a budget is lowered by what a measured peak is above it.
_CORRECTIONS = 3


class PlannedStep:
    """A training step that runs as its plan says: ``loss = step(*batch); loss.backward()``.

    Where the step was planned for a mapping it is ``step(**batch)``.

    Attributes:
        plan: the schedule, what it was planned for, predicted and measured.
        measured: the graph that was planned, with the times of its ops; None if the plan was loaded from a cache.
    """

    def __init__(self, plan: Plan, run: Callable[..., Any], measured: Graph | None) -> None:
        self.plan = plan
        self.measured = measured
        self._run = run

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """The loss of a batch, ready for ``backward()``; with what else the loss function returns, detached, as it does.

        Raises:
            MismatchError: other shapes, dtypes or values than planned for, or the model's mode has changed.
        """
        return self._run(*args, **kwargs)

    def report(self, path: str | os.PathLike[str], *, trace: str | os.PathLike[str] | None = None) -> None:
        """Write a page that shows what the plan does, and to `trace` the same as a Chrome trace: docs/report.md.

        Raises:
            OutputError: a file cannot be written.
            PlannerError: the plan was loaded from a cache, so that the times of its ops are not known.
        """
        if self.measured is None:
            raise PlannerError(
                "the plan was loaded from a cache, and its ops were not measured: there are no times to show; call "
                "planner.compile without cache= for a report"
            )
        playback = Playback(self.measured, self.plan)
        targets = {path: page} if trace is None else {path: page, trace: chrome_trace}
        for target in targets:
            check_writable(target)
        for target, make in targets.items():
            write_text(target, make(playback))


def compile(  # noqa: A001
    model: nn.Module,
    loss_fn: LossFn | None,
    batch: Batch,
    *,
    budget: str | int,
    optimizer: str = "none",
    accumulate: bool = False,
    solver: str = "windows",
    tolerance: float = 1e-3,
    time_limit_s: float = 60.0,
    passes: int = 5,
    reorder: bool | None = None,
    cache: str | os.PathLike[str] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> PlannedStep:
    """Trace, profile, solve and compile the training step of `model`: the fastest that fits `budget`.

    The step is run once on `batch` to measure its peak; parameters, buffers, gradients and random
    state are afterwards as they were.

    A model in ``DistributedDataParallel`` or under ``fully_shard`` is planned on all its processes at once: rank 0
    profiles and solves, the others get its plan, and an error on one is raised on all.

    Args:
        model, loss_fn, batch, optimizer, accumulate, passes: as in ``trace``; each process has a batch of its own.
        budget: bytes, ``8GB``, ``7.5GiB``, or ``60%`` of the peak without recomputation; parameters,
            inputs, gradients and optimizer state included.
        solver, tolerance, time_limit_s, reorder, on_progress: as in ``solve``.
        cache: a folder where plans are kept. For the same graph, sizes, budget, device, options and versions
            the plan is loaded, and nothing is profiled or solved.

    Raises:
        TraceError: the step cannot be captured as one static graph, or the wrapper is one that is not planned.
        InfeasibleError: no schedule meets the budget.
        LimitError: none was found in time.
        BudgetError: the measured peak stays above the budget.
        OutputError: plans cannot be kept in `cache`.
    """
    solved = partial(solve, solver=solver, tolerance=tolerance, time_limit_s=time_limit_s, reorder=reorder)
    wrapper = unwrap(model)
    plans = wrapper.ranks.each(lambda: None if cache is None else PlanCache(cache))
    with wrapper.opened():
        captured = wrapper.ranks.each(lambda: wrapper.capture(loss_fn, batch, optimizer=optimizer, accumulate=accumulate))
        made_for = {"budget": budget, **_made_for(captured, model), **solved.keywords}
        compiler = _Compiler(captured, wrapper, loss_fn, batch, passes, partial(solved, on_progress=on_progress))
        return wrapper.ranks.first(
            lambda: compiler.solve(budget) if plans is None else _kept_or_made(compiler, budget, plans, plans.path(made_for)),
            share=lambda step: (step.plan, step.measured),
            adopt=lambda shared: compiler.reuse(*shared),
        )


def _kept_or_made(compiler: "_Compiler", budget: str | int, plans: PlanCache, path: Path) -> PlannedStep:
    """The step of the plan in `path`; where there is none of use, of a new one, which is kept."""
    kept = plans.load(path)
    if kept is not None:
        try:
            return compiler.reuse(kept, None)
        except PlannerError as error:
            warn_unusable(path, error)
    step = compiler.solve(budget)
    plans.store(step.plan, path)
    return step


class _Compiler:
    """Makes a planned step of a captured one."""

    def __init__(
        self,
        captured: Capture,
        wrapper: Plain,
        loss_fn: LossFn | None,
        batch: Batch,
        passes: int,
        solved: Callable[[Graph, str | int], Plan],
    ) -> None:
        self.captured = captured
        self.wrapper = wrapper
        self.loss_fn = loss_fn
        self.batch = batch
        self.passes = passes
        self.solved = solved

    def solve(self, budget: str | int) -> PlannedStep:
        """Profile, and solve until the measured peak is within the budget."""
        graph = profile(self.captured, TrainingStep(self.wrapper.module, self.loss_fn), self.batch, passes=self.passes)
        allowed: str | int = budget
        wanted_bytes: int | None = None
        for _ in range(_CORRECTIONS):
            plan = self.solved(graph, allowed)
            wanted_bytes = wanted_bytes or plan.budget_bytes
            executor, peak_bytes = self._executor(plan)
            if peak_bytes <= wanted_bytes:
                plan = replace(plan, budget_bytes=wanted_bytes, measured_peak_bytes=peak_bytes)
                return PlannedStep(plan, self.wrapper.wrapped(executor), graph)
            allowed = plan.budget_bytes - (peak_bytes - wanted_bytes)
        raise BudgetError(
            f"the measured peak is {format_bytes(peak_bytes)}, over the budget of {format_bytes(wanted_bytes or 0)}, "
            f"though {format_bytes(plan.peak_bytes)} was predicted: some op takes memory that its profile did not show; "
            "lower the budget"
        )

    def reuse(self, plan: Plan, measured: Graph | None) -> PlannedStep:
        """A plan that was made before, or on another rank.

        Raises:
            MismatchError, ScheduleError: it is not one for this step.
            BudgetError: its measured peak is over its budget here.
        """
        check_same_graph(plan.graph, summarize(self.captured.graph))
        executor, peak_bytes = self._executor(plan)
        if peak_bytes > plan.budget_bytes:
            raise BudgetError(
                f"its measured peak here is {format_bytes(peak_bytes)}, over its budget of {format_bytes(plan.budget_bytes)}"
            )
        return PlannedStep(replace(plan, measured_peak_bytes=peak_bytes), self.wrapper.wrapped(executor), measured)

    def _executor(self, plan: Plan) -> tuple[Executor, int]:
        module = self.wrapper.module
        executor = Executor(self.captured, plan.schedule, module, self.loss_fn)
        return executor, measured_peak(self.captured, executor, module, self.batch).peak_bytes


def _made_for(captured: Capture, model: nn.Module) -> dict[str, object]:
    """What the schedule of a captured step depends on, besides budget and options."""
    device = next(model.parameters()).device
    return {
        "graph": captured.graph.fingerprint,
        "static_bytes": captured.graph.static_bytes,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else machine(),
        "torch": torch.__version__,
    }
