"""Lossless packing of saved tensors: fewer bytes, or a smaller substitute. Every bit is exact."""

from typing import TYPE_CHECKING

from planner.capture.options.option import EAGER_KERNELS, StepOption

if TYPE_CHECKING:
    from planner.capture.lowering.lower import Capture


def _apply(capture: "Capture") -> "Capture":
    from planner.capture.options.pack.find import packed

    return packed(capture)


PACK = StepOption(
    name="pack",
    description="masks, indices and inputs of activations may be stored in bits and bytes, exactly",
    refused=EAGER_KERNELS,
    apply=_apply,
)
