"""Kernels: ops of the program may be computed by other kernels, with other time and memory."""

from planner.capture.options.option import EAGER_KERNELS, StepOption, import_late

KERNELS = StepOption(
    name="kernels",
    description="convolutions, attention and losses may use other kernels, with other workspaces",
    refused=EAGER_KERNELS,
    apply=import_late("planner.capture.options.kernels.find", "find_kernels"),
    useless_ops=import_late("planner.capture.options.kernels.worth", "find_useless_ops"),
)
