"""From a solution of XEngine's program to a schedule."""

from collections.abc import Iterator, Sequence

from graphs.ir import Graph
from graphs.pools import TRANSFER
from graphs.schedule import Compute, Free, Schedule, Step, schedule_of
from solvers.highs.program import Floats
from solvers.xengine.program import XEngineProgram


def serial_schedule(program: XEngineProgram, values: Floats) -> Schedule:
    """The executions and copies of a solution in its order, with each tensor held as briefly as possible."""
    return schedule_of(program.placement.whole, [op for _, _, op in _executed(program, values)])


def lazy_schedule(program: XEngineProgram, values: Floats) -> Schedule:
    """The same with each tensor held until the solution lets it go: who frees it waits for its copies.

    Where all fits, nothing is freed. Copies that nobody reads cost the makespan nothing, and are left out.
    """
    graph = program.placement.whole
    base = {t: (d, x) for d, place in enumerate(program.placement.places) for x, t in enumerate(place) if t is not None}
    there = {t.id for t in graph.tensors if t.static}
    steps: list[Step] = []

    def go(t: int) -> None:
        steps.append(Free(t))
        there.remove(t)

    executed = list(_executed(program, values))
    for stage in range(program.ops):
        for turn in program.turns(stage):
            for where, when, op in executed:
                if (where, when) == (stage, turn) and not (
                    graph.ops[op].target == TRANSFER and there.issuperset(graph.ops[op].outputs)
                ):
                    steps.append(Compute(op))
                    there.update(graph.ops[op].outputs)
            for t in sorted(there):
                d, x = base[t]
                freed = program.F.get((d, stage, x, turn))
                if freed is not None and values[freed] > 0.5:
                    go(t)
        for t in sorted(there) if stage + 1 < program.ops else ():
            d, x = base[t]
            handed_on = program.S.get((d, stage + 1, x))
            stays = graph.tensors[t].static or t in graph.kept or program.capacity[d] is None
            if not stays and (handed_on is None or values[handed_on] < 0.5):
                go(t)
    return Schedule(_without_unread(graph, steps))


def _without_unread(graph: Graph, steps: Sequence[Step]) -> tuple[Step, ...]:
    """`steps` without copies that are freed before they are read, or never are, and without their frees."""
    wanted = set(graph.kept)
    found: list[Step | None] = []
    freed: dict[int, int] = {}  # where the free of what a copy may have made stands in `found`
    for step in reversed(steps):
        if isinstance(step, Free):
            freed[step.tensor] = len(found)
            wanted.discard(step.tensor)
            found.append(step)
            continue
        op = graph.ops[step.op]
        places = [freed.pop(t) for t in op.outputs if t in freed]
        if op.target == TRANSFER and wanted.isdisjoint(op.outputs):
            for place in places:
                found[place] = None
            continue
        wanted.difference_update(op.outputs)
        wanted.update(op.inputs)
        found.append(step)
    return tuple(step for step in reversed(found) if step is not None)


def _executed(program: XEngineProgram, values: Floats) -> Iterator[tuple[int, int, int]]:
    """Stage, turn and op of what a solution executes and copies; a copy comes before what is executed in its turn."""
    copies = {(t, turn): [] for t in range(program.ops) for turn in program.turns(t)}  # type: dict[tuple[int, int], list[int]]
    for (d, e, t, x, turn), column in program.A.items():
        if values[column] > 0.5:
            copies[t, turn].append(program.placement.copies[d, e, x])
    for (t, turn), issued in copies.items():
        for copy in issued:
            yield t, turn, copy
        for d in program.devices:
            column_of = program.R.get((d, t, turn))
            run = program.placement.runs[d][turn] if 0 <= turn < program.ops else None
            if column_of is not None and run is not None and values[column_of] > 0.5:
                yield t, turn, run
