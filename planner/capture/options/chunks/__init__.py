"""Chunks: long rows are computed in parts, so that only a part is in memory."""

from typing import TYPE_CHECKING

from planner.capture.options.option import EAGER_KERNELS, StepOption

if TYPE_CHECKING:
    from planner.capture.lowering.lower import Capture


def _apply(capture: "Capture") -> "Capture":
    from planner.capture.options.chunks.find import chunked

    return chunked(capture)


CHUNKS = StepOption(
    name="chunks",
    description="loss heads and other large row-wise parts of a step may be computed in 2 to 16 chunks",
    refused=EAGER_KERNELS,
    apply=_apply,
)
