"""The other streams of a plan, the waits between streams, and the transfers to other pools."""

from collections.abc import Iterator
from dataclasses import dataclass

from planner.graphs.clocks import find_passages
from planner.graphs.ir import Op, Tensor
from planner.graphs.pools import DEVICE
from planner.graphs.schedule import Compute
from planner.show.facts.timeline import Execution, Timeline


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream, and its executions.

    Attributes:
        busy_s: total seconds of its executions.
        made_bytes: bytes of their outputs, or of the copied tensors.
    """

    name: str
    executions: tuple[Execution, ...]
    busy_s: float
    made_bytes: int


@dataclass(frozen=True, slots=True)
class IdleTime:
    """A time in which a stream is idle because another one is not done.

    Attributes:
        start_s, end_s: seconds since the step began.
        awaited: the execution on another stream that ends the wait.
        following: the op that is executed next, or the tensor that can be freed; None at the end of the step.
    """

    start_s: float
    end_s: float
    awaited: Execution
    following: Op | Tensor | None

    @property
    def time_s(self) -> float:
        """The duration in seconds."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Offload:
    """A tensor of the device that is copied to another pool.

    Attributes:
        copy: the tensor in the other pool.
        back: the executions that reload it, in order.
    """

    tensor: Tensor
    copy: Tensor
    out: Execution
    back: tuple[Execution, ...]


def list_streams(timeline: Timeline) -> tuple[Stream, ...]:
    """Return all streams of the graph, the computation first."""
    found = []
    for name in timeline.graph.streams:
        own = tuple(execution for execution in timeline.executions if execution.op.stream == name)
        made_bytes = sum(timeline.graph.tensors[t].size_bytes for execution in own for t in execution.op.outputs)
        found.append(Stream(name, own, sum(execution.op.time_s for execution in own), made_bytes))
    return tuple(found)


def list_waits(timeline: Timeline, stream: str) -> tuple[IdleTime, ...]:
    """Return the waits of `stream` in order; together with its executions they cover the step."""
    return tuple(_iterate_waits(timeline, stream))


def _iterate_waits(timeline: Timeline, stream: str) -> Iterator[IdleTime]:
    graph, schedule = timeline.graph, timeline.plan.schedule
    ending: dict[float, list[Execution]] = {}  # executions on other streams, by end time
    now_s, executions = 0.0, iter(timeline.executions)
    for step, (start_s, end_s) in zip(schedule.steps, find_passages(graph, schedule, timeline.clocks, stream), strict=True):
        if isinstance(step, Compute):
            execution = next(executions)
            op = execution.op
            if start_s > now_s:
                yield IdleTime(now_s, start_s, _find_awaited(ending[start_s], {*op.inputs, *op.mutates}), op)
            if op.stream != stream:
                ending.setdefault(execution.end_s, []).append(execution)
        elif end_s > start_s:
            yield IdleTime(start_s, end_s, _find_awaited(ending[end_s], {step.tensor}), graph.tensors[step.tensor])
        now_s = end_s
    last_s = max(timeline.clocks.clocks_s)
    if last_s > now_s:
        yield IdleTime(now_s, last_s, ending[last_s][-1], None)


def _find_awaited(ending: list[Execution], tensors: set[int]) -> Execution:
    """Return the execution among those `ending` at one time that uses `tensors`; the last if there are several."""
    own = [execution for execution in ending if tensors.intersection(execution.op.inputs + execution.op.outputs)]
    return (own or ending)[-1]


def list_offloads(timeline: Timeline) -> tuple[Offload, ...]:
    """Return the transfers from the device to other pools, in order."""
    graph = timeline.graph
    found: list[tuple[Tensor, Tensor, Execution]] = []
    back: list[list[Execution]] = []
    there: dict[int, int] = {}  # by tensor in another pool, the offload that made it last
    for execution in timeline.executions:
        if not (graph.crosses_pools(execution.op) and DEVICE in graph.ends(execution.op)):
            continue
        source, made = graph.tensors[execution.op.inputs[0]], graph.tensors[execution.op.outputs[0]]
        if source.pool == DEVICE:
            there[made.id] = len(found)
            found.append((source, made, execution))
            back.append([])
        elif source.id in there:
            back[there[source.id]].append(execution)
    return tuple(Offload(*offload, tuple(came)) for offload, came in zip(found, back, strict=True))
