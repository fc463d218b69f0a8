"""In-place ops: elementwise kernels may overwrite an input."""

from planner.capture.options.option import StepOption, import_late
from planner.graphs.ir import Graph

IN_PLACE = StepOption(
    name="in-place",
    description="element-wise ops may write over an input that nothing reads later",
    offers="ops over an input",
    default=True,
    restored=Graph.out_of_place,
    apply=import_late("planner.capture.options.in_place.find", "find_in_place"),
)
