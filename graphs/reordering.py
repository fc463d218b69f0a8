"""Graphs with their ops in another order, or with further ops between them, and the way of schedules to them and back."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.graphs.ir import Graph, Op
from planner.graphs.schedule import Compute, Schedule

_INSERTED = -1  # in place of an id


@dataclass(frozen=True, slots=True)
class Reordering:
    """A graph with its ops in another order, and possibly others inserted.

    Attributes:
        graph: tensors keep their ids, ops are numbered by the new order.
        original: for each op of `graph` its id in `source`; -1 for inserted ones.
    """

    source: Graph
    graph: Graph
    original: tuple[int, ...]

    @property
    def changed(self) -> bool:
        """True if the order differs from the original one."""
        return self.original != tuple(range(len(self.original)))

    def map_back(self, schedule: Schedule) -> Schedule:
        """Return a schedule of `graph` as a schedule of `source`, without the inserted ops."""
        if self.graph is self.source:
            return schedule
        steps = (Compute(self.original[step.op]) if isinstance(step, Compute) else step for step in schedule.steps)
        return Schedule(tuple(step for step in steps if step != Compute(_INSERTED)))

    def schedule_of_graph(self, schedule: Schedule) -> Schedule:
        """Return a schedule of `source` as a schedule of `graph`."""
        place = {op: position for position, op in enumerate(self.original)}
        return Schedule(tuple(Compute(place[step.op]) if isinstance(step, Compute) else step for step in schedule.steps))


def keep_program_order(graph: Graph) -> Reordering:
    """Return `graph` in its own order."""
    return Reordering(graph, graph, tuple(range(len(graph.ops))))


def permute(graph: Graph, order: Sequence[int | Op]) -> Reordering:
    """Return `graph` with its ops, and inserted ones, in `order`.

    Raises:
        GraphError: `order` is not topological, or mixes phases.
    """
    original = tuple(_INSERTED if isinstance(op, Op) else op for op in order)
    place = {op: position for position, op in enumerate(original)}
    ops = tuple(
        replace(
            op if isinstance(op, Op) else graph.ops[op],
            id=position,
            replaces=() if isinstance(op, Op) else tuple(sorted(place[p] for p in graph.ops[op].replaces)),
        )
        for position, op in enumerate(order)
    )
    tensors = [replace(t, producers=tuple(place[p] for p in t.producers)) for t in graph.tensors]
    for op in ops:
        for t in op.outputs if original[op.id] == _INSERTED else ():
            tensors[t] = replace(tensors[t], producers=(op.id,))
    return Reordering(graph, replace(graph, ops=ops, tensors=tuple(tensors)), original)
