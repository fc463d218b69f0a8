"""Selection of optional ops: graphs without some of the options that they were traced with.

An op is known by its position, so removing some renumbers the others; names stay, and ``PartOf`` maps by them.
"""

from collections.abc import Callable, Collection
from dataclasses import replace

from planner.graphs.ir import Graph, Op
from planner.graphs.pools import COMPUTE
from planner.graphs.schedule import Compute, Free, Schedule


def keep_traced(graph: Graph, names: Collection[str]) -> Graph:
    """Return `graph` where, of the options that it was traced with, only `names` remain."""
    dropped = [name for name in graph.provenance.options if name not in names]
    if not dropped:
        return graph
    kept = remove_ops(graph, lambda op: get_option_name(op) in dropped)
    left = [name for name in graph.provenance.options if name in names]
    provenance = graph.provenance.remove("options").record(**{"options": left} if left else {})
    return replace(kept, provenance=provenance, limits=())


def list_exact_ops(graph: Graph) -> list[str]:
    """Return the names of the optional ops that were found in tracing and are bit-identical to the program."""
    return [op.name for op in graph.ops if op.optional and op.exact and get_option_name(op) in graph.provenance.options]


def keep_traced_ops(graph: Graph, names: Collection[str]) -> Graph:
    """Return `graph` where, of the optional ops that were found in tracing, only those in `names` remain."""
    found = [op.name for op in graph.ops if op.optional and get_option_name(op) in graph.provenance.options]
    dropped = set(found).difference(names)
    return remove_ops(graph, lambda op: op.name in dropped) if dropped else graph


def get_option_name(op: Op) -> str:
    """Return the name of the option that an optional op belongs to."""
    return op.target.partition(".")[0]


def remove_computed(graph: Graph) -> Graph:
    """Return `graph` without the optional ops on the compute stream: the program and its transfers."""
    offered = any(op.optional and op.stream == COMPUTE for op in graph.ops)
    return remove_ops(graph, lambda op: op.stream == COMPUTE) if offered else graph


def remove_ops(graph: Graph, is_dropped: Callable[[Op], bool]) -> Graph:
    """Return `graph` without the dropped optional ops and the tensors that only they produce; the rest is renumbered."""
    ops = [op for op in graph.ops if not (op.optional and is_dropped(op))]
    new_op = {op.id: i for i, op in enumerate(ops)}
    made = [t for t in graph.tensors if t.static or any(p in new_op for p in t.producers)]
    new_tensor = {t.id: i for i, t in enumerate(made)}
    tensors = (replace(t, id=i, producers=tuple(new_op[p] for p in t.producers if p in new_op)) for i, t in enumerate(made))
    renamed = (
        replace(
            op,
            id=i,
            inputs=tuple(map(new_tensor.__getitem__, op.inputs)),
            outputs=tuple(map(new_tensor.__getitem__, op.outputs)),
            mutates=tuple(map(new_tensor.__getitem__, op.mutates)),
            overwrites=tuple((new_tensor[o], new_tensor[t]) for o, t in op.overwrites),
        )
        for i, op in enumerate(ops)
    )
    kept = frozenset(new_tensor[t] for t in graph.kept)
    return replace(graph, ops=tuple(renamed), tensors=tuple(tensors), kept=kept)


class PartOf:
    """The relation between a graph and the result of ``remove_ops`` on it.

    Attributes:
        ops, tensors: for each op or tensor of the part, its id in the whole.
    """

    def __init__(self, whole: Graph, part: Graph) -> None:
        op = {op.name: op.id for op in whole.ops}
        tensor = {t.name: t.id for t in whole.tensors}
        self.ops = tuple(op[own.name] for own in part.ops)
        self.tensors = tuple(tensor[own.name] for own in part.tensors)

    def schedule(self, schedule: Schedule) -> Schedule:
        """Return a schedule of the part as a schedule of the whole."""
        steps = (
            Compute(self.ops[step.op]) if isinstance(step, Compute) else Free(self.tensors[step.tensor])
            for step in schedule.steps
        )
        return Schedule(tuple(steps))


def describe_differences(graph: Graph, computed: Collection[int]) -> tuple[str, ...]:
    """Return descriptions of how the ops `computed` may change results of the program, without duplicates."""
    return tuple(dict.fromkeys(graph.ops[op].differs for op in sorted(set(computed)) if graph.ops[op].differs))
