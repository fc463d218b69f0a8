"""From a model to a graph: a training step traced, its ops measured or modelled."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from graphs.errors import TraceError
from graphs.ir import Graph
from planner.capture.lowering.lower import Capture
from planner.capture.options import check_traced
from planner.capture.options.traced import measured_uses, needs_measuring, offered_as, with_traced, without_needless
from planner.capture.replay import RealStep, real_static
from planner.capture.signature import Batch, as_leaves
from planner.capture.step import LossFn, TrainingStep
from planner.capture.trace import capture, capture_kernels
from planner.keeping_everything import needed_bytes, prepare_for_tight_memory
from planner.profiling.devices import get_device
from planner.profiling.exactness import needs_comparison, with_exactness
from planner.profiling.link import MEASURED_LINK
from planner.profiling.other_devices import DEVICES_KEY, recorded_devices
from planner.profiling.profile import profile
from planner.profiling.repeatable import as_recorded_once, custom_ops_once
from planner.profiling.roofline import model_times
from planner.profiling.sizes import with_dense_sizes, with_recorded_sizes
from planner.progress import LoggingView, Stage, Stages, View
from planner.runtime.device_profile import other_devices as measured_devices
from planner.runtime.free_memory import free_bytes
from planner.runtime.libraries import warm_up_libraries
from planner.runtime.link import link_beside
from planner.runtime.release import release_unused

if TYPE_CHECKING:
    from planner.capture.kernels.variants import Variant  # importing Inductor takes a second


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
    on_progress: View | None = None,
) -> Graph:
    """Capture the training step of `model` on `batch` as a graph, with the time and memory of every op.

    Args:
        model: in the mode it is trained in.
        loss_fn: called as ``loss_fn(model(*inputs), target)`` with the last item of `batch` as target. If `batch` is a mapping,
            it is called as ``loss_fn(model(**inputs), **targets)`` with the items that it names. None if the model gets the whole
            batch and returns the loss. The result is a scalar loss, a tuple that begins with it, a dict with ``loss``, or an
            object with an attribute ``loss``.
        batch: inputs and target, by position or by name: real tensors, or fake ones with `roofline`.
        optimizer: ``none``, ``sgd``, ``momentum`` or ``adamw``: its state is counted in memory.
        accumulate: count gradients of earlier batches in memory.
        roofline: model the times on this device instead of measuring them: gh200, h200, h100, a100, l4, rtx4090 or cpu. Nothing
            is executed.
        passes: how often each distinct op is timed, unless it takes long.
        measure_link: also measure transfers to host memory and back, for the option ``offload``.
        name: of the model, for messages.
        options: options to find in the step and add to the graph: ``chunks``, ``pack``, ``kernels``, ``in-place``, ``compress``.
        other_devices: also measure the ops on these, for the option ``placement``: ``cpu:2`` (two threads), ``cuda:1``.
        on_progress: called with each ``planner.progress.Progress``. None: log to the logger ``planner``.

    Raises:
        TraceError: the step cannot be captured as one static graph, or something is to be measured with a roofline.
        UsageError: there is no such option, or it is not found in a step.
        OutOfMemoryError: one op alone needs more than is free.
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
    with Stages(on_progress or LoggingView(), stages=(Stage.CAPTURE, Stage.MEASURE)) as stages:
        if roofline is None:
            captured = capture_profiled(
                model,
                loss_fn,
                batch,
                optimizer=optimizer,
                accumulate=accumulate,
                passes=passes,
                measure_link=measure_link,
                name=name,
                options=options,
                other_devices=other_devices,
                stages=stages,
            )
        else:
            with stages.stage(Stage.CAPTURE):
                device = get_device(roofline)
                cuda = device.name != "cpu"
                captured = capture(model, loss_fn, batch, optimizer=optimizer, accumulate=accumulate, as_on_cuda=cuda, name=name)
                captured = with_traced(custom_ops_once(captured), options)
            captured = without_needless(replace(captured, graph=model_times(captured, device)))
        stages.finish()
    return captured.graph


