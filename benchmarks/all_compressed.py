"""Schedules that compress all compressible tensors."""

from planner.graphs.ir import Graph, Phase
from planner.graphs.options.compress import COMPRESS, KEEP, RESTORE
from planner.graphs.schedule import Schedule, schedule_of


def compress_all(graph: Graph, form: str) -> Schedule:
    """Return the schedule that executes each op of `graph` once and compresses each tensor after its last forward reader.

    A backward op that reads several such tensors is replaced by the alternative that decompresses most of them itself.
    """
    keeps = {op.inputs[0]: op for op in graph.ops if op.target == f"{KEEP}.{form}"}
    restores = {graph.ops[graph.consumers[keep.outputs[0]][0]].outputs[0]: t for t, keep in keeps.items()}
    variants = {}
    for op in graph.ops:
        if op.target == f"{COMPRESS}.read":
            best = variants.get(op.replaces[0], op)
            variants[op.replaces[0]] = max(best, op, key=lambda v: sum(t in restores for t in v.inputs))
    maker = {restored: op.id for op in graph.ops if op.target == f"{RESTORE}.{form}" for restored in op.outputs}
    forward = {op.id for op in graph.program if op.phase is Phase.FORWARD}
    last_reader = {t: max({graph.tensors[t].producers[0], *graph.consumers[t]} & forward) for t in keeps}
    order: list[int] = []
    for op in graph.program:
        executed = variants.get(op.id, op)
        order += [maker[t] for t in executed.inputs if t in restores and maker[t] not in order]
        order += [executed.id, *(keep.id for t, keep in keeps.items() if last_reader[t] == op.id)]
    return schedule_of(graph, order)
