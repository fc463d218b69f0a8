"""Lossless packing of saved tensors: fewer bytes, or a smaller substitute. Every bit is exact."""

from planner.capture.options.option import EAGER_KERNELS, StepOption, import_late

PACK = StepOption(
    name="pack",
    description="masks, indices and inputs of activations may be stored in bits and bytes, exactly",
    refused=EAGER_KERNELS,
    apply=import_late("planner.capture.options.pack.find", "find_packed"),
)
