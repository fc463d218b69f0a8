"""Memory of a pool over the step, in columns of equal time."""

from collections.abc import Iterator
from dataclasses import dataclass

from planner.graphs.clocks import find_passages
from planner.graphs.ir import Graph, Op
from planner.graphs.pools import Pool
from planner.graphs.schedule import Compute, live_after
from planner.show.facts.timeline import Timeline

COLUMNS = 720


@dataclass(frozen=True, slots=True)
class MemoryInterval:
    """Bytes in a pool from `start_s` to `end_s`, by the clock of the stream that owns it.

    Attributes:
        size_bytes: bytes in use, static memory included.
        op: the op that is executed or issued; None while the stream waits.
    """

    start_s: float
    end_s: float
    size_bytes: int
    op: Op | None


def list_stretches(timeline: Timeline, pool: Pool) -> tuple[MemoryInterval, ...]:
    """Return the bytes in `pool` over the step, without gaps; stretches of zero duration are included."""
    return tuple(stretch for _, stretch in iterate_stretches_by_step(timeline, pool))


def count_left_bytes(timeline: Timeline, pool: Pool) -> int:
    """Return the bytes in `pool` at the end of the step."""
    left = (timeline.graph.tensors[t] for t in live_after(timeline.graph, timeline.plan.schedule.steps))
    return timeline.graph.static_bytes_by_pool[pool.name] + sum(t.size_bytes for t in left if t.pool == pool.name)


def compute_memory_columns(timeline: Timeline, pool: Pool, count: int = COLUMNS) -> list[int]:
    """Return the peak bytes in `pool` in each of `count` equal parts of the step."""
    columns = [0] * count
    found = list_stretches(timeline, pool)
    if timeline.time_s:
        scale = count / timeline.time_s
        spans = [(stretch.start_s * scale, stretch.end_s * scale) for stretch in found]
    else:  # all ops take no time: evenly spaced
        each = count / max(1, len(found))
        spans = [(i * each, (i + 1) * each) for i in range(len(found))]
    for stretch, (first, last) in zip(found, spans, strict=True):
        for i in range(int(first), min(int(last), count - 1) + 1):
            columns[i] = max(columns[i], stretch.size_bytes)
    return columns


def iterate_stretches_by_step(timeline: Timeline, pool: Pool) -> Iterator[tuple[int, MemoryInterval]]:
    """Yield the stretches of `pool`, each with the step of the schedule that it is before (a wait) or during."""
    graph, steps = timeline.graph, timeline.plan.schedule.steps
    memory_bytes = timeline.simulation.pool_memory_bytes[graph.pools.index(pool)]
    now_s = 0.0
    times = find_passages(graph, timeline.plan.schedule, timeline.clocks, pool.owner)
    for index, (step, size_bytes, (start_s, end_s)) in enumerate(zip(steps, memory_bytes, times, strict=True)):
        if isinstance(step, Compute):
            op = graph.ops[step.op]
            if start_s > now_s:
                yield index, MemoryInterval(now_s, start_s, size_bytes - _count_taken_bytes(graph, op, pool), None)
            if op.stream == pool.owner or any(graph.tensors[t].pool == pool.name for t in op.outputs):
                yield index, MemoryInterval(start_s, end_s, size_bytes, op)
        elif end_s > start_s:
            tensor = graph.tensors[step.tensor]
            size_bytes += tensor.size_bytes if tensor.pool == pool.name else 0
            yield index, MemoryInterval(start_s, end_s, size_bytes, None)
        now_s = end_s
    last_s = max(timeline.clocks.clocks_s)
    if last_s > now_s:
        yield len(steps), MemoryInterval(now_s, last_s, count_left_bytes(timeline, pool), None)


def _count_taken_bytes(graph: Graph, op: Op, pool: Pool) -> int:
    """Return the bytes that `op` allocates in `pool`: outputs there, and the workspace in the first pool of its stream."""
    outputs_bytes = sum(graph.tensors[t].size_bytes for t in op.outputs if graph.tensors[t].pool == pool.name)
    works_in = next((own for own in graph.pools if own.owner == op.stream), None)
    return outputs_bytes + (op.workspace_bytes if works_in == pool else 0)
