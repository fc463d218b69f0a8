"""The forward pass as a chain of stages, for methods that are made for chains.

A graph that is no chain is cut in one of two ways, as published with Checkmate (Jain et al., MLSys 2020,
section 6): at *articulation* points, where all that the rest of the forward pass reads comes from the op before
the cut, or *linearised*, after every op, where a cut is crossed by all that was made before and is read after it.
What is kept, cannot be made again, or costs nothing to make does not count as crossing.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from graphs.ir import Graph, Phase
from graphs.schedule import Schedule, schedule_of
from solvers.baselines.common.recomputation import droppable, free_source, needed_for, read_later


class Cuts(StrEnum):
    """Where a graph may be cut."""

    ARTICULATION = "articulation"
    LINEARISED = "linearised"


@dataclass(frozen=True, slots=True)
class Forward:
    """Run stage `stage` again or for the first time; `saving`: for its backward, and not only for its output."""

    stage: int
    saving: bool


def crossings(graph: Graph) -> list[frozenset[int]]:
    """For each forward op what crosses a cut after it: made up to it, and read by forward ops after it."""
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    may_go = {t for t in droppable(graph) if not free_source(graph, graph.tensors[t].producers[0])}
    last = {t: op.id for op in forward for t in op.inputs if t in may_go}
    crossing: set[int] = set()
    after = []
    for op in forward:
        crossing.update(t for t in op.outputs if last.get(t, -1) > op.id)
        crossing.difference_update([t for t in op.inputs if last.get(t) == op.id])
        after.append(frozenset(crossing))
    return after


def cut_places(graph: Graph, cuts: Cuts) -> list[int]:
    """Forward ops after which `graph` may be cut, the last one included."""
    after = crossings(graph)
    if cuts is Cuts.LINEARISED:
        return list(range(len(after)))
    places = [i for i, crossing in enumerate(after) if crossing and crossing.issubset(graph.ops[i].outputs)]
    return [*places, *([len(after) - 1] if after else [])]


def evenly(places: Sequence[int], count: int) -> list[int]:
    """`count` of `places` (or all), evenly spaced, the last one included."""
    count = min(count, len(places))
    return [places[-(-(k + 1) * len(places) // count) - 1] for k in range(count)]


class Stages:
    """A graph's forward pass in stages, which end with the ops `ends`.

    Attributes:
        ops: forward ops of each stage.
        crossing: what crosses the cut after each stage; the last is empty.
        absent: what may be dropped and made again.
    """

    def __init__(self, graph: Graph, ends: Sequence[int]) -> None:
        self.graph = graph
        after = crossings(graph)
        self.ops = [range(begin, end + 1) for begin, end in zip([0, *(e + 1 for e in ends[:-1])], ends, strict=True)]
        self.crossing = [after[end] for end in ends]
        self.ends = ends
        self.absent = droppable(graph)

    def __len__(self) -> int:
        return len(self.ops)

    def stage_of(self, op_id: int) -> int:
        """The stage of forward op `op_id`."""
        return bisect_left(self.ends, op_id)

    @cached_property
    def groups(self) -> list[int | None]:
        """For ``recompute_groups``: the stage of each op; the last stage is not dropped, for its backward comes next."""
        forward = (op.phase is Phase.FORWARD for op in self.graph.ops)
        stages = [self.stage_of(i) if is_forward else None for i, is_forward in enumerate(forward)]
        return [None if stage == len(self) - 1 else stage for stage in stages]

    @cached_property
    def reach(self) -> dict[int, tuple[int, int]]:
        """For each tensor that may be dropped and is read after the forward pass: the stages beside whose backward it is there.

        From the stage that makes it to the last one that reads it (crossing into it).
        """
        reach = {}
        for t in read_later(self.graph) & self.absent:
            made = self.stage_of(self.graph.tensors[t].producers[0])
            readers = [r for r in self.graph.consumers[t] if self.graph.ops[r].phase is Phase.FORWARD]
            crossed = made < len(self) and t in self.crossing[made]
            reach[t] = (made, self.stage_of(readers[-1]) if crossed else made)
        return reach

    def advancing(self, stage: int) -> list[int]:
        """Ops of `stage` that make what crosses the cut after it."""
        return needed_for(self.graph, self.crossing[stage], self.ops[stage], self.absent)

    def schedule(self, plan: Iterable[Forward]) -> Schedule:
        """The schedule that runs stages as `plan` says, and the rest of the program in between.

        An op after the forward pass runs once each tensor it reads has been saved: made by a saved stage, or
        crossing into one. A stage runs as a whole the first time, and later as far as it is needed.

        Args:
            plan: each stage in order, and again as wanted; saves every stage.
        """
        graph = self.graph
        computed: list[int] = []
        saved, seen = [False] * len(self), [False] * len(self)
        steps = iter(plan)
        ready = 0

        def run(step: Forward) -> None:
            if not seen[step.stage]:
                computed.extend(self.ops[step.stage])
            elif step.saving:
                made = (t for i in self.ops[step.stage] for t in graph.ops[i].outputs)
                left = [t for t in made if t in self.reach and graph.consumers[t][-1] >= ready]
                computed.extend(needed_for(graph, left, self.ops[step.stage], self.absent))
            else:
                computed.extend(self.advancing(step.stage))
            seen[step.stage] = True
            saved[step.stage] |= step.saving

        for op in graph.ops:
            if op.phase is Phase.FORWARD:
                continue
            ready = op.id
            for first, last in (self.reach[t] for t in op.inputs if t in self.reach):
                while not any(saved[first : last + 1]):
                    run(next(steps))
            while not all(seen):
                run(next(steps))
            computed.append(op.id)
        for step in steps:
            if not seen[step.stage]:
                run(step)
        return schedule_of(graph, computed)
