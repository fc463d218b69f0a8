"""The inputs that a schedule overwrites with outputs, for execution; the simulation derives them independently."""

from collections.abc import Sequence
from itertools import islice, takewhile

from planner.graphs.ir import Graph
from planner.graphs.schedule import Compute, Free, Schedule, Step, find_boundary, live_after

Pairs = Sequence[tuple[int, int]]  # pairs of an output and the input that it overwrites


class Overwriting:
    """The overwritten inputs of a schedule, step by step."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._owner = {pool.name: pool.owner for pool in graph.pools}
        self._lent: set[int] = set()  # live tensors that another stream than that of their pool has read

    def follow(self, steps: Sequence[Step], place: int) -> Pairs:
        """Return the outputs of the step at `place` and the inputs that they overwrite; must be called for each step in order."""
        step = steps[place]
        if not isinstance(step, Compute):
            self._lent.discard(step.tensor)
            return ()
        op = self._graph.ops[step.op]
        self._lent.update(t for t in op.inputs if self._owner[self._graph.tensors[t].pool] != op.stream)
        if not op.overwrites:
            return ()
        frees = takewhile(lambda later: isinstance(later, Free), islice(steps, place + 1, None))
        freed = {later.tensor for later in frees if isinstance(later, Free)}
        return [(o, t) for o, t in op.overwrites if t in freed and t not in self._lent]


def find_overwritten_saved(graph: Graph, schedule: Schedule) -> set[int]:
    """Return the saved tensors that the backward pass overwrites, so that it cannot run twice."""
    cut = find_boundary(graph, schedule)
    saved, overwriting, found = set(live_after(graph, schedule.steps[:cut])), Overwriting(graph), set[int]()
    for place, step in enumerate(schedule.steps):
        pairs = overwriting.follow(schedule.steps, place)
        if place >= cut:
            found.update(t for _, t in pairs if t in saved)
            if isinstance(step, Free):
                saved.discard(step.tensor)  # a recomputed one is another
    return found
