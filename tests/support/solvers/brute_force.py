"""The optimum of small graphs on the compute stream, also with optional ops, by trying everything."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from planner.graphs.ir import Graph, Op
from planner.graphs.schedule import Compute, Free, Schedule, Step
from tests.support.solvers.best_first import find_fastest


@dataclass(frozen=True)
class Progress:
    """How far a schedule has come, but for memory.

    Attributes:
        done: places of the program that are past.
        owed: ops that are to be executed in place of some that have been skipped, or will be.
        once: optional ops that have been executed and must not be again.
        lossy: ops with a variance that have been executed.
    """

    done: int = 0
    owed: frozenset[int] = frozenset()
    once: frozenset[int] = frozenset()
    lossy: frozenset[int] = frozenset()


BEGINNING = Progress()


@dataclass(frozen=True)
class State:
    """How far a schedule has come, with the tensors in memory, and the time so far."""

    progress: Progress = BEGINNING
    live: frozenset[int] = frozenset()
    clocks: tuple[float] = (0.0,)


def fastest(graph: Graph, budget_bytes: int) -> float | None:
    """Time of the fastest of all schedules; None if none fits."""
    found = fastest_with_options(graph, budget_bytes)
    return None if found is None else found[0]


def fastest_with_options(graph: Graph, budget_bytes: int) -> tuple[float, Schedule] | None:
    """Time and steps of the fastest of all schedules with first executions in the order of places; None if none fits.

    Each op of the program is executed itself, or one that stands for it is, in the place of the last that it stands for.
    Otherwise any op may run at any time from its own place on, as often as it may be recomputed, and a tensor be freed at any
    time. Ops with variances are executed as far as the graph's limit allows.
    """
    return find_fastest(_Search(graph, budget_bytes), State())


class _Search:
    def __init__(self, graph: Graph, budget_bytes: int) -> None:
        self.graph = graph
        self.static = {t.id for t in graph.tensors if t.static}
        self.size = [0 if t.static else t.size_bytes for t in graph.tensors]
        self.room = budget_bytes - graph.static_bytes

    def at_least(self, state: State) -> float:
        return state.clocks[0]

    def count_done(self, state: State) -> int:
        return state.progress.done

    def is_over(self, state: State) -> bool:
        return state.progress.done == len(self.graph.program)

    def split(self, state: State) -> tuple[object, tuple[float, ...]]:
        return (state.progress, state.live), state.clocks

    def moves(self, state: State) -> Iterator[tuple[tuple[Step, ...], State]]:
        graph, live = self.graph, state.live
        held_bytes = sum(self.size[t] for t in live)
        yield from (((Free(t),), replace(state, live=live - {t})) for t in sorted(live - graph.kept))
        yield from (((), replace(state, progress=reached)) for reached in promises(graph, state.progress))
        for op, reached in executions(graph, state.progress):
            if not self.static.union(live).issuperset(op.inputs):
                continue
            if op.uses:
                reached = replace(reached, lossy=reached.lossy | {op.id})
                if any(sum(graph.ops[used].used(name) for used in reached.lossy) > limit for name, limit in graph.limits):
                    continue
            for over in ways_to_overwrite(op):
                made_bytes = sum(self.size[t] for t in op.outputs) - sum(self.size[t] for t in over)
                if held_bytes + made_bytes + op.workspace_bytes <= self.room:
                    after = State(reached, live.union(op.outputs).difference(over), (state.clocks[0] + op.time_s,))
                    yield (Compute(op.id), *map(Free, over)), after


def promises(graph: Graph, state: Progress) -> list[Progress]:
    """To execute an op in place of others, of which the next is the first; and to pass one that is not executed."""
    promised = {p for b in state.owed for p in graph.ops[b].replaces}
    found = [
        replace(state, owed=state.owed | {b.id})
        for b in graph.ops
        if b.replaces and b.replaces[0] == state.done and promised.isdisjoint(b.replaces) and keeps_order(graph, b)
    ]
    if state.done in promised and state.done not in {graph.ops[b].replaces[-1] for b in state.owed}:
        found.append(replace(state, done=state.done + 1))
    return found


def executions(graph: Graph, state: Progress) -> list[tuple[Op, Progress]]:
    """Ops that may run as far as order goes, and the state after that but for memory."""
    promised = {p: b for b in state.owed for p in graph.ops[b].replaces}
    found: list[tuple[Op, Progress]] = []
    for op in graph.ops:
        again = op.recomputable and all(graph.ops[p].recomputable for p in op.replaces)
        if not op.optional:
            if op.id == state.done and op.id not in promised:
                found.append((op, replace(state, done=op.id + 1)))
            elif op.id < state.done + (op.id in promised) and may_repeat(graph, op.id, state.done):
                found.append((op, state))
        elif not op.replaces:
            if op.id not in state.once:
                found.append((op, state if again else replace(state, once=state.once | {op.id})))
        elif op.id in state.owed and op.replaces[-1] == state.done:
            found.append((op, replace(state, done=state.done + 1, owed=state.owed - {op.id})))
        elif op.replaces[-1] < state.done and again and _unwritten(graph, op, state.done):
            found.append((op, state))
    return found


def _unwritten(graph: Graph, op: Op, done: int) -> bool:
    """Whether nothing that a stand-in reads has been written since its place."""
    reads = {*op.inputs, *op.mutates}
    return not any(reads & set(w.mutates) for w in graph.program[op.replaces[-1] + 1 : done])


def keeps_order(graph: Graph, op: Op) -> bool:
    """Whether `op` makes what is kept of its group, and no op between reads or writes in place what matters to either."""
    group = [graph.ops[p] for p in op.replaces]
    if any(t in graph.kept and t not in op.outputs for p in group for t in p.outputs):
        return False
    between = set(graph.program[op.replaces[0] : op.replaces[-1]]).difference(group)
    if len(group) > 1 and op.mutates:
        return False
    return not any(set(p.mutates) & set(op.inputs) for p in between)


def may_repeat(graph: Graph, op: int, done: int) -> bool:
    """Whether `op` may run again once the first `done` ops have: nothing it reads has been written since."""
    reads = {*graph.ops[op].inputs, *graph.ops[op].mutates}
    return graph.ops[op].recomputable and not any(reads & set(w.mutates) for w in graph.ops[op + 1 : done])


def ways_to_overwrite(op: Op) -> Iterator[tuple[int, ...]]:
    """What `op` may write over, and so goes with it, nothing first."""
    return (some for count in range(len(op.overwrites) + 1) for some in combinations([t for _, t in op.overwrites], count))
