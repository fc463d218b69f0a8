"""The optimum of small graphs, by trying everything."""

import heapq
from collections.abc import Iterator
from itertools import combinations

from graphs.ir import Graph, Op


def fastest(graph: Graph, budget_bytes: int) -> float | None:
    """Time of the fastest of all schedules with first executions in program order; None if none fits.

    A state is how many ops were executed and which tensors are in memory. Nothing is assumed about when an op
    runs again, how often, or in what order; a tensor may be freed at any time.
    """
    size = [0 if t.static else t.size_bytes for t in graph.tensors]
    produced = [not t.static for t in graph.tensors]
    start = (0, frozenset[int]())
    spent = {start: 0.0}
    queue = [(0.0, 0, start)]
    pushed = 0
    while queue:
        time_s, _, state = heapq.heappop(queue)
        if time_s > spent[state]:
            continue
        done, live = state
        if done == len(graph.ops):
            return time_s
        live_bytes = graph.static_bytes + sum(size[t] for t in live)
        after: list[tuple[float, tuple[int, frozenset[int]]]] = [(0.0, (done, live - {t})) for t in live if t not in graph.kept]
        for op in graph.ops[: done + 1]:
            if op.id < done and not may_repeat(graph, op.id, done):
                continue
            if any(produced[t] and t not in live for t in op.inputs):
                continue
            for over in ways_to_overwrite(op):
                made_bytes = sum(size[t] for t in op.outputs) - sum(size[t] for t in over)
                if live_bytes + made_bytes + op.workspace_bytes <= budget_bytes:
                    after.append((op.time_s, (max(done, op.id + 1), (live | set(op.outputs)).difference(over))))
        for more_s, reached in after:
            if time_s + more_s < spent.get(reached, float("inf")):
                spent[reached] = time_s + more_s
                pushed += 1
                heapq.heappush(queue, (time_s + more_s, pushed, reached))
    return None


def may_repeat(graph: Graph, op: int, done: int) -> bool:
    """Whether `op` may run again once the first `done` ops have: nothing it reads has been written since."""
    reads = {*graph.ops[op].inputs, *graph.ops[op].mutates}
    return graph.ops[op].recomputable and not any(reads & set(w.mutates) for w in graph.ops[op + 1 : done])


def ways_to_overwrite(op: Op) -> Iterator[tuple[int, ...]]:
    """What `op` may write over, and so goes with it, nothing first."""
    return (some for count in range(len(op.overwrites) + 1) for some in combinations([t for _, t in op.overwrites], count))
