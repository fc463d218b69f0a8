"""Lossless packing: gradients of activations read one bit per element, or the result, in place of the input. Every bit is exact.

Each kind finds its gradients in a step, and adds ops: a pair, to bits of the input and from these bits to the gradient
(``comparisons``), or one, from the activation's result (``results``).

Masks as bits, positions of max-pooling as bytes, narrow indices, gradients of pooling from a shape, and dropout masks that are
drawn again were kinds too. No schedule of the zoo was faster by 0.1% with one of them (results/options/ablation.md), nor of MLP,
VGG-16 and ResNet-18 when solved to the optimum.
"""

from planner.capture.lowering.lower import Capture
from planner.capture.options.pack import comparisons, results
from planner.capture.options.pack.finder import PackFinder
from planner.torch_private.core import disable_current_modes


def find_packed(capture: Capture) -> Capture:
    """Return `capture` with ops that pack large inputs of activations; their times are not measured."""
    finder = PackFinder(capture, {*comparisons.COMPARISONS, *results.ACTIVATIONS})
    with disable_current_modes():  # added ops get fake values as in the capture
        comparisons.offer(finder)
        results.offer(finder)
    return finder.additions.build_capture()
