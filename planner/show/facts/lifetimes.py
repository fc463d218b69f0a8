"""Device memory over the step: moments, and the lives of tensors."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.graphs.ir import Op, Tensor
from planner.graphs.overwriting import Overwriting, Pairs
from planner.graphs.pools import DEVICE
from planner.graphs.schedule import Free
from planner.show.facts.columns import MemoryInterval, iterate_stretches_by_step
from planner.show.facts.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Life:
    """A tensor in memory, from an execution that makes it until it is freed.

    Attributes:
        producer: the op whose execution produced it.
        born, dies: the first moment with it, and the first without it.
        last_reader: the op that reads it last in this life; None if none does.
    """

    tensor: Tensor
    producer: Op
    born: int
    dies: int
    last_reader: Op | None


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """The moments of a step in order, and the lives in order of birth.

    A moment holds static memory, lives, and the workspace of its op.

    Attributes:
        at_step: for each step of the schedule, its moment, or the next one if it has none.
    """

    moments: tuple[MemoryInterval, ...]
    lives: tuple[Life, ...]
    at_step: tuple[int, ...]


def compute_lifetimes(timeline: Timeline) -> Lifetimes:
    """Return the moments and lives of `timeline`."""
    found = tuple(iterate_stretches_by_step(timeline, timeline.graph.pools[0]))
    places = [(step, moment.op is not None) for step, moment in found]  # the wait before a step comes first
    at_step = tuple(bisect_left(places, (step, True)) for step in range(len(timeline.plan.schedule.steps) + 1))
    lives = sorted(_Following(timeline, at_step).follow(), key=lambda life: (life.born, life.tensor.id))
    return Lifetimes(tuple(moment for _, moment in found), tuple(lives), at_step[:-1])


class _Following:
    """A schedule that is followed step by step; `at_step` has the moment of each, and of the end."""

    def __init__(self, timeline: Timeline, at_step: Sequence[int]) -> None:
        self.graph, self.steps, self.at_step = timeline.graph, timeline.plan.schedule.steps, at_step
        self.lives: list[Life] = []
        self.open: dict[int, Life] = {}  # which die later

    def follow(self) -> list[Life]:
        overwriting = Overwriting(self.graph)
        for index, step in enumerate(self.steps):
            pairs = overwriting.follow(self.steps, index)
            if isinstance(step, Free):
                self.end(step.tensor, self.at_step[index])
            else:
                self.compute(self.at_step[index], self.graph.ops[step.op], pairs)
        for tensor in tuple(self.open):
            self.end(tensor, self.at_step[-1])
        return self.lives

    def compute(self, now: int, op: Op, pairs: Pairs) -> None:
        tensors = self.graph.tensors
        for t in op.inputs:
            if t in self.open:
                self.open[t] = replace(self.open[t], last_reader=op)
        for _, t in pairs:
            self.end(t, now)  # its memory now belongs to the output
        for t in op.outputs:
            if tensors[t].pool != DEVICE:
                continue
            life = Life(tensors[t], op, now, now + 1, None)
            if self.open.setdefault(t, life) is not life:  # in memory twice while the op runs
                self.lives.append(life)

    def end(self, t: int, now: int) -> None:
        """End the life of tensor `t` before the moment `now`, if it has not ended yet."""
        if (life := self.open.pop(t, None)) is not None:
            self.lives.append(replace(life, dies=now))
