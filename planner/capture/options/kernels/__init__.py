"""Kernels: ops of the program may be computed by other kernels, with other time and memory."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from planner.capture.options.option import EAGER_KERNELS, StepOption

if TYPE_CHECKING:
    from planner.capture.lowering.lower import Capture


def _apply(capture: "Capture") -> "Capture":
    from planner.capture.options.kernels.find import with_kernels

    return with_kernels(capture)


def _useless_ops(capture: "Capture") -> Collection[int]:
    from planner.capture.options.kernels.worth import useless_ops

    return useless_ops(capture)


KERNELS = StepOption(
    name="kernels",
    description="convolutions, attention and losses may use other kernels, with other workspaces",
    refused=EAGER_KERNELS,
    apply=_apply,
    useless_ops=_useless_ops,
)
