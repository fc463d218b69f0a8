"""Chunks: long rows are computed in parts, so that only a part is in memory."""

from planner.capture.options.option import EAGER_KERNELS, StepOption, import_late

CHUNKS = StepOption(
    name="chunks",
    description="loss heads and other large row-wise parts of a step may be computed in 2 to 16 chunks",
    refused=EAGER_KERNELS,
    apply=import_late("planner.capture.options.chunks.find", "find_chunks"),
)
