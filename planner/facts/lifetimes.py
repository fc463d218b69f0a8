"""Device memory over the step: moments, and the lives of tensors."""

from dataclasses import dataclass

from graphs.clocks import passages
from graphs.ir import Op, Tensor
from graphs.pools import COMPUTE, DEVICE
from graphs.schedule import Free
from planner.facts.timeline import Timeline


@dataclass(frozen=True, slots=True)
class SteadyInterval:
    """A time interval in which the device memory does not change.

    Attributes:
        start_s, end_s: seconds since the step began.
        size_bytes: bytes in use, static memory included.
        op: the op that is executed or issued; None while the computation waits.
    """

    start_s: float
    end_s: float
    size_bytes: int
    op: Op | None


@dataclass(frozen=True, slots=True)
class Life:
    """A tensor in memory, from an execution that makes it until it is freed.

    Attributes:
        tensor: the tensor.
        maker: the op that was executed to make it.
        born, dies: the first moment with it, and the first without it.
        last_reader: the op that reads it last in this life; None if none does.
    """

    tensor: Tensor
    maker: Op
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

    moments: tuple[SteadyInterval, ...]
    lives: tuple[Life, ...]
    at_step: tuple[int, ...]


def lives_of(timeline: Timeline) -> Lifetimes:
    """Return the moments and lives of `timeline`."""
    return _Following(timeline).follow()


@dataclass(slots=True)
class _Open:
    """A life that has not ended yet."""

    maker: Op
    born: int
    last_reader: Op | None = None


class _Following:
    """A schedule that is followed step by step."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, self.graph = timeline, timeline.graph
        self.steps = timeline.plan.schedule.steps
        self.moments: list[SteadyInterval] = []
        self.lives: list[Life] = []
        self.open: dict[int, _Open] = {}
        self.at_step: list[int] = []
        self.live_bytes = self.graph.static_bytes

    def follow(self) -> Lifetimes:
        times = passages(self.graph, self.timeline.plan.schedule, self.timeline.clocks, COMPUTE)
        now_s = 0.0
        for index, (step, (start_s, end_s)) in enumerate(zip(self.steps, times, strict=True)):
            if isinstance(step, Free):
                if end_s > start_s:
                    self.moments.append(SteadyInterval(start_s, end_s, self.live_bytes, None))
                self.at_step.append(len(self.moments))
                self.end(step.tensor)
            else:
                if start_s > now_s:
                    self.moments.append(SteadyInterval(now_s, start_s, self.live_bytes, None))
                self.at_step.append(len(self.moments))
                self.compute(index, self.graph.ops[step.op], start_s, end_s)
            now_s = end_s
        if (last_s := max(self.timeline.clocks.clocks_s)) > now_s:
            self.moments.append(SteadyInterval(now_s, last_s, self.live_bytes, None))
        for tensor in tuple(self.open):
            self.end(tensor)
        lives = sorted(self.lives, key=lambda life: (life.born, life.tensor.id))
        return Lifetimes(tuple(self.moments), tuple(lives), tuple(self.at_step))

    def compute(self, index: int, op: Op, start_s: float, end_s: float) -> None:
        tensors, now = self.graph.tensors, len(self.moments)
        for t in op.inputs:
            if t in self.open:
                self.open[t].last_reader = op
        if op.overwrites:
            freed = self._freed_behind(index)
            for t in (read for _, read in op.overwrites if read in freed):
                self.end(t)  # its memory now belongs to the output
        for t in op.outputs:
            if tensors[t].pool != DEVICE:
                continue
            if t in self.open:  # in memory twice while the op runs
                self.lives.append(Life(tensors[t], op, now, now + 1, None))
            else:
                self.open[t] = _Open(op, now)
                self.live_bytes += tensors[t].size_bytes
        if op.stream == COMPUTE or any(tensors[t].pool == DEVICE for t in op.outputs):
            self.moments.append(SteadyInterval(start_s, end_s, self.timeline.simulation.memory_bytes[index], op))

    def end(self, t: int) -> None:
        """End the life of tensor `t` before the next moment, if it has not ended yet."""
        if (life := self.open.pop(t, None)) is None:
            return
        tensor = self.graph.tensors[t]
        self.live_bytes -= tensor.size_bytes
        self.lives.append(Life(tensor, life.maker, life.born, len(self.moments), life.last_reader))

    def _freed_behind(self, index: int) -> set[int]:
        """Return the tensors freed between step `index` and the next execution."""
        freed = set()
        for step in self.steps[index + 1 :]:
            if not isinstance(step, Free):
                break
            freed.add(step.tensor)
        return freed
