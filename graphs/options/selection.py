"""Which optional ops a graph holds: of some choices, or none but the program."""

from collections.abc import Callable, Collection
from dataclasses import replace

from graphs.errors import GraphError
from graphs.ir import Graph, Op
from graphs.pools import COMPUTE
from graphs.schedule import Compute, Free, Schedule

TRACED = "options"  # of the provenance: the choices that a graph was traced with
LEFT_OUT = "left_out"  # likewise: names of ops of theirs that were found to be of no use


def traced_with(graph: Graph) -> tuple[str, ...]:
    """The choices that were found when `graph` was traced, or looked for."""
    names = graph.provenance.get(TRACED, ())
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise GraphError(
            f"the provenance of the graph says that it was traced with the options {names!r}: must be a list of names"
        )
    return tuple(names)


def held_with(graph: Graph, names: Collection[str]) -> Graph:
    """Return `graph` with the optional ops of the options `names` only, of those that it was traced with."""
    dropped = [name for name in traced_with(graph) if name not in names]
    if not dropped:
        return graph
    provenance = {key: value for key, value in graph.provenance.items() if key != TRACED}
    if left := [name for name in traced_with(graph) if name in names]:
        provenance[TRACED] = left
    kept = without(graph, lambda op: option_of(op) in dropped)
    return Graph(kept.ops, kept.tensors, kept.kept, provenance, kept.pools)


def exact_ops(graph: Graph) -> list[str]:
    """Names of the optional ops that were found when `graph` was traced, and differ from the program in not a bit."""
    return [op.name for op in graph.ops if op.optional and op.exact and option_of(op) in traced_with(graph)]


def holding_ops(graph: Graph, names: Collection[str]) -> Graph:
    """`graph` without the optional ops that were found when it was traced and are not called one of `names`."""
    found = [op.name for op in graph.ops if op.optional and option_of(op) in traced_with(graph)]
    dropped = set(found).difference(names)
    return without(graph, lambda op: op.name in dropped) if dropped else graph


def option_of(op: Op) -> str:
    """The choice that an optional op is of."""
    return op.target.partition(".")[0]


def without_computed(graph: Graph) -> Graph:
    """`graph` without the optional ops on the compute stream: the program, and what is done beside the computation."""
    offered = any(op.optional and op.stream == COMPUTE for op in graph.ops)
    return without(graph, lambda op: op.stream == COMPUTE) if offered else graph


def without(graph: Graph, is_dropped: Callable[[Op], bool]) -> Graph:
    """`graph` without some of its optional ops, and tensors that only they make. Of what is left, ids close ranks."""
    ops = [op for op in graph.ops if not (op.optional and is_dropped(op))]
    new_op = {op.id: i for i, op in enumerate(ops)}
    made = [t for t in graph.tensors if t.static or any(p in new_op for p in t.producers)]
    new_tensor = {t.id: i for i, t in enumerate(made)}

    def moved(ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(new_tensor[t] for t in ids)

    tensors = (replace(t, id=i, producers=tuple(new_op[p] for p in t.producers if p in new_op)) for i, t in enumerate(made))
    renamed = (
        replace(
            op,
            id=i,
            inputs=moved(op.inputs),
            outputs=moved(op.outputs),
            mutates=moved(op.mutates),
            overwrites=tuple((new_tensor[o], new_tensor[t]) for o, t in op.overwrites),
        )
        for i, op in enumerate(ops)
    )
    kept = frozenset(new_tensor[t] for t in graph.kept)
    return Graph(tuple(renamed), tuple(tensors), kept, graph.provenance, graph.pools, graph.limits)


class PartOf:
    """A graph that is a whole one ``without`` some ops.

    Attributes:
        ops, tensors: for each of the part its id in the whole.
    """

    def __init__(self, whole: Graph, part: Graph) -> None:
        op = {op.name: op.id for op in whole.ops}
        tensor = {t.name: t.id for t in whole.tensors}
        self.ops = tuple(op[own.name] for own in part.ops)
        self.tensors = tuple(tensor[own.name] for own in part.tensors)

    def schedule(self, schedule: Schedule) -> Schedule:
        """A schedule of the part as one of the whole."""
        steps = (
            Compute(self.ops[step.op]) if isinstance(step, Compute) else Free(self.tensors[step.tensor])
            for step in schedule.steps
        )
        return Schedule(tuple(steps))


def differences(graph: Graph, computed: Collection[int]) -> tuple[str, ...]:
    """What may differ from the program where the ops `computed` are executed, each said once."""
    return tuple(dict.fromkeys(graph.ops[op].differs for op in sorted(set(computed)) if graph.ops[op].differs))
