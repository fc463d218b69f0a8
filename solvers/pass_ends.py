"""Pass ends: ops that read the kept tensors at the end of a pass, in graphs where other devices may produce these.

Solvers assume that an op of the program produces each kept tensor, or an op that replaces it. On another device, the replacement
produces a copy, which may be transferred to the main device at any later time, up to the end of the pass, when the caller
receives it. So one more op of the program at the end of each pass reads these tensors; it takes no time and no memory.
"""

from dataclasses import dataclass, replace

from graphs.clocks import find_results_elsewhere
from graphs.ir import Graph, Op, Phase
from graphs.options.placement import is_placed
from graphs.schedule import Compute, Schedule

END = "end"  # target of these ops


@dataclass(frozen=True, slots=True)
class GraphWithPassEnds:
    """A graph, and the same graph with pass ends.

    Attributes:
        graph: the graph with them; the source if no kept tensor may be a copy, or it already has them.
        original: for each op of `graph` its id in `source`, None for pass ends.
    """

    source: Graph
    graph: Graph
    original: tuple[int | None, ...]

    def map_back(self, schedule: Schedule) -> Schedule:
        """Return a schedule of `graph` as a schedule of `source`, with the same memory, and the same time by its own clocks.

        These wait for results of the forward pass as soon as it has ended: a recomputation before the pass end may wait longer.
        """
        if self.graph is self.source:
            return schedule
        steps = (
            Compute(original) if isinstance(step, Compute) and (original := self.original[step.op]) is not None else step
            for step in schedule.steps
            if not (isinstance(step, Compute) and self.original[step.op] is None)
        )
        return Schedule(tuple(steps))


def add_pass_ends(graph: Graph) -> GraphWithPassEnds:
    """Return `graph` with pass ends."""
    early, late = find_results_elsewhere(graph)
    forward = [op for op in graph.program if op.phase is Phase.FORWARD]
    if not (early or late) or find_requested_outputs(graph):
        return GraphWithPassEnds(graph, graph, ())
    rest = graph.ops[len(forward) : len(graph.program)]
    ops = [*forward, *_end(early, "forward pass", forward), *rest, *_end(late, "step", rest), *graph.ops[len(graph.program) :]]
    place = {op.id: i for i, op in enumerate(ops) if op.target != END}
    numbered = tuple(replace(op, id=i, replaces=tuple(place[p] for p in op.replaces)) for i, op in enumerate(ops))
    tensors = tuple(replace(t, producers=tuple(place[p] for p in t.producers)) for t in graph.tensors)
    return GraphWithPassEnds(
        graph, replace(graph, ops=numbered, tensors=tensors), tuple(None if op.target == END else op.id for op in ops)
    )


def find_requested_outputs(graph: Graph) -> dict[int, int]:
    """Return by tensor the pass end that reads it; empty without pass ends, or if other devices were removed."""
    return {t: op.id for op in graph.program if op.target == END for t in op.inputs} if is_placed(graph) else {}


def _end(tensors: tuple[int, ...], what: str, ops: list[Op] | tuple[Op, ...]) -> list[Op]:
    """Return the pass end that reads `tensors` after `ops`; an empty list if there are no tensors."""
    return [Op(0, f"{END} of the {what}", END, tensors, (), 0.0, phase=ops[-1].phase, recomputable=False)] if tensors else []
