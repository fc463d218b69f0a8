"""Descriptions of the results of a step that change if some of its tensors are rounded differently."""

from collections.abc import Sequence
from itertools import compress

from planner.capture.lowering.lower import Capture
from planner.capture.program.program import read_by

_NAMED = 3  # more are only counted


def describe_differing(capture: Capture, outputs: Sequence[int], rounded: Sequence[bool]) -> str:
    """Return ``Op.differs`` of an op: which of its `outputs` are `rounded` differently, and the results computed from these."""
    graph, program = capture.graph, capture.program
    first = sorted(compress(outputs, rounded))
    if not first:
        return ""
    reached = set(first)
    for op in graph.program:
        if not reached.isdisjoint(op.inputs):
            reached.update(op.outputs)
    results = ["the loss"] if reached & {*read_by(program.loss)} else []
    results += ["what else is returned"] if any(reached & {*read_by(value)} for value in program.extras) else []
    gradients = [graph.tensors[t].name.removeprefix("model.") for t, made in program.gradients if reached & {*read_by(made)}]
    if len(gradients) > _NAMED:
        results.append(f"{len(gradients)} of {len(program.gradients)} gradients")
    else:
        results += [f"the gradient of {name}" for name in gradients]
    names = ", ".join(graph.tensors[t].name for t in first)
    return f"rounding: {names} ({', '.join(results) or 'no result'})"
