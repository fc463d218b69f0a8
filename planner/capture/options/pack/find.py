"""Lossless packing of saved tensors: fewer bytes, or a smaller substitute. Every bit is exact.

Each kind of packing finds its calls in a step, and adds ops. Most come in pairs: one from a tensor to a packed one, and one back,
as another producer of the tensor, or from the packed tensor to a reader's result, as an alternative for the reader. The packed
tensor has just the information that its readers need.
"""

from collections.abc import Callable

from planner.capture.lowering.lower import Capture
from planner.capture.options.pack import comparisons, masks, pooling, ranges, redrawn_masks, results, shapes
from planner.capture.options.pack.finder import PackFinder
from planner.torch_private.core import disable_current_modes

KINDS: tuple[Callable[[PackFinder], None], ...] = (
    masks.offer,
    redrawn_masks.offer,
    ranges.offer,
    comparisons.offer,
    results.offer,
    shapes.offer,
    pooling.offer,
)


def find_packed(capture: Capture) -> Capture:
    """Return `capture` with ops that pack large tensors read in the backward pass; their times are not measured."""
    finder = PackFinder(capture, spared={*comparisons.COMPARISONS, *results.ACTIVATIONS, *shapes.WRITING})
    with disable_current_modes():  # added ops get fake values as in the capture
        for offer in KINDS:
            offer(finder)
    return finder.additions.build_capture()
