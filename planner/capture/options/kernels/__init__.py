"""Kernels: ops of the program may be computed by other kernels, with other time and memory."""

from planner.capture.options.option import EAGER_KERNELS, StepOption, imported_late

KERNELS = StepOption(
    name="kernels",
    description="convolutions, attention and losses may use other kernels, with other workspaces",
    refused=EAGER_KERNELS,
    apply=imported_late("planner.capture.options.kernels.find", "with_kernels"),
    useless_ops=imported_late("planner.capture.options.kernels.worth", "useless_ops"),
)