def capture_profiled(
    model: nn.Module,
    loss_fn: LossFn | None,
    batch: Batch,
    *,
    optimizer: str = "none",
    accumulate: bool = False,
    passes: int = 5,
    measure_link: bool = False,
    name: str = "",
    options: Sequence[str] = (),
    other_devices: Sequence[str] = (),
    stages: Stages | None = None,
) -> Capture:
    """Return the step as ``trace`` measures it, with the program that executes it; progress is reported to `stages`."""
    stages = stages or Stages()
    with stages.stage(Stage.CAPTURE):
        captured = capture_step(model, loss_fn, batch, optimizer=optimizer, accumulate=accumulate, name=name)
    with stages.stage(Stage.MEASURE) as stage:
        return profiled(
            captured,
            model,
            loss_fn,
            batch,
            passes=passes,
            options=options,
            measure_link=measure_link,
            other_devices=other_devices,
            on_op=stage.advance,
        )


def capture_step(
    model: nn.Module,
    loss_fn: LossFn | None,
    batch: Batch,
    *,
    optimizer: str = "none",
    accumulate: bool = False,
    name: str = "",
    variant: "Variant | None" = None,
) -> Capture:
    """Return the step with the sizes that its shapes say, and no times: nothing is executed.

    Args:
        model, loss_fn, batch, optimizer, accumulate, name: as in ``trace``.
        variant: how Inductor compiles its kernels; None for those of eager PyTorch.
    """
    if variant is not None:
        captured = capture_kernels(model, loss_fn, batch, variant=variant, optimizer=optimizer, accumulate=accumulate, name=name)
    else:
        captured = with_dense_sizes(capture(model, loss_fn, batch, optimizer=optimizer, accumulate=accumulate, name=name))
    prepare_for_tight_memory(captured.graph, torch.device(str(captured.graph.provenance["device"])))
    return captured


def profiled(
    captured: Capture,
    model: nn.Module,
    loss_fn: LossFn | None,
    batch: Batch,
    *,
    passes: int = 5,
    options: Sequence[str] = (),
    measure_link: bool = False,
    other_devices: Sequence[str] = (),
    on_op: Callable[[int, int], None] | None = None,
) -> Capture:
    """Return `captured` with measured times, workspaces and sizes, and with the `options` that are found in it.

    Ops are measured one at a time (``profiling.profile``). Some options need the whole step, executed with everything kept: to
    find out which of their ops are exact, and how lossy others are. Where it does not fit into what is free, ops that may round
    count as rounding, and what is modelled of the lossy ones counts.

    Args:
        captured: what ``capture_step`` returned.
        model, loss_fn, batch, passes, options, measure_link, other_devices: as in ``trace``.
        on_op: told how many of the ops are measured, and of how many.
    """
    step = TrainingStep(model, loss_fn)
    static = real_static(captured, step, batch)
    warm_up_libraries(static[0].device)
    captured = profile(captured, static, passes=passes, on_op=on_op)
    prepare_for_tight_memory(captured.graph, static[0].device)
    if options:
        offered = with_traced(captured, options)
        captured = profile(offered, static, passes=passes) if len(offered.graph.ops) > len(captured.graph.ops) else offered
        captured = _compared(captured, step, batch)
    recorded: dict[str, object] = {}
    if measure_link:
        recorded[MEASURED_LINK] = link_beside(captured, static, captured.graph.time_s).recorded
    if other_devices:
        recorded[DEVICES_KEY] = recorded_devices(measured_devices(captured, static, other_devices, passes=passes))
    release_unused(static[0].device)
    graph = replace(captured.graph, provenance={**captured.graph.provenance, **recorded})
    return without_needless(replace(captured, graph=graph))


def _compared(captured: Capture, step: TrainingStep, batch: Batch) -> Capture:
    """Return `captured` with what is found out about its optional ops by executing the whole step, where that fits."""
    if not (needs_comparison(captured) or needs_measuring(captured)):
        return captured
    executed = RealStep.of(captured, step, batch)
    real = executed if needed_bytes(captured.graph) <= free_bytes(executed.device) else None
    captured = with_exactness(captured, real)
    return replace(captured, graph=measured_uses(captured, real))


def as_recorded(captured: Capture, provenance: Mapping[str, object], options: Sequence[str]) -> Capture:
    """Return `captured` as the step that a plan with this provenance was made for: nothing is executed.

    Args:
        captured: what ``capture_step`` returned.
        options: that the plan was made with.
    """
    captured = as_recorded_once(with_recorded_sizes(captured, provenance), provenance)
    prepare_for_tight_memory(captured.graph, torch.device(str(captured.graph.provenance["device"])))
    return offered_as(with_recorded_sizes(with_traced(captured, options), provenance), provenance)
