"""Pass ends: ops that read the kept tensors at the end of a pass, in graphs where other devices may produce these.

Solvers assume that an op of the program produces each kept tensor, or an op that replaces it. On another device, the replacement
produces a copy, which may be transferred to the main device at any later time, up to the end of the pass, when the caller
receives it. So one more op of the program at the end of each pass reads these tensors; it takes no time and no memory.
"""

from planner.graphs.clocks import find_results_elsewhere
from planner.graphs.ir import Graph, Op, Phase
from planner.graphs.options.placement import is_placed
from planner.graphs.reordering import Reordering, keep_program_order, permute

END = "end"  # target of these ops


def add_pass_ends(graph: Graph) -> Reordering:
    """Return `graph` with pass ends; the graph itself if no kept tensor may be a copy, or it already has them.

    A schedule of it maps back to one with the same memory, and the same time by its own clocks. These wait for results of the
    forward pass as soon as it has ended: a recomputation before the pass end may wait longer.
    """
    early, late = find_results_elsewhere(graph)
    if not (early or late) or find_requested_outputs(graph):
        return keep_program_order(graph)
    optional = range(len(graph.program), len(graph.ops))
    forward = [op.id for op in graph.program if op.phase is Phase.FORWARD]
    rest = range(len(forward), len(graph.program))
    ends = _end(early, "forward pass", Phase.FORWARD), _end(late, "step", graph.program[-1].phase)
    return permute(graph, [*forward, *ends[0], *rest, *ends[1], *optional])


def find_requested_outputs(graph: Graph) -> dict[int, int]:
    """Return by tensor the pass end that reads it; empty without pass ends, or if other devices were removed."""
    return {t: op.id for op in graph.program if op.target == END for t in op.inputs} if is_placed(graph) else {}


def _end(tensors: tuple[int, ...], what: str, phase: Phase) -> list[Op]:
    """Return the pass end that reads `tensors`; an empty list if there are none."""
    return [Op(0, f"{END} of the {what}", END, tensors, (), 0.0, phase=phase, recomputable=False)] if tensors else []
