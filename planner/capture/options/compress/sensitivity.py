"""Sensitivity of the gradients to compression of the tensors that the backward pass reads, measured on real tensors.

As in GACT (Liu et al., ICML 2022, section 4): rounding errors are unbiased and independent, so the squared errors of the
gradients add up, and that of one tensor is found by rounding it alone. GACT does so in one form, and assumes that the error is
proportional to the square of the rounding; that of a ReLU's gradient, which is zero or not, is not. So each form is tried here.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from planner.capture.frontend.random_states import list_gpus, preserve_random_states
from planner.capture.lowering.lower import Capture
from planner.capture.options.compress.find import Kept, list_kept_tensors
from planner.capture.program.builder import Pass, PassBuilder
from planner.capture.program.program import Ref
from planner.capture.program.writer import PassWriter
from planner.capture.replay import RealStep
from planner.graphs.ir import Graph, Phase
from planner.graphs.options.compress import model_variance, set_variances
from planner.graphs.schedule import Compute, schedule_of


def model_variances(capture: Capture) -> Graph:
    """Return the graph of `capture` with modelled variances; nothing is run.

    Each tensor changes its part of the gradients as much as itself. Numbers are taken as normal, and the parts as equal.
    """
    found = list_kept_tensors(capture)
    modelled = {op: model_variance(form) / len(found) for kept in found for form, (_, op) in kept.ops.items()}
    return set_variances(capture.graph, modelled, "modelled") if found else capture.graph


def measure_variances(capture: Capture, real: RealStep | None) -> Graph:
    """Return the graph of `capture`, whose step is `real`, with measured variances; with modelled ones if that is None.

    Runs the forward pass once, and the backward pass once more for each rounding, with all its inputs kept. Parameters, buffers
    and random state are restored. If the gradients are all zero or not finite, the variances are modelled.
    """
    if real is None:
        return model_variances(capture)
    if not (found := list_kept_tensors(capture)):
        return capture.graph
    with real.preserve_state():
        passes = _PerturbedStep(real, found)
        exact = passes.compute_gradients({})
        norm = _sum_squares(exact)
        if not (0 < norm < math.inf):
            return model_variances(capture)
        measured: dict[int, float] = {}
        for kept in found:
            for form, (_, restore) in kept.ops.items():
                measured[restore] = passes.measure_squared_error(kept, form, exact) / norm
    if not all(map(math.isfinite, measured.values())):
        return model_variances(capture)
    return set_variances(capture.graph, measured, "measured")


class _PerturbedStep:
    """The step after its forward pass, with a backward pass that runs with some tensors replaced."""

    def __init__(self, real: RealStep, found: Sequence[Kept]) -> None:
        self._capture, self._static, self._device = real.capture, real.static, real.device
        forward, self._backward, alive = _compile_passes(real.capture, {kept.tensor for kept in found})
        self._alive: dict[int, Any] = dict(zip(alive, forward.run(self._static), strict=True))

    def compute_gradients(self, replaced: dict[int, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the gradients of the parameters, with some tensors replaced in the backward pass."""
        alive = list((self._alive | replaced).values())
        with preserve_random_states(list_gpus(self._device)):
            gradients: tuple[torch.Tensor, ...] = self._backward.run(self._static, alive)
            return gradients

    def measure_squared_error(self, kept: Kept, form: str, exact: Sequence[torch.Tensor]) -> float:
        """Return the squared error of the gradients if the tensor is kept in this form."""
        keep, restore = (self._capture.program.calls[op].composed for op in kept.ops[form])
        assert keep is not None and restore is not None
        (restored,) = restore(*keep(self._alive[kept.tensor]))
        return _sum_squares(
            a.to(torch.float32) - b for a, b in zip(self.compute_gradients({kept.tensor: restored}), exact, strict=True)
        )


def _sum_squares(tensors: Iterable[torch.Tensor]) -> float:
    return math.fsum(torch.linalg.vector_norm(t.detach(), dtype=torch.float64).item() ** 2 for t in tensors)


def _compile_passes(capture: Capture, needed: set[int]) -> tuple[Pass, Pass, tuple[int, ...]]:
    """Compile both passes of the program with everything kept; the tensors between them are passed on in a list.

    Returns:
        The passes, and the ids of the tensors between them.
    """
    graph, program = capture.graph, capture.program
    steps = schedule_of(graph, [op.id for op in graph.program]).steps
    last = max(op.id for op in graph.program if op.phase is Phase.FORWARD)
    cut = steps.index(Compute(last)) + 1
    writer, static = PassWriter(graph, program), [source.tensor for source in program.sources]
    first, second = PassBuilder(program), PassBuilder(program)
    for builder in (first, second):
        builder.add_tensor_list("static", static)
    writer.write(first, steps[:cut])
    alive = tuple(writer.live)
    assert needed.issubset(alive)  # the backward pass reads it
    second.add_tensor_list("alive", alive)
    writer.write(second, steps[cut:])
    title = f"sensitivity of {graph.fingerprint}"
    forward = first.finish(list(map(Ref, alive)), title)
    backward = second.finish(tuple(gradient for _, gradient in program.gradients), title)
    return forward, backward, alive
