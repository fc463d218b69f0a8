"""Where a schedule writes outputs over inputs, for those that execute it; the judge finds that for itself."""

from collections.abc import Sequence
from itertools import islice, takewhile

from graphs.ir import Graph
from graphs.schedule import Compute, Free, Schedule, Step, boundary, live_after

Pairs = Sequence[tuple[int, int]]  # an output, and the input that it is written over


class Overwriting:
    """Follows the steps of a schedule."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._owner = {pool.name: pool.owner for pool in graph.pools}
        self._lent: set[int] = set()  # of what is there, what another stream than the memory's own has read

    def follow(self, steps: Sequence[Step], place: int) -> Pairs:
        """What the op of the step at `place` writes over. Each step must be followed, in order."""
        step = steps[place]
        if not isinstance(step, Compute):
            self._lent.discard(step.tensor)
            return ()
        op = self._graph.ops[step.op]
        self._lent.update(t for t in op.inputs if self._owner[self._graph.tensors[t].pool] != op.stream)
        if not op.overwrites:
            return ()
        behind = takewhile(lambda later: isinstance(later, Free), islice(steps, place + 1, None))
        freed = {later.tensor for later in behind if isinstance(later, Free)}
        return [(o, t) for o, t in op.overwrites if t in freed and t not in self._lent]


def kept_that_are_overwritten(graph: Graph, schedule: Schedule) -> set[int]:
    """Return the tensors in memory between the passes that the backward pass writes over, so that it cannot come again."""
    cut = boundary(graph, schedule)
    kept, overwriting, found = set(live_after(graph, schedule.steps[:cut])), Overwriting(graph), set[int]()
    for place, step in enumerate(schedule.steps):
        over = overwriting.follow(schedule.steps, place)
        if place >= cut:
            found.update(t for _, t in over if t in kept)
            if isinstance(step, Free):
                kept.discard(step.tensor)  # what is made again is another one
    return found
