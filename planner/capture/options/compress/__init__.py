"""Lossy compression of saved tensors: they are stored in few bits, and restored for the backward pass."""

from typing import TYPE_CHECKING

from graphs.ir import Graph
from graphs.options.compress import COMPRESS as NAME
from graphs.options.compress import LEAST_BITS, MOST_BITS, REFERENCE_BITS, within
from graphs.options.option import Argument, Feature
from planner.capture.options.option import EAGER_KERNELS, StepOption

if TYPE_CHECKING:
    from planner.capture.lowering.lower import Capture
    from planner.capture.replay import RealStep


def _apply(capture: "Capture") -> "Capture":
    from planner.capture.options.compress.find import compressed

    return compressed(capture)


def _measure(capture: "Capture", real: "RealStep | None") -> Graph:
    from planner.capture.options.compress.sensitivity import measured_variances, modelled_variances

    return modelled_variances(capture) if real is None else measured_variances(capture, real)


COMPRESS = StepOption(
    name=NAME,
    description="saved tensors may be stored in 1 to 8 bits, within the gradient error of 4 bits for all: compress:4",
    refused={
        **EAGER_KERNELS,
        Feature.TORCH_COMPILE: "the gradient error of one graph of a step cannot be measured; leave it out, or use "
        "planner.compile",
        Feature.VARYING_SIZES: "the gradient error is measured at one size; leave one of them out",
    },
    argument=Argument(LEAST_BITS, MOST_BITS, REFERENCE_BITS, "bits", "which limits the gradient error", within),
    apply=_apply,
    measure=_measure,
)
