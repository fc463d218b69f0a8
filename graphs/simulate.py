"""The judge of every plan: what a schedule on a graph takes, in bytes and seconds.

Shares no code with any solver: a mistake there shows here.
"""

import math
from dataclasses import dataclass

from graphs.errors import ScheduleError
from graphs.ir import Graph
from graphs.schedule import Compute, Free, Schedule


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a schedule takes.

    Attributes:
        peak_bytes: most memory held at any step, static bytes included.
        time_s: seconds of all executions.
        memory_bytes: for each step, memory during it (Compute) or after it (Free).
        peak_step: index of the first step at which the peak is reached.
        recomputed: number of executions beyond the first of each op.
    """

    peak_bytes: int
    time_s: float
    memory_bytes: tuple[int, ...]
    peak_step: int
    recomputed: int


def simulate(graph: Graph, schedule: Schedule) -> Simulation:
    """Run `schedule` on `graph` with sizes instead of tensors.

    During a Compute step, memory = static + live tensors + the op's outputs + its workspace; an
    output that is live already is there twice during the step, and once afterwards.

    Raises:
        ScheduleError: an op or tensor that does not exist; an op that reads what is not in memory,
            runs again though it must not, runs on the wrong side of a write in place, or out of
            order with another random op; a free of what is not in memory or must be kept; an op
            never executed; a kept tensor missing at the end.
    """
    judge = _Judge(graph)
    memory: list[int] = []
    for index, step in enumerate(schedule.steps):
        match step:
            case Compute(op):
                memory.append(judge.compute(index, op))
            case Free(tensor):
                memory.append(judge.free(index, tensor))
            case _:
                raise ScheduleError(f"step {index} is {step!r}, which this judge does not know")
    judge.finish()
    peak = max(memory)
    return Simulation(
        peak_bytes=peak,
        time_s=math.fsum(judge.times_s),
        memory_bytes=tuple(memory),
        peak_step=memory.index(peak),
        recomputed=len(judge.times_s) - len(graph.ops),
    )


class _Judge:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.live: set[int] = set()
        self.live_bytes = graph.static_bytes
        self.times_s: list[float] = []
        self.done = [False] * len(graph.ops)
        self.random_ops = [op.id for op in graph.ops if op.random]
        self.random_done = 0
        self.writers: dict[int, list[int]] = {}
        for op in graph.ops:
            for t in op.mutates:
                self.writers.setdefault(t, []).append(op.id)

    def compute(self, index: int, op_id: int) -> int:
        if not 0 <= op_id < len(self.graph.ops):
            raise ScheduleError(f"step {index} computes op {op_id}, but the graph has {len(self.graph.ops)} ops")
        op = self.graph.ops[op_id]
        where = f"step {index} computes {op.name!r}"
        for t in op.inputs:
            if self.graph.tensors[t].producer is not None and t not in self.live:
                raise ScheduleError(f"{where}, but its input {self.graph.tensors[t].name!r} is not in memory")
        self._check_order(where, op_id)
        outputs_bytes = sum(self.graph.tensors[t].size_bytes for t in op.outputs)
        during = self.live_bytes + outputs_bytes + op.workspace_bytes
        for t in op.outputs:
            if t not in self.live:
                self.live.add(t)
                self.live_bytes += self.graph.tensors[t].size_bytes
        self.done[op_id] = True
        self.times_s.append(op.time_s)
        return during

    def _check_order(self, where: str, op_id: int) -> None:
        op = self.graph.ops[op_id]
        if self.done[op_id]:
            if not op.recomputable:
                raise ScheduleError(f"{where} again, but it must be executed only once")
        elif op.random:
            expected = self.random_ops[self.random_done]
            if expected != op_id:
                raise ScheduleError(f"{where} before {self.graph.ops[expected].name!r}: random ops must keep their order")
            self.random_done += 1
        for t in (*op.inputs, *op.mutates):
            for writer in self.writers.get(t, ()):
                if writer != op_id and self.done[writer] != (writer < op_id):
                    side = "before" if writer < op_id else "after"
                    raise ScheduleError(
                        f"{where} {side} {self.graph.ops[writer].name!r} writes {self.graph.tensors[t].name!r}, "
                        "the other way round than in the program"
                    )

    def free(self, index: int, t: int) -> int:
        if not 0 <= t < len(self.graph.tensors):
            raise ScheduleError(f"step {index} frees tensor {t}, but the graph has {len(self.graph.tensors)} tensors")
        tensor = self.graph.tensors[t]
        if t in self.graph.kept or tensor.producer is None:
            raise ScheduleError(f"step {index} frees {tensor.name!r}, which must stay in memory")
        if t not in self.live:
            raise ScheduleError(f"step {index} frees {tensor.name!r}, which is not in memory")
        self.live.remove(t)
        self.live_bytes -= tensor.size_bytes
        return self.live_bytes

    def finish(self) -> None:
        for op in self.graph.ops:
            if not self.done[op.id]:
                raise ScheduleError(f"the schedule never computes {op.name!r}")
        for t in self.graph.kept:
            if t not in self.live:
                raise ScheduleError(f"the schedule ends without {self.graph.tensors[t].name!r}, which must be kept")
