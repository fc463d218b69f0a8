"""Lossless packing: gradients of activations read one bit per element, or the result, in place of the input. All exact."""

from planner.capture.options.option import EAGER_KERNELS, StepOption, import_late

PACK = StepOption(
    name="pack",
    description="inputs of activations may be stored as bits, or left out if the result is saved anyway, exactly",
    refused=EAGER_KERNELS,
    apply=import_late("planner.capture.options.pack.find", "find_packed"),
)
