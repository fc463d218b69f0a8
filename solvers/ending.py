"""A graph with an op at its end that reads what is kept, where that may be made elsewhere and copied.

Solvers know of kept tensors that an op of the program makes them, and that what is executed in its place does too. On another
device a stand-in makes a copy of one, which may go to the main device at any time later. So that it does is what one more op of
the program asks for, which takes no time and no memory, and runs last.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from graphs.ir import Graph, Op
from graphs.options.placement import is_placed
from graphs.pools import COMPUTE
from graphs.schedule import Compute, Schedule

END = "end"  # its target


@dataclass(frozen=True, slots=True)
class Ended:
    """A graph, and the same with such an op: behind it, optional ops have the next number.

    Attributes:
        source: without it.
        graph: with it; the source where nothing that is kept is copied.
    """

    source: Graph
    graph: Graph

    def schedule_of_source(self, schedule: Schedule) -> Schedule:
        """`schedule`, which is one of `graph`, as one of `source`: it takes the same time and the same memory."""
        if self.graph is self.source:
            return schedule
        end = len(self.source.program)
        return Schedule(
            tuple(
                Compute(step.op - (step.op > end)) if isinstance(step, Compute) else step
                for step in schedule.steps
                if step != Compute(end)
            )
        )


def ended(graph: Graph) -> Ended:
    """`graph` and what it is with such an op."""
    elsewhere = {t for op in graph.ops if op.stream != COMPUTE for p in op.stands_for for t in graph.ops[p].outputs}
    copied = tuple(sorted(graph.kept & elsewhere))
    if not copied:
        return Ended(graph, graph)
    end = len(graph.program)

    def moved(ops: Iterable[int]) -> tuple[int, ...]:
        return tuple(op + (op >= end) for op in ops)

    last = Op(end, f"{END} of the step", END, copied, (), 0.0, phase=graph.program[-1].phase, recomputable=False)
    optional = (replace(op, id=op.id + 1) for op in graph.ops[end:])
    tensors = tuple(replace(t, producers=moved(t.producers)) for t in graph.tensors)
    return Ended(graph, replace(graph, ops=(*graph.program, last, *optional), tensors=tensors))


def end_inputs(graph: Graph) -> tuple[int, ...]:
    """What an op at the end of `graph` asks for; nothing where there is none, or other devices were left out since."""
    last = graph.program[-1]
    return last.inputs if last.target == END and is_placed(graph) else ()
