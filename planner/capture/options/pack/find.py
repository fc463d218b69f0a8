"""Packed keeping: what the backward pass reads, in fewer bytes, or something smaller in place of it. Every bit is exact.

Each kind of packing looks for what it knows among the calls of a step, and adds ops. Most come in pairs: from a tensor to a
packed one, and back, as another maker of it, or from the packed one to what a reader computes, as an op that stands for that.
What stays of a tensor between the two is what it tells its readers.
"""

from collections.abc import Callable

from planner.capture.lowering.lower import Capture
from planner.capture.options.pack import comparisons, masks, pooling, ranges, redrawn, results, shapes
from planner.capture.options.pack.finder import Finder
from planner.torch_private.core import disable_current_modes

KINDS: tuple[Callable[[Finder], None], ...] = (
    masks.offer,
    redrawn.offer,
    ranges.offer,
    comparisons.offer,
    results.offer,
    shapes.offer,
    pooling.offer,
)


def packed(capture: Capture) -> Capture:
    """`capture` with ops that pack what is large and read in the backward pass; their times are not measured."""
    finder = Finder(capture, spared={*comparisons.COMPARISONS, *results.ACTIVATIONS, *shapes.WRITING})
    with disable_current_modes():  # what is added is fake in the way of what was captured
        for offer in KINDS:
            offer(finder)
    return finder.captured()
