"""The forward pass as a chain of stages, for methods for chains.

A graph that is not a chain is cut in one of two ways, as published with Checkmate (Jain et al., MLSys 2020, section 6): at
*articulation* points, where all tensors that the rest of the forward pass reads come from the op before the cut, or *linearised*,
after every op, where all tensors produced before and read after a cut cross it. Tensors that are kept, cannot be recomputed, or
cost nothing to recompute do not count as crossing.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from planner.graphs.ir import Graph, Phase
from planner.graphs.schedule import Schedule, schedule_of
from planner.solvers.baselines.common.recomputation import find_droppable, find_needed, free_source, read_later


class Cuts(StrEnum):
    """The places at which a graph may be cut."""

    ARTICULATION = "articulation"
    LINEARISED = "linearised"


@dataclass(frozen=True, slots=True)
class StageRun:
    """An execution of stage `stage`; `saving` if its backward pass follows, otherwise for its output only."""

    stage: int
    saving: bool


def find_crossings(graph: Graph) -> list[frozenset[int]]:
    """Return for each forward op the tensors that cross a cut after it: produced up to it, and read by later forward ops."""
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    may_go = {t for t in find_droppable(graph) if not free_source(graph, graph.tensors[t].producers[0])}
    last = {t: op.id for op in forward for t in op.inputs if t in may_go}
    crossing: set[int] = set()
    after = []
    for op in forward:
        crossing.update(t for t in op.outputs if last.get(t, -1) > op.id)
        crossing.difference_update([t for t in op.inputs if last.get(t) == op.id])
        after.append(frozenset(crossing))
    return after


def cut_places(graph: Graph, cuts: Cuts) -> list[int]:
    """Return the forward ops after which `graph` may be cut, including the last one."""
    after = find_crossings(graph)
    if cuts is Cuts.LINEARISED:
        return list(range(len(after)))
    places = [i for i, crossing in enumerate(after) if crossing and crossing.issubset(graph.ops[i].outputs)]
    return [*places, *([len(after) - 1] if after else [])]


def select_evenly(places: Sequence[int], count: int) -> list[int]:
    """Return `count` of `places` (or all), evenly spaced, including the last one."""
    count = min(count, len(places))
    return [places[-(-(k + 1) * len(places) // count) - 1] for k in range(count)]


class ForwardStages:
    """A graph's forward pass in stages, which end with the ops `ends`.

    Attributes:
        crossing: tensors that cross the cut after each stage; the last is empty.
        absent: tensors that may be freed and recomputed.
    """

    def __init__(self, graph: Graph, ends: Sequence[int]) -> None:
        self.graph = graph
        after = find_crossings(graph)
        self.ops = [range(begin, end + 1) for begin, end in zip([0, *(e + 1 for e in ends[:-1])], ends, strict=True)]
        self.crossing = [after[end] for end in ends]
        self.ends = ends
        self.absent = find_droppable(graph)

    def __len__(self) -> int:
        return len(self.ops)

    def find_stage(self, op_id: int) -> int:
        """Return the stage of forward op `op_id`."""
        return bisect_left(self.ends, op_id)

    @cached_property
    def groups(self) -> list[int | None]:
        """The stage of each op for ``recompute_groups``; None for the last stage, whose backward pass comes next."""
        forward = (op.phase is Phase.FORWARD for op in self.graph.ops)
        stages = [self.find_stage(i) if is_forward else None for i, is_forward in enumerate(forward)]
        return [None if stage == len(self) - 1 else stage for stage in stages]

    @cached_property
    def reach(self) -> dict[int, tuple[int, int]]:
        """For each recomputable tensor read after the forward pass, the stages whose backward pass has it in memory.

        These are the stage that produces it and the last one that reads it (crossing into it).
        """
        reach = {}
        for t in read_later(self.graph) & self.absent:
            made = self.find_stage(self.graph.tensors[t].producers[0])
            readers = [r for r in self.graph.consumers[t] if self.graph.ops[r].phase is Phase.FORWARD]
            crossed = made < len(self) and t in self.crossing[made]
            reach[t] = (made, self.find_stage(readers[-1]) if crossed else made)
        return reach

    def schedule(self, plan: Iterable[StageRun]) -> Schedule:
        """Return the schedule that runs stages as in `plan`, and the rest of the program in between.

        An op after the forward pass runs once each tensor that it reads has been saved: produced by a saved stage, or crossing
        into one. A stage runs as a whole the first time, and later as far as it is needed.

        Args:
            plan: each stage in order, then recomputations; saves every stage.
        """
        computed: list[int] = []
        saved, seen = [False] * len(self), [False] * len(self)
        steps = iter(plan)
        for op in self.graph.ops:
            if op.phase is Phase.FORWARD:
                continue
            reach = [slice(first, last + 1) for first, last in (self.reach[t] for t in op.inputs if t in self.reach)]
            while not (all(seen) and all(any(saved[stages]) for stages in reach)):
                step = next(steps)
                computed += self._list_run(step, op.id, again=seen[step.stage])
                seen[step.stage] = True
                saved[step.stage] |= step.saving
            computed.append(op.id)
        for step in steps:
            if not seen[step.stage]:
                seen[step.stage] = True
                computed += self.ops[step.stage]
        return schedule_of(self.graph, computed)

    def _list_run(self, step: StageRun, ready: int, *, again: bool) -> Sequence[int]:
        """Return the ops that a run of a stage executes; those before op `ready` have run, and read what they needed."""
        ops = self.ops[step.stage]
        if not again:
            return ops
        wanted: Iterable[int] = self.crossing[step.stage]
        if step.saving:
            made = (t for i in ops for t in self.graph.ops[i].outputs)
            wanted = [t for t in made if t in self.reach and self.graph.consumers[t][-1] >= ready]
        return find_needed(self.graph, wanted, ops, self.absent)
