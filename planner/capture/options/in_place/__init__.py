"""In-place ops: elementwise kernels may overwrite an input."""

from typing import TYPE_CHECKING

from graphs.ir import Graph
from planner.capture.options.option import StepOption

if TYPE_CHECKING:
    from planner.capture.lowering.lower import Capture


def _apply(capture: "Capture") -> "Capture":
    from planner.capture.options.in_place.find import in_place

    return in_place(capture)


IN_PLACE = StepOption(
    name="in-place",
    description="element-wise ops may write over an input that nothing reads later",
    offers="ops over an input",
    default=True,
    restored=Graph.out_of_place,
    apply=_apply,
)
