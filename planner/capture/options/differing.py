"""Descriptions of the results of a step that change if some of its tensors are rounded differently."""

from collections.abc import Iterable

from graphs.ir import Graph
from planner.passes.program import Argument, Program, read_by

_NAMED = 3  # more are only counted


def differing(graph: Graph, program: Program, tensors: Iterable[int]) -> str:
    """Return ``Op.differs`` of an op that rounds `tensors` differently: these, and the results of the step computed from them."""
    first = sorted(tensors)
    if not first:
        return ""
    reached = set(first)
    for op in graph.program:
        if not reached.isdisjoint(op.inputs):
            reached.update(op.outputs)

    def changed(value: Argument) -> bool:
        return not reached.isdisjoint(read_by(value))

    results = ["the loss"] if changed(program.loss) else []
    results += ["what else is returned"] if any(map(changed, program.extras)) else []
    gradients = [graph.tensors[t].name.removeprefix("model.") for t, made in program.gradients if changed(made)]
    if len(gradients) > _NAMED:
        results.append(f"{len(gradients)} of {len(program.gradients)} gradients")
    else:
        results += [f"the gradient of {name}" for name in gradients]
    rounded = ", ".join(graph.tensors[t].name for t in first)
    return f"rounding: {rounded} ({', '.join(results) or 'no result'})"
