"""Training by a plan: one call that traces, measures, solves and compiles a step, and what is called in the loop."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from graphs.errors import BudgetError, InfeasibleError, PlannerError
from graphs.ir import Graph
from graphs.jsonfile import check_writable, write_text
from graphs.plan import Plan
from graphs.trace import LossFn, TrainingStep, capture
from graphs.trace_lower import Capture
from graphs.trace_signature import Batch, as_leaves
from graphs.units import format_bytes
from planner.api import measured_peak, with_times
from planner.cache import PlanCache, warn_unusable
from planner.chrome_trace import chrome_trace
from planner.compare_eager import compare_with_eager, warn_of_differences
from planner.cuda_graph import CudaGraphs
from planner.executor import Executor
from planner.machine import machine
from planner.page import page
from planner.playback import Playback
from planner.recorded import Recorder, record, recordable
from planner.solving import budget_in_bytes, check_same_graph, solve, summarize
from planner.wrappers import Plain, unwrap
from solvers.result import Progress

# How often a budget is lowered by what a measured peak is above it.
_CORRECTIONS = 2


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
    model: nn.Module | Plain,
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
    dynamic: bool = False,
    max_plans: int = 32,
    cuda_graph: bool = False,
    replan: bool = False,
    compare_eager: bool = True,
    on_progress: Callable[[Progress], None] | None = None,
) -> PlannedStep:
    """Trace, profile, solve and compile the training step of `model`: the fastest that fits `budget`.

    The step is run on `batch` to measure its peak, and some times beside plain eager PyTorch, whose bits, time and peak
    become part of the plan. Parameters, buffers, gradients, random states and what the model's attributes hold are
    afterwards as they were, also where an optimizer steps in the backward pass: no hook of a parameter acts meanwhile.

    A model in ``DistributedDataParallel`` or under ``fully_shard`` is planned on all its processes at once: rank 0
    profiles and solves, the others get its plan, and an error on one is raised on all.

    Args:
        model, loss_fn, batch, optimizer, accumulate, passes: as in ``trace``; each process has a batch of its own. A
            model may come with how it is wrapped (``planner.wrappers``), where its own type does not say so.
        budget: bytes, ``8GB``, ``7.5GiB``, or ``60%`` of the peak without recomputation; parameters,
            inputs, gradients and optimizer state included.
        solver, tolerance, time_limit_s, reorder, on_progress: as in ``solve``.
        cache: a folder where plans are kept. For the same graph, sizes, budget, device, options and versions
            the plan is loaded, and nothing is profiled or solved.
        dynamic: batches of other sizes may follow: the step is a ``planner.dynamic.DynamicStep``, which makes a plan
            for each. `batch` must fit with everything kept; up to two sizes may vary.
        max_plans: with `dynamic` or `replan`, how many are kept; the one that was used longest ago goes first.
        cuda_graph: replay the step as CUDA graphs, at one launch for each pass: docs/training.md. What they hold between
            steps, and the copies of what goes in and out, count; random ops are not computed again.
        replan: where the model, the loss function or a value that they read changes, or a batch is unlike `batch`, plan again,
            with a warning that says what changed; without it, each is a MismatchError of the step.
        compare_eager: run the step beside eager PyTorch (of varying sizes, the first), and warn where they differ
            (``graphs.errors.EagerWarning``). It takes as long as some steps.

    Raises:
        TraceError: the step cannot be captured as one static graph, or the wrapper is one that is not planned; or, with
            `cuda_graph`, an op cannot be captured.
        PlannerError: an option does not go with another, or with the device; or gradients are turned off.
        InfeasibleError: no schedule meets the budget.
        LimitError: none was found in time.
        BudgetError: the measured peak stays above the budget.
        OutputError: plans cannot be kept in `cache`.
    """
    if not torch.is_grad_enabled():
        mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise PlannerError(f"planner.compile is called under torch.{mode}(), where nothing is trained: call it outside")
    solved = partial(solve, solver=solver, tolerance=tolerance, time_limit_s=time_limit_s, reorder=reorder)
    wrapper = unwrap(model)
    recorder = _recorder(wrapper, dynamic=dynamic) if cuda_graph else None
    solved_here = partial(solved, on_progress=on_progress)
    compiler = Compiler(wrapper, loss_fn, optimizer, accumulate, passes, solved_here, recorder, compare_eager=compare_eager)
    if max_plans < 1:
        raise PlannerError(f"max_plans is {max_plans}: at least one plan must be kept")
    if dynamic and cache is not None:
        raise PlannerError("plans for varying sizes are not kept in a folder: leave out cache=, or dynamic=True")
    if replan and cuda_graph:
        raise PlannerError("a CUDA graph keeps its memory, and there would be one for each plan: leave out replan=True")
    if dynamic and type(wrapper) is not Plain:
        raise PlannerError(
            "batches of varying sizes are not planned for several processes: leave out dynamic=True, and pad the batches"
        )
    if replan and type(wrapper) is not Plain:
        raise PlannerError("one of several processes cannot plan again while the others wait for it: leave out replan=True")

    def make(batch: Batch, budget: str | int) -> PlannedStep:
        if dynamic:
            from planner.dynamic import DynamicStep  # it is a planned step

            return DynamicStep(compiler, batch, budget, max_plans=max_plans)
        return _planned(compiler, batch, budget, cache, solved.keywords)

    if replan:
        from planner.replan import ReplannedStep  # so is this

        return ReplannedStep(make, as_leaves(batch), budget, max_plans=max_plans)
    return make(as_leaves(batch), budget)


def _planned(
    compiler: "Compiler", batch: Batch, budget: str | int, cache: str | os.PathLike[str] | None, options: Mapping[str, object]
) -> PlannedStep:
    """The step for batches like `batch`, from the cache if it is there.

    Args:
        options: with which graphs are solved; another plan is made for others.
    """
    wrapper = compiler.wrapper
    plans = wrapper.ranks.each(lambda: None if cache is None else PlanCache(cache))
    with wrapper.opened():
        captured = wrapper.ranks.each(lambda: compiler.capture(batch))

        def make() -> PlannedStep:
            return compiler.solve(compiler.profile(captured, batch), batch, budget)

        def find_or_make() -> PlannedStep:
            if plans is None:
                return make()
            path = plans.path({"budget": _as_bytes(budget), **_made_for(captured, wrapper.module), **options})
            kept = plans.load(path, budget)
            if kept is not None:
                try:
                    return compiler.reuse(captured, batch, kept, None)
                except PlannerError as error:
                    warn_unusable(path, error)
            step = make()
            plans.store(step.plan, path)
            return step

        return wrapper.ranks.first(
            find_or_make,
            share=lambda step: (step.plan, step.measured),
            adopt=lambda shared: compiler.reuse(captured, batch, *shared),
        )


@dataclass(frozen=True, slots=True)
class Compiler:
    """Makes planned steps of a model, one for each batch that differs in its sizes.

    Attributes:
        wrapper: how the model is trained.
        loss_fn, optimizer, accumulate, passes: as in ``compile``.
        solved: solves a graph for a budget.
        recorder: makes what records a step, to be replayed; None: steps run op by op.
        compare_eager: whether steps are run beside eager PyTorch.
    """

    wrapper: Plain
    loss_fn: LossFn | None
    optimizer: str
    accumulate: bool
    passes: int
    solved: Callable[[Graph, str | int], Plan]
    recorder: Callable[[], Recorder] | None = None
    compare_eager: bool = True

    def capture(self, batch: Batch) -> Capture:
        """The step on `batch`, run once with everything kept; its times are not measured."""
        captured = self.wrapper.capture(self.loss_fn, batch, optimizer=self.optimizer, accumulate=self.accumulate)
        return captured if self.recorder is None else recordable(captured)

    def capture_shapes(self, batch: Batch) -> Capture:
        """The step on `batch`, of which nothing is run: sizes are what shapes say."""
        return capture(self.wrapper.module, self.loss_fn, batch, optimizer=self.optimizer, accumulate=self.accumulate)

    def profile(self, captured: Capture, batch: Batch) -> Capture:
        """`captured` with measured times and workspaces."""
        return with_times(captured, self.wrapper.module, self.loss_fn, batch, passes=self.passes)

    def solve(self, captured: Capture, batch: Batch, budget: str | int) -> PlannedStep:
        """The step of a profiled capture: solved until the measured peak is within the budget.

        Raises:
            InfeasibleError, LimitError: as ``planner.solve``.
            BudgetError: the measured peak stays above the budget.
        """
        plan = self.solved(captured.graph, budget)
        wanted_bytes = plan.budget_bytes
        for left in reversed(range(_CORRECTIONS + 1)):
            executor, peak_bytes = self._executor(captured, batch, plan)
            if peak_bytes <= wanted_bytes:
                plan = replace(plan, budget_bytes=wanted_bytes, measured_peak_bytes=peak_bytes)
                plan = self._compared(captured, batch, plan, executor)
                return PlannedStep(plan, self.wrapper.wrapped(executor), captured.graph)
            del executor  # with what its recording holds
            over = (
                f"the measured peak is {format_bytes(peak_bytes)}, over the budget of {format_bytes(wanted_bytes)}, though "
                f"{format_bytes(plan.peak_bytes)} was predicted: some op takes memory that its profile did not show, or a CUDA "
                "graph's pool has lost some to fragments"
            )
            if left:
                try:
                    plan = self.solved(captured.graph, plan.budget_bytes - (peak_bytes - wanted_bytes))
                except BudgetError as error:
                    raise InfeasibleError(f"{over}; nothing is found that takes as much less: raise the budget") from error
        raise BudgetError(f"{over}; lower the budget")

    def reuse(self, captured: Capture, batch: Batch, plan: Plan, measured: Graph | None) -> PlannedStep:
        """The step of a plan that was made before, or on another rank.

        Raises:
            MismatchError, ScheduleError: it is not one for this step.
            BudgetError: its measured peak is over its budget here.
        """
        check_same_graph(plan.graph, summarize(captured.graph))
        executor, peak_bytes = self._executor(captured, batch, plan)
        if peak_bytes > plan.budget_bytes:
            raise BudgetError(
                f"its measured peak here is {format_bytes(peak_bytes)}, over its budget of {format_bytes(plan.budget_bytes)}"
            )
        plan = self._compared(captured, batch, replace(plan, measured_peak_bytes=peak_bytes), executor)
        return PlannedStep(plan, self.wrapper.wrapped(executor), measured)

    def _compared(self, captured: Capture, batch: Batch, plan: Plan, executor: Executor) -> Plan:
        """`plan` with how it compares with eager PyTorch in this process."""
        if not self.compare_eager:
            return replace(plan, eager=None)
        step = TrainingStep(self.wrapper.module, self.loss_fn)
        plan = replace(plan, eager=compare_with_eager(captured, executor, step, batch, known=plan.eager))
        warn_of_differences(plan)
        return plan

    def _executor(self, captured: Capture, batch: Batch, plan: Plan) -> tuple[Executor, int]:
        executor = Executor(captured, plan.schedule, self.wrapper.module, self.loss_fn)
        step = TrainingStep(self.wrapper.module, self.loss_fn)
        if self.recorder is None:
            return executor, measured_peak(captured, executor, step, batch).peak_bytes
        recorder = self.recorder()
        record(captured, executor, step, batch, recorder)
        return executor, captured.graph.static_bytes + recorder.held_bytes()


def _recorder(wrapper: Plain, *, dynamic: bool) -> Callable[[], Recorder]:
    if dynamic:
        raise PlannerError(
            "a CUDA graph keeps its memory, and there would be one for each size: leave out cuda_graph=True, or dynamic=True and "
            "pad the batches"
        )
    if type(wrapper) is not Plain:
        raise PlannerError("CUDA graphs are not planned for several processes: leave out cuda_graph=True")
    device = next(wrapper.module.parameters()).device
    if device.type != "cuda":
        raise PlannerError(f"cuda_graph=True is for models on a CUDA device, and this one is on {device}: leave it out")
    return partial(CudaGraphs, device)


def _as_bytes(budget: str | int) -> str | int:
    """A budget however it is written; a share stays one, for what it is a share of is not measured yet."""
    return budget if isinstance(budget, str) and budget.strip().endswith("%") else budget_in_bytes(budget, 0)


def _made_for(captured: Capture, model: nn.Module) -> dict[str, object]:
    """What the schedule of a captured step depends on, besides budget and options."""
    device = next(model.parameters()).device
    return {
        "graph": captured.graph.fingerprint,
        "static_bytes": captured.graph.static_bytes,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else machine(),
        "torch": torch.__version__,
    }
