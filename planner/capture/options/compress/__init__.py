"""Lossy compression of saved tensors: they are stored in few bits, and restored for the backward pass."""

from planner.capture.options.option import EAGER_KERNELS, StepOption, import_late
from planner.graphs.options.compress import COMPRESS as NAME, LEAST_BITS, MOST_BITS, REFERENCE_BITS, limit_variance
from planner.graphs.options.option import Argument, Feature

COMPRESS = StepOption(
    name=NAME,
    description="saved tensors may be stored in 1 to 8 bits, within the gradient error of 4 bits for all: compress:4",
    refused={
        **EAGER_KERNELS,
        Feature.TORCH_COMPILE: "the gradient error of one graph of a step cannot be measured; leave it out, or use "
        "planner.compile",
        Feature.VARYING_SIZES: "the gradient error is measured at one size; leave one of them out",
    },
    argument=Argument(LEAST_BITS, MOST_BITS, REFERENCE_BITS, "bits", "which limits the gradient error", limit_variance),
    apply=import_late("planner.capture.options.compress.find", "find_compressed"),
    measure=import_late("planner.capture.options.compress.sensitivity", "measure_variances"),
)
