"""From a model to a graph: a training step traced, its ops measured or modelled."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict

from torch import nn

from graphs.capture.lower import Capture
from graphs.capture.signature import Batch, as_leaves
from graphs.capture.step import LossFn, TrainingStep
from graphs.capture.trace import capture, capture_kernels
from graphs.cost.devices import get_device
from graphs.cost.link import MEASURED_LINK
from graphs.cost.others import DEVICES_KEY, recorded_devices
from graphs.cost.profile import profile
from graphs.cost.replay import RealStep, with_real_sizes
from graphs.cost.roofline import model_times
from graphs.errors import TraceError
from graphs.ir import Graph
from graphs.options import check_traced
from graphs.options.traced import with_traced, without_needless
from planner.runtime.device_profile import other_devices as measured_devices
from planner.runtime.link import link_beside

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
