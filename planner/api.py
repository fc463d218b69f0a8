"""What Python programs do with the planner, besides training by it (``planner.training``): trace a step, run a plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypedDict

from torch import nn

from graphs.capture.lower import Capture
from graphs.capture.signature import Batch, as_leaves
from graphs.capture.step import LossFn, TrainingStep
from graphs.capture.trace import capture, capture_kernels
from graphs.capture.unchanged import unchanged
from graphs.cost.devices import get_device
from graphs.cost.link import MEASURED_LINK
from graphs.cost.others import DEVICES_KEY, recorded_devices
from graphs.cost.profile import profile
from graphs.cost.replay import RealStep, with_real_sizes, written_by
from graphs.cost.roofline import model_times
from graphs.errors import TraceError
from graphs.ir import Graph
from graphs.options import check_traced, without_options
from graphs.options.traced import offered_as, with_graph, with_traced, without_needless
from graphs.plan import Plan
from graphs.pools import HOST
from planner.choices import recorded_options, with_recorded
from planner.plan_check import check_sizes
from planner.runtime import measure
from planner.runtime.device_profile import other_devices as measured_devices
from planner.runtime.executor import Executor
from planner.runtime.link import link_beside
from planner.runtime.pool_memory import other_peaks_measured
from solvers.policies.store_all import store_all

if TYPE_CHECKING:
    from graphs.capture.kernels.variants import Variant  # importing Inductor takes a second


class _About(TypedDict):
    optimizer: str
    accumulate: bool
    name: str


def trace(
    model: nn.Module,
    loss_fn: LossFn | None,
    batch: Batch,
    *,
    optimizer: str = "none",
    accumulate: bool = False,
    roofline: str | None = None,
    passes: int = 5,
    measure_link: bool = False,
    name: str = "",
    options: Sequence[str] = (),
    other_devices: Sequence[str] = (),
) -> Graph:
    """The training step of `model` on `batch` as a graph with the time and memory of every op.

    Args:
        model: in the mode it is trained in.
        loss_fn: called as ``loss_fn(model(*inputs), target)`` with the last item of `batch` as target, or, where
            `batch` is a mapping, as ``loss_fn(model(**inputs), **targets)`` with the items that it names. None if
            the model gets all of the batch and returns the loss. Returned is a scalar, a tuple that begins with
            it, or a dict with a "loss"; a model may also return an object with an attribute ``loss``.
        batch: inputs and target, by position or by name; real tensors, or fake ones with `roofline`.
        optimizer: none, sgd, momentum or adamw (``graphs.optimizers``): its state counts as memory of the step.
        accumulate: the gradients of earlier batches are in memory as well.
        roofline: model the times for this device instead of measuring them: gh200, h200, h100, a100, l4,
            rtx4090 or cpu. Nothing is executed.
        passes: how often each op is timed; the median counts.
        measure_link: also measure copies to the host and back beside the step, for the option ``offload``: they become part
            of the provenance.
        name: of the model, for messages.
        options: choices besides recomputing that are found in the step itself, names in ``graphs.options``: ``chunks``,
            ``pack``, ``kernels``. Their ops are part of the graph; ``solve`` takes them where it is given the same names.
        other_devices: that ops may be placed on, for the option ``placement``: ``cpu:2`` for two threads of the CPU, ``cuda:1``.
            Each op is measured there as well; its times are part of the provenance.

    Raises:
        TraceError: the step cannot be captured as one static graph; or a link, or another device, is to be measured with a
            roofline.
        GraphError: there is no such choice, or it is not found in the step.
    """
    check_traced(options)
    if roofline is not None and other_devices:
        raise TraceError(f"ops cannot be measured on {other_devices[0]!r} with the roofline {roofline!r}, for nothing is run")
    if roofline is not None and measure_link:
        raise TraceError(
            f"the link to the host cannot be measured with the roofline {roofline!r}, for nothing is run: leave out one of them; "
            "without a link, what is published of the device counts"
        )
    batch = as_leaves(batch)
    if roofline is not None:
        device = get_device(roofline)
        as_on_cuda = device.name != "cpu"
        modelled = capture(model, loss_fn, batch, optimizer=optimizer, accumulate=accumulate, as_on_cuda=as_on_cuda, name=name)
        modelled = with_traced(modelled, options)
        return without_needless(replace(modelled, graph=model_times(modelled, device))).graph
    about: _About = {"optimizer": optimizer, "accumulate": accumulate, "name": name}
    return capture_profiled(
        model, loss_fn, batch, **about, passes=passes, measure_link=measure_link, options=options, other_devices=other_devices
    ).graph


def capture_profiled(
    model: nn.Module,
    loss_fn: LossFn | None,
    batch: Batch,
    *,
    optimizer: str,
    accumulate: bool,
    passes: int,
    measure_link: bool = False,
    name: str = "",
    options: Sequence[str] = (),
    other_devices: Sequence[str] = (),
) -> Capture:
    """The step as ``trace`` measures it, with the program that executes it."""
    captured = capture_real(model, loss_fn, batch, optimizer=optimizer, accumulate=accumulate, name=name, options=options)
    return with_times(captured, model, loss_fn, batch, passes=passes, measure_link=measure_link, others=other_devices)


def with_times(
    captured: Capture,
    model: nn.Module,
    loss_fn: LossFn | None,
    batch: Batch,
    *,
    passes: int,
    measure_link: bool = False,
    others: Sequence[str] = (),
) -> Capture:
    """`captured` with measured times and workspaces.

    With `measure_link` also what the link to the host carries beside them, with `others` also the times on devices so called.
    """
    real = RealStep.of(captured, TrainingStep(model, loss_fn), batch)
    graph = profile(real, passes=passes)
    if measure_link:
        link = link_beside(real, graph.time_s)
        graph = replace(graph, provenance={**graph.provenance, MEASURED_LINK: link.recorded})
    if others:
        devices = recorded_devices(measured_devices(real, others, passes=passes))
        graph = replace(graph, provenance={**graph.provenance, DEVICES_KEY: devices})
    return without_needless(replace(captured, graph=graph))


def capture_real(
    model: nn.Module,
    loss_fn: LossFn | None,
    batch: Batch,
    *,
    optimizer: str,
    accumulate: bool,
    name: str = "",
    variant: "Variant | None" = None,
    options: Sequence[str] = (),
) -> Capture:
    """The step with the sizes that its kernels really allocate; its times are not measured.

    Args:
        options: as in ``trace``.
        variant: how Inductor compiles its kernels; None for those of eager PyTorch.
    """
    about: _About = {"optimizer": optimizer, "accumulate": accumulate, "name": name}
    if variant is None:
        captured = capture(model, loss_fn, batch, **about)
    else:
        captured = capture_kernels(model, loss_fn, batch, variant=variant, **about)
    return with_traced(with_real_sizes(RealStep.of(captured, TrainingStep(model, loss_fn), batch)), options)


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
) -> RunReport:
    """Replay `plan` with real tensors and measure it; `model` is afterwards as it was.

    Args:
        plan: made for the graph of this model and batch.
        model, loss_fn, batch: as in ``trace``.
        repeats: steps timed, in turn with keeping everything and with plain PyTorch.
        seed: of the random state the results are compared from.

    Raises:
        MismatchError: the plan is for another graph; says what differs.
    """
    batch = as_leaves(batch)
    provenance = plan.graph.provenance
    captured = capture_real(
        model,
        loss_fn,
        batch,
        optimizer=str(provenance.get("optimizer", "none")),
        accumulate=bool(provenance.get("accumulate", False)),
        name=str(provenance.get("model", "")),
        options=recorded_options(plan.settings),
    )
    captured = offered_as(captured, provenance)
    check_sizes(captured.graph, plan)
    offered = with_graph(captured, with_recorded(captured.graph, plan.settings))
    captured = replace(captured, graph=without_options(captured.graph).out_of_place())
    planned = Executor(offered, plan.schedule, model, loss_fn)
    keeping = Executor(captured, store_all(captured.graph), model, loss_fn)
    eager = TrainingStep(model, loss_fn)
    written = written_by(captured, eager, batch)
    reference = measure.outcome(keeping, model, batch, seed=seed, written=written)
    result = measure.outcome(planned, model, batch, seed=seed, written=written)
    plain = measure.outcome(eager, model, batch, seed=seed, written=written)
    memory = measured_peak(captured, planned, eager, batch)
    with unchanged(eager, batch, written=written):
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


def measured_peak(captured: Capture, executor: measure.Step, step: TrainingStep, batch: Batch) -> measure.Memory:
    """Memory of one run of `executor` with real tensors; `step`, which was captured, and `batch` are afterwards as they were."""
    # Autograd makes the gradient of the loss while the step runs: it is measured, not assumed.
    tangent = sum(captured.graph.tensors[s.tensor].size_bytes for s in captured.program.sources if s.is_tangent)
    with unchanged(step, batch, written=written_by(captured, step, batch)):
        device = next(step.parameters()).device
        isolated = measure.Isolated(executor, step, batch)
        return measure.measure_memory(isolated, batch, static_bytes=captured.graph.static_bytes - tangent, device=device)
