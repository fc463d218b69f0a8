"""Execution of a plan with real tensors, with predictions and measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from torch import nn

from planner.capture.frontend.preserved_state import preserve_training_state
from planner.capture.lowering.lower import Capture
from planner.capture.options import parse_option
from planner.capture.options.traced import replace_graph
from planner.capture.replay import collect_written_tensors
from planner.capture.signature import Batch, detach_batch
from planner.capture.step import LossFn, TrainingStep
from planner.capture.workload.models import Workload
from planner.graphs.errors import UsageError, quote
from planner.graphs.options import extract_eager_program
from planner.graphs.options.option import Feature
from planner.graphs.pools import HOST
from planner.graphs.schedule import keep_everything
from planner.graphs.short_tracebacks import shorten_traceback
from planner.graphs.units import format_bytes, format_seconds
from planner.measure import steps as measure
from planner.measure.pool_memory import measure_other_peaks, measure_peak
from planner.measure.tracing import capture_step, restore_recorded
from planner.plans.eager import is_within_own_error
from planner.plans.keep_everything import explain_not_fitting
from planner.plans.plan import Plan
from planner.plans.plan_check import check_sizes
from planner.progress import OnProgress, Stage, Stages, list_views
from planner.runtime.device_arena import create_shared_slab
from planner.runtime.executor import Executor
from planner.runtime.out_of_memory import report_errors
from planner.settings.compatibility import check_compatible
from planner.settings.option_settings import apply_recorded_options, read_recorded_options
from planner.settings.plan import PlanSettings, check_count, check_flags

_PLANNED, _KEEPING, _EAGER, _EAGER_AGAIN = "the plan", "keeping everything", "eager PyTorch", "eager PyTorch again"


@dataclass(frozen=True, slots=True)
class RunReport:
    """The predictions of a plan, and its measurements.

    Attributes:
        budget_bytes, predicted_peak_bytes, predicted_time_s, predicted_ratio: predictions of the plan.
        measured_peak_bytes: peak of tensors and workspaces (CUDA: allocated), static memory included; optimizer state and earlier
            gradients are added as planned, since they are not allocated here.
        needed_bytes: bytes that the plan needs, of the memory that its budget counts, by the measured peak
            (``Plan.needed_bytes``).
        predicted_reserved_bytes, reserved_bytes: bytes reserved by the CUDA allocator; None on the CPU.
        arena_bytes, outside_arena_bytes: the arena, and the most bytes that a step takes outside of it at once; None without one.
        library_bytes: workspaces of libraries on the device, which are not in the peak; 0 on the CPU.
        predicted_host_bytes, measured_host_bytes: peak of offloaded tensors on the host; None for a plan without transfers.
        measured_time_s: median of a forward and backward pass.
        measured_ratio, predicted_ratio: time as a multiple of keeping everything in this executor.
        eager_ratio: time of plain PyTorch as a multiple of the same.
        overhead, spread: time relative to plain PyTorch, minus 1: the median over turns, and half of the interquartile range.
        identical: True if loss, all gradients, buffers and random state are bit-identical to keeping everything.
        differences: results that differ from keeping everything, with the size of the difference if the plan may differ.
        eager_differences: results that differ from plain eager PyTorch, in the same form.
        differs: results that may differ, by the plan's options.
        predicted_gradient_error: relative error of the gradients of a lossy plan; None for others.
        measured_gradient_error: the measured error; also if eager PyTorch is not deterministic.
        eager_error: the error between two runs of plain eager PyTorch, if the plan differs from it; None if they are
            bit-identical.
        not_compared: the reason why the plan was not compared with keeping everything and plain PyTorch: they do not fit into the
            free memory. Then these are None: measured_ratio, eager_ratio, overhead, spread, identical, differences,
            eager_differences, measured_gradient_error, eager_error. Empty if it was compared.
        timeline: (seconds, bytes) at each event of the CPU allocator.
        predicted_pools_bytes, measured_pools_bytes: peak in the memory of each other device, by its name.

    Examples:
        >>> report = planner.run(plan, model, loss_fn, (x, y), repeats=1)
        >>> report.measured_peak_bytes == report.predicted_peak_bytes
        True
    """

    budget_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    needed_bytes: int
    reserved_bytes: int | None
    predicted_host_bytes: int | None
    measured_host_bytes: int | None
    predicted_time_s: float
    measured_time_s: float
    predicted_ratio: float
    timeline: tuple[tuple[float, int], ...]
    measured_ratio: float | None = None
    eager_ratio: float | None = None
    overhead: float | None = None
    spread: float | None = None
    identical: bool | None = None
    differences: tuple[str, ...] | None = None
    eager_differences: tuple[str, ...] | None = None
    differs: tuple[str, ...] = ()
    predicted_pools_bytes: Mapping[str, int] = field(default_factory=dict)
    measured_pools_bytes: Mapping[str, int] = field(default_factory=dict)
    predicted_gradient_error: float | None = None
    measured_gradient_error: float | None = None
    eager_error: float | None = None
    not_compared: str = ""
    library_bytes: int = 0
    predicted_reserved_bytes: int | None = None
    arena_bytes: int | None = None
    outside_arena_bytes: int | None = None

    def __repr__(self) -> str:
        """Return the comparison with the plan in one line; `timeline` alone may have thousands of entries."""
        peak = f"peak {format_bytes(self.measured_peak_bytes)}, predicted {format_bytes(self.predicted_peak_bytes)}"
        time = f"time {format_seconds(self.measured_time_s)}, predicted {format_seconds(self.predicted_time_s)}"
        bits = {True: "identical", False: "not identical", None: "not compared"}[self.identical]
        return f"RunReport({peak}; {time}; {bits})"

    @property
    def is_exact(self) -> bool | None:
        """True if the bits are those of eager PyTorch, or differ no more than between its own runs; None without comparison."""
        if self.identical is None:
            return None
        same = self.identical and not self.eager_differences
        return same or is_within_own_error(self.measured_gradient_error, self.eager_error)


@shorten_traceback
def run(
    plan: Plan,
    model: nn.Module,
    loss_fn: LossFn | None,
    batch: Batch,
    *,
    repeats: int = 5,
    seed: int = 0,
    arena: bool | None = None,
    on_progress: OnProgress = None,
) -> RunReport:
    """Execute `plan` with real tensors and measure its peak, time and bits; `model` is restored.

    The step is compared with keeping everything and with plain eager PyTorch if these fit into the free memory.

    Args:
        plan: for the graph of this model and batch.
        model, loss_fn, batch: as in ``planner.trace``.
        repeats: timed steps of each, in turns.
        seed: seed of the random state in which the compared steps begin.
        arena: run the plan in an arena, as ``planner.compile(arena=True)`` does. None: if it was made for one on such a device.
        on_progress: called with each ``planner.progress.Progress``. None: show progress on a terminal and in a notebook, and log
            to the logger ``planner``; False: only log.

    Raises:
        MismatchError: the plan is for another graph; the message names the difference.
        OutOfMemoryError: the plan does not fit into the free memory.
        UsageError: an arena does not go with an option of the plan.

    Examples:
        >>> report = planner.run(plan, model, loss_fn, (x, y), repeats=1)
        >>> report.identical
        True
    """
    if not isinstance(plan, Plan):
        raise UsageError(
            f"the plan is {quote(plan)}: must be one that planner.solve returns, or planner.Plan.load reads from a file"
        )
    check_count("repeats", repeats, 1)
    check_count("seed", seed, 0)
    check_flags(None, arena=arena)
    if arena:
        check_compatible({Feature.ARENA, *(name for name, _ in map(parse_option, read_recorded_options(plan.settings)))})
    with Stages(*list_views(on_progress), stages=(Stage.CAPTURE, Stage.CHECK, Stage.COMPARE)) as stages:
        workload = Workload(model, loss_fn, detach_batch(batch))
        report = _run(plan, workload, stages, repeats=repeats, seed=seed, arena=arena)
        stages.finish()
    return report


def _run(plan: Plan, workload: Workload, stages: Stages, *, repeats: int, seed: int, arena: bool | None) -> RunReport:
    model, loss_fn, batch = workload
    captured = _capture_again(plan, workload, stages)
    check_sizes(captured.graph, plan)
    offered = replace_graph(captured, apply_recorded_options(captured.graph, plan.settings))
    captured = replace(captured, graph=extract_eager_program(captured.graph))
    planned = Executor(offered, plan.schedule, model, loss_fn)
    is_made_for_arena = plan.arena_bytes is not None and (plan.reserved is not None) == (planned.device.type == "cuda")
    if is_made_for_arena if arena is None else arena:
        planned.use_arena(create_shared_slab(planned.device))
    eager = TrainingStep(model, loss_fn)
    not_compared = explain_not_fitting(captured.graph, next(model.parameters()).device)
    steps: dict[str, measure.Step] = {_PLANNED: planned}
    outcomes: dict[str, measure.StepOutcome] = {}
    written = collect_written_tensors(captured, eager, batch)
    if not not_compared:
        steps |= {_KEEPING: Executor(captured, keep_everything(captured.graph), model, loss_fn), _EAGER: eager}
    named = ", ".join(steps)
    with stages.run_stage(Stage.CHECK, f"running {named}") as stage:
        with report_errors("measuring the peak of the plan"):
            memory = measure_peak(captured, planned, eager, batch)
        for done, (name, step) in enumerate(() if not_compared else steps.items()):
            with report_errors(f"running {name}"):
                outcomes[name] = measure.measure_outcome(step, model, batch, seed=seed, written=written)
            stage.advance(done + 2, len(steps) + 1)
        if not not_compared and outcomes[_EAGER].list_differences(outcomes[_PLANNED]) and not plan.differs:
            with report_errors(f"running {_EAGER} again"):
                outcomes[_EAGER_AGAIN] = measure.measure_outcome(eager, model, batch, seed=seed, written=written)
    with (
        stages.run_stage(Stage.COMPARE, f"timing {named}"),
        report_errors("timing the plan"),
        preserve_training_state(eager, batch, written=written),
    ):
        isolated = {name: measure.Isolated(step, model, batch) for name, step in steps.items()}
        times = measure.turn_times(isolated, batch, parameters=list(model.parameters()), repeats=repeats)
    peaks = measure_other_peaks(captured, planned, eager, batch)
    report = RunReport(
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=plan.peak_bytes,
        measured_peak_bytes=memory.peak_bytes,
        needed_bytes=plan.compute_needed_bytes(memory.peak_bytes),
        predicted_reserved_bytes=plan.reserved_bytes,
        reserved_bytes=memory.reserved_bytes,
        library_bytes=memory.library_bytes,
        predicted_host_bytes=plan.pool_peaks_bytes.get(HOST),
        predicted_pools_bytes={pool: peak for pool, peak in plan.pool_peaks_bytes.items() if pool != HOST},
        measured_pools_bytes={pool: peak for pool, peak in peaks.items() if pool != HOST},
        measured_host_bytes=peaks.get(HOST),
        predicted_time_s=plan.predicted_s,
        measured_time_s=median(times[_PLANNED]),
        predicted_ratio=1 + plan.overhead,
        timeline=memory.timeline,
        arena_bytes=None if planned.arena is None else planned.arena.size_bytes,
        outside_arena_bytes=None if planned.arena is None else planned.arena.outside_bytes,
        differs=plan.differs,
        predicted_gradient_error=plan.gradient_error,
        not_compared=not_compared,
    )
    return report if not_compared else _add_comparison(report, outcomes, times)


def _capture_again(plan: Plan, workload: Workload, stages: Stages) -> Capture:
    """Return the step as it was when `plan` was made."""
    provenance = plan.graph.provenance
    with stages.run_stage(Stage.CAPTURE):
        settings = PlanSettings(optimizer=provenance.optimizer, accumulate=provenance.accumulate, name=provenance.model)
        captured = capture_step(workload, settings)
    return restore_recorded(captured, provenance, read_recorded_options(plan.settings))


def _add_comparison(
    report: RunReport, outcomes: Mapping[str, measure.StepOutcome], times: Mapping[str, Sequence[float]]
) -> RunReport:
    result, kept, eager, much = outcomes[_PLANNED], outcomes[_KEEPING], outcomes[_EAGER], bool(report.differs)
    again = outcomes.get(_EAGER_AGAIN, eager)
    eager_error = eager.compute_gradient_error(again) if eager.list_differences(again) else None
    error = kept.compute_gradient_error(result) if report.predicted_gradient_error is not None else None
    over_eager, spread = measure.compute_ratio(times[_PLANNED], times[_EAGER])
    return replace(
        report,
        measured_ratio=measure.compute_ratio(times[_PLANNED], times[_KEEPING])[0],
        eager_ratio=measure.compute_ratio(times[_EAGER], times[_KEEPING])[0],
        overhead=over_eager - 1,
        spread=spread,
        identical=not kept.list_differences(result),
        differences=_list_differences(kept, result, much=much),
        eager_differences=_list_differences(eager, result, much=much),
        measured_gradient_error=error if eager_error is None else eager.compute_gradient_error(result),
        eager_error=eager_error,
    )


def _list_differences(wanted: measure.StepOutcome, found: measure.StepOutcome, *, much: bool) -> tuple[str, ...]:
    """Return the results that are not bit-identical; with `much`, also by how much they differ."""
    names = wanted.list_differences(found)
    return tuple(str(wanted.compute_difference(name, found)) for name in names) if much else names
