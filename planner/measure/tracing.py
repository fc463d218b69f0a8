"""Tracing of a model's training step to a graph, with measured or modelled ops."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from planner.capture.frontend.preserved_state import initialize_lazy_layers
from planner.capture.lowering.lower import Capture
from planner.capture.options import check_traced
from planner.capture.options.traced import add_traced, measure_uses, needs_measuring, remove_useless_ops, restrict_to_recorded
from planner.capture.replay import RealStep, collect_static
from planner.capture.signature import Batch, detach_batch
from planner.capture.step import LossFn, TrainingStep
from planner.capture.trace import capture, capture_kernels
from planner.capture.workload.models import Workload
from planner.graphs.ir import Graph
from planner.graphs.provenance import Provenance
from planner.graphs.short_tracebacks import shorten_traceback
from planner.measure.device_profile import profile_other_devices as measured_devices
from planner.measure.exactness import mark_exact_ops, needs_comparison
from planner.measure.link_rates import link_during_step
from planner.measure.optimizers import find_memory
from planner.measure.profile import profile
from planner.measure.roofline import model_times
from planner.measure.sizes import set_dense_sizes, set_recorded_sizes
from planner.measure.unrepeatable_ops import mark_custom_ops, mark_recorded_ops
from planner.memory.free_memory import free_bytes
from planner.memory.release import release_unused
from planner.memory.reserved import needs_libraries
from planner.plans.keep_everything import count_keep_everything_bytes
from planner.progress import OnProgress, Stage, Stages, list_views
from planner.runtime.libraries import warm_up_libraries
from planner.runtime.tight_memory import prepare_for_tight_memory
from planner.settings.devices import DeviceSpec, get_device
from planner.settings.link import MEASURED_LINK
from planner.settings.option_settings import OptionSettings
from planner.settings.other_devices import DEVICES_KEY, encode_devices
from planner.settings.plan import PlanSettings, select_settings
from planner.torch_private.core import FakeTensor

if TYPE_CHECKING:
    from planner.capture.kernels.variants import CompileVariant  # importing Inductor takes a second


@shorten_traceback
def trace(
    model: nn.Module,
    loss_fn: LossFn | None,
    batch: Batch,
    *,
    optimizer: str | torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = "none",
    accumulate: bool = False,
    roofline: str | None = None,
    passes: int = 5,
    measure_link: bool = False,
    name: str = "",
    options: Sequence[str] = (),
    other_devices: Sequence[str] = (),
    on_progress: OnProgress = None,
) -> Graph:
    """Capture the training step of `model` on `batch` as a graph, with the time and memory of every op.

    Args:
        model: in the mode it is trained in.
        loss_fn: called as ``loss_fn(model(*inputs), target)`` with the last item of `batch` as target. If `batch` is a mapping,
            it is called as ``loss_fn(model(**inputs), **targets)`` with the items that it names. None if the model gets the whole
            batch and returns the loss. The result is a scalar loss, a tuple that begins with it, a dict with ``loss``, or an
            object with an attribute ``loss``.
        batch: inputs and target, by position or by name: real tensors, or fake ones with `roofline`.
        optimizer: the optimizer, whose state is measured and counted in memory, or a list of them; or ``none``, ``sgd``,
            ``momentum`` or ``adamw``.
        accumulate: count gradients of earlier batches in memory.
        roofline: model the times on this device instead of measuring them: gh200, h200, h100, a100, l4, rtx4090 or cpu. Nothing
            is executed.
        passes: number of times that each distinct op is timed, unless it takes long.
        measure_link: also measure transfers to host memory and back, for the option ``offload``.
        name: name of the model, for messages.
        options: options to find in the step and add to the graph: ``chunks``, ``pack``, ``kernels``, ``in-place``, ``compress``.
        other_devices: also measure the ops on these, for the option ``placement``: ``cpu:2`` (two threads), ``cuda:1``.
        on_progress: called with each ``planner.progress.Progress``. None: show progress on a terminal and in a notebook, and log
            to the logger ``planner``; False: only log.

    Raises:
        TraceError: the step cannot be captured as one static graph.
        UsageError: there is no such option, it is not found in a step, or something is to be measured with a roofline.
        OutOfMemoryError: one op alone needs more than is free.

    Examples:
        >>> graph = planner.trace(model, loss_fn, (x, y), optimizer="adamw")
        >>> [op.name for op in graph.ops][:3]
        ['addmm', 'relu', 'addmm_1']
    """
    given = select_settings(locals())
    check_traced(options)
    step = TrainingStep(model, loss_fn)
    initialize_lazy_layers(step, batch)  # before their optimizer is measured
    given |= {"optimizer": find_memory(optimizer, step), "options": OptionSettings(tuple(options))}
    return trace_workload(Workload(model, loss_fn, batch), PlanSettings.of(**given), on_progress)


def trace_workload(workload: Workload, settings: PlanSettings, on_progress: OnProgress = None) -> Graph:
    """Return the graph of a training step, as ``trace`` does."""
    workload = workload._replace(batch=detach_batch(workload.batch))
    with Stages(*list_views(on_progress), stages=(Stage.CAPTURE, Stage.MEASURE)) as stages:
        if settings.roofline is None:
            captured = capture_profiled(workload, settings, stages)
        else:
            with stages.run_stage(Stage.CAPTURE):
                captured = _capture_with_model(workload, settings, get_device(settings.roofline))
        stages.finish()
    return captured.graph


def _capture_with_model(workload: Workload, settings: PlanSettings, device: DeviceSpec) -> Capture:
    """Return the step with times modelled by a roofline."""
    captured = capture(
        *workload,
        optimizer=settings.optimizer,
        accumulate=settings.accumulate,
        as_on_cuda=device.name != "cpu",
        name=settings.name,
    )
    captured = add_traced(mark_custom_ops(captured), settings.traced_options)
    return remove_useless_ops(replace(captured, graph=model_times(captured, device)))


def capture_profiled(workload: Workload, settings: PlanSettings, stages: Stages | None = None) -> Capture:
    """Return the step measured as by ``trace``, with its program; progress is reported to `stages`."""
    stages = stages or Stages()
    with stages.run_stage(Stage.CAPTURE):
        captured = capture_step(workload, settings)
    with stages.run_stage(Stage.MEASURE) as stage:
        return profile_capture(captured, workload, settings, on_op=stage.advance)


def capture_step(workload: Workload, settings: PlanSettings, *, variant: "CompileVariant | None" = None) -> Capture:
    """Return the step with the sizes of its shapes and without times: nothing is executed."""
    optimizer, accumulate, name = settings.optimizer, settings.accumulate, settings.name
    if variant is not None:
        captured = capture_kernels(*workload, variant=variant, optimizer=optimizer, accumulate=accumulate, name=name)
    else:
        numbers = settings.numbers if settings.reads_numbers else None
        looks = settings.replan is not False  # otherwise a batch with other masks would end the training
        step = capture(*workload, optimizer=optimizer, accumulate=accumulate, name=name, numbers=numbers, looks=looks)
        captured = set_dense_sizes(step)
    prepare_for_tight_memory(captured.graph, torch.device(captured.graph.device))
    return captured


def profile_capture(
    captured: Capture,
    workload: Workload,
    settings: PlanSettings,
    *,
    on_op: Callable[[int, int], None] | None = None,
) -> Capture:
    """Return `captured` with measured times, workspaces and sizes, and with the options that are found in it.

    Ops are measured one at a time (``profiling.profile``). Some options need one execution of the whole step that keeps
    everything, to find which of their ops are exact and how lossy others are. If that does not fit into the free memory, ops that
    may round count as rounding, and modelled errors are used for lossy ones.

    Args:
        captured: the capture of the step of `workload`, from ``capture_step``.
        settings: settings, of which `passes`, `options`, `measure_link` and `other_devices` are used.
        on_op: called with the number of measured ops, and of all ops.
    """
    step, passes = TrainingStep(workload.model, workload.loss_fn), settings.passes
    static = collect_static(captured, step, workload.batch)
    if needs_libraries(captured.graph):
        warm_up_libraries(static[0].device)
    captured = profile(captured, static, passes=passes, on_op=on_op)
    prepare_for_tight_memory(captured.graph, static[0].device)
    if settings.traced_options:
        offered = add_traced(captured, settings.traced_options)
        captured = profile(offered, static, passes=passes) if len(offered.graph.ops) > len(captured.graph.ops) else offered
        captured = _compare_options(captured, step, workload.batch)
    recorded: dict[str, object] = {}
    if settings.measure_link:
        recorded[MEASURED_LINK] = link_during_step(captured, static, captured.graph.time_s).recorded
    if settings.other_devices:
        recorded[DEVICES_KEY] = encode_devices(measured_devices(captured, static, settings.other_devices, passes=passes))
    release_unused(static[0].device)
    graph = replace(captured.graph, provenance=captured.graph.provenance.record(**recorded))
    return remove_useless_ops(replace(captured, graph=graph))


def _compare_options(captured: Capture, step: TrainingStep, batch: Batch) -> Capture:
    """Return `captured` with the exactness of its optional ops, found by executing the whole step if that fits."""
    if not (needs_comparison(captured) or needs_measuring(captured)):
        return captured
    executed = RealStep(captured, step, batch)
    fits = count_keep_everything_bytes(captured.graph) <= free_bytes(executed.device)
    real = executed if fits and not any(isinstance(value, FakeTensor) for value in executed.static) else None
    captured = mark_exact_ops(captured, real)
    return replace(captured, graph=measure_uses(captured, real))


def restore_recorded(captured: Capture, provenance: Provenance, options: Sequence[str]) -> Capture:
    """Return `captured` as the step that a plan with this provenance was made for: nothing is executed."""
    captured = mark_recorded_ops(set_recorded_sizes(captured, provenance), provenance)
    prepare_for_tight_memory(captured.graph, torch.device(captured.graph.device))
    return restrict_to_recorded(set_recorded_sizes(add_traced(captured, options), provenance), provenance)
