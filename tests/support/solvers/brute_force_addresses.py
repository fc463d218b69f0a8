"""The optimum of small graphs in an arena, by trying all schedules with all addresses."""

import heapq
from collections.abc import Sequence

from graphs.addresses import Buffer, buffers_of, live_bytes
from graphs.ir import Graph
from graphs.schedule import schedule_of
from solvers.addresses.solve import solve
from solvers.result import Status
from tests.support.solvers.brute_force import may_repeat

WORK = 20.0


def fastest_in_arena(graph: Graph, capacity_bytes: int, alignment: int = 1, most: int = 20_000) -> float | None:
    """Time of the fastest of all schedules with first executions in program order and all addresses; None if none fits.

    With the shortest lifetimes, as nothing is written over an input. An op is not executed again before what it has made is read.

    Raises:
        TimeoutError: more than `most` orders of executions.
    """
    produced = [not t.static for t in graph.tensors]
    queue: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, ())]
    tried = 0
    while queue:
        time_s, _, computed = heapq.heappop(queue)
        tried += 1
        if tried > most:
            raise TimeoutError
        buffers = buffers_of(graph, schedule_of(graph, computed), alignment=alignment)
        if live_bytes(buffers) > capacity_bytes or not fit(buffers, capacity_bytes):
            continue
        done = len(set(computed))
        if done == len(graph.ops):
            return time_s
        for op in graph.ops[: done + 1]:
            if op.id < done and not (may_repeat(graph, op.id, done) and _is_read(graph, computed, op.id)):
                continue
            if all(not produced[t] or graph.tensors[t].producers[0] < done for t in op.inputs):
                heapq.heappush(queue, (time_s + op.time_s, -len(computed), (*computed, op.id)))
    return None


def _is_read(graph: Graph, computed: Sequence[int], op: int) -> bool:
    """Whether an output of `op` has been read since it was last executed again."""
    last = max(index for index, other in enumerate(computed) if other == op)
    return op not in computed[:last] or any(
        set(graph.ops[op].outputs) & set(graph.ops[other].inputs) for other in computed[last:]
    )


def fit(buffers: Sequence[Buffer], capacity: int) -> bool:
    """Whether there are addresses for `buffers`, by the exact search, which has tests of its own."""
    result = solve(buffers, capacity, work_limit=WORK)
    assert result.status is not Status.LIMIT
    return result.offsets is not None
