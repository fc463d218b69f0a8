"""A plan executed with real tensors: what it promises beside what is measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from graphs.capture.signature import Batch, as_leaves
from graphs.capture.step import LossFn, TrainingStep
from graphs.capture.unchanged import unchanged
from graphs.cost.replay import written_by
from graphs.options import without_options
from graphs.options.traced import with_graph
from graphs.plan import Plan
from graphs.pools import HOST
from planner.choices import recorded_options, with_recorded
from planner.plan_check import check_sizes
from planner.progress import LoggingView, Stage, Stages, View
from planner.runtime import measure
from planner.runtime.executor import Executor
from planner.runtime.out_of_memory import reporting
from planner.runtime.pool_memory import measured_peak, other_peaks_measured
from planner.tracing import as_recorded, capture_step
from solvers.policies.store_all import store_all


@dataclass(frozen=True, slots=True)
class RunReport:
    """A plan's promises beside what was measured.

    Attributes:
        budget_bytes, predicted_peak_bytes, predicted_time_s, predicted_ratio: from the plan.
        measured_peak_bytes: of tensors and workspaces (CUDA: allocated), static bytes included;
            optimizer state and old gradients are added as planned, they are not made here.
        reserved_bytes: what the CUDA allocator held; None on the CPU.
        predicted_host_bytes, measured_host_bytes: most on the host of what was copied there; None for a plan without copies.
        measured_time_s: median of a forward and backward pass.
        measured_ratio, predicted_ratio: time as a multiple of keeping everything in this executor.
        eager_ratio: time of plain PyTorch as a multiple of the same.
        identical: loss, all gradients, buffers and random state equal those of keeping everything.
        differences: what does not, and by how much where the plan may differ.
        eager_differences: what is not equal to plain eager PyTorch, likewise.
        differs: what may differ, by the options that the plan was solved with.
        predicted_gradient_error, measured_gradient_error: of a lossy plan, the error of the gradients as a part of their norm;
            None for others.
        timeline: (seconds, bytes) at each event of the CPU allocator.
        predicted_pools_bytes, measured_pools_bytes: most in the memory of each other device, by its name.
    """

    budget_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    reserved_bytes: int | None
    predicted_host_bytes: int | None
    measured_host_bytes: int | None
    predicted_time_s: float
    measured_time_s: float
    predicted_ratio: float
    measured_ratio: float
    eager_ratio: float
    identical: bool
    differences: tuple[str, ...]
    eager_differences: tuple[str, ...]
    timeline: tuple[tuple[float, int], ...]
    differs: tuple[str, ...] = ()
    predicted_pools_bytes: Mapping[str, int] = field(default_factory=dict)
    measured_pools_bytes: Mapping[str, int] = field(default_factory=dict)
    predicted_gradient_error: float | None = None
    measured_gradient_error: float | None = None


def run(
    plan: Plan,
    model: nn.Module,
    loss_fn: LossFn | None,
    batch: Batch,
    *,
    repeats: int = 5,
    seed: int = 0,
    on_progress: View | None = None,
) -> RunReport:
    """Replay `plan` with real tensors and measure it; `model` is afterwards as it was.

    Args:
        plan: made for the graph of this model and batch.
        model, loss_fn, batch: as in ``trace``.
        repeats: steps timed, in turn with keeping everything and with plain PyTorch.
        seed: of the random state the results are compared from.
        on_progress: called with each ``planner.progress.Progress``; None: log to the logger ``planner``.

    Raises:
        MismatchError: the plan is for another graph; says what differs.
        OutOfMemoryError: the plan does not fit into what is free, or keeping everything does not.
    """
    with Stages(on_progress or LoggingView(), stages=(Stage.CAPTURE, Stage.CHECK, Stage.COMPARE)) as stages:
        report = _run(plan, model, loss_fn, as_leaves(batch), stages, repeats=repeats, seed=seed)
        stages.finish()
    return report


def _run(
    plan: Plan, model: nn.Module, loss_fn: LossFn | None, batch: Batch, stages: Stages, *, repeats: int, seed: int
) -> RunReport:
    provenance = plan.graph.provenance
    with stages.stage(Stage.CAPTURE):
        captured = capture_step(
            model,
            loss_fn,
            batch,
            optimizer=str(provenance.get("optimizer", "none")),
            accumulate=bool(provenance.get("accumulate", False)),
            name=str(provenance.get("model", "")),
        )
    captured = as_recorded(captured, provenance, recorded_options(plan.settings))
    check_sizes(captured.graph, plan)
    offered = with_graph(captured, with_recorded(captured.graph, plan.settings))
    captured = replace(captured, graph=without_options(captured.graph).out_of_place())
    planned = Executor(offered, plan.schedule, model, loss_fn)
    keeping = Executor(captured, store_all(captured.graph), model, loss_fn)
    eager = TrainingStep(model, loss_fn)
    written = written_by(captured, eager, batch)
    with stages.stage(Stage.CHECK, "running the plan, keeping everything and eager PyTorch") as stage:
        with reporting("keeping everything, to compare results with the plan's"):
            reference = measure.outcome(keeping, model, batch, seed=seed, written=written)
        stage.advance(1, 4)
        with reporting("running the plan"):
            result = measure.outcome(planned, model, batch, seed=seed, written=written)
        stage.advance(2, 4)
        with reporting("running eager PyTorch, to compare results with the plan's"):
            plain = measure.outcome(eager, model, batch, seed=seed, written=written)
        stage.advance(3, 4)
        with reporting("measuring the peak of the plan"):
            memory = measured_peak(captured, planned, eager, batch)
    with (
        stages.stage(Stage.COMPARE, "timing the plan beside keeping everything and eager PyTorch"),
        reporting("timing the plan beside keeping everything and eager PyTorch"),
        unchanged(eager, batch, written=written),
    ):
        parameters = list(model.parameters())
        steps = {
            name: measure.Isolated(step, model, batch)
            for name, step in (("planned", planned), ("keeping", keeping), ("eager", eager))
        }
        times = measure.median_times(steps, batch, parameters=parameters, repeats=repeats)
    return RunReport(
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=plan.peak_bytes,
        measured_peak_bytes=memory.peak_bytes,
        reserved_bytes=memory.reserved_bytes,
        predicted_host_bytes=plan.pool_peaks_bytes.get(HOST),
        predicted_pools_bytes={pool: peak for pool, peak in plan.pool_peaks_bytes.items() if pool != HOST},
        measured_pools_bytes=other_peaks_measured(captured, planned, eager, batch),
        measured_host_bytes=None if planned.channels is None else planned.channels.memory.peak_bytes,
        predicted_time_s=plan.time_s,
        measured_time_s=times["planned"],
        predicted_ratio=1 + plan.overhead,
        measured_ratio=times["planned"] / times["keeping"],
        eager_ratio=times["eager"] / times["keeping"],
        identical=not reference.differences(result),
        differences=_differences(reference, result, much=bool(plan.differs)),
        eager_differences=_differences(plain, result, much=bool(plan.differs)),
        timeline=memory.timeline,
        differs=plan.differs,
        predicted_gradient_error=plan.gradient_error,
        measured_gradient_error=None if plan.gradient_error is None else reference.gradient_error(result),
    )


def _differences(wanted: measure.StepOutcome, found: measure.StepOutcome, *, much: bool) -> tuple[str, ...]:
    """What is not equal to the last bit, and by how much if `much`."""
    names = wanted.differences(found)
    return tuple(str(wanted.difference(name, found)) for name in names) if much else names
