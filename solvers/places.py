"""Places: the order of ops that solvers use, which is program order with optional ops in between.

A *place* is an op of the program and the alternatives to it: the ops that replace a group of which it is the last. Optional ops
without a group come before the first place at which their inputs can be available.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from planner.graphs.ir import Graph, Op
from planner.solvers.pass_ends import find_requested_outputs


@dataclass(frozen=True, slots=True)
class Places:
    """An order of ops, by whose positions solvers number them.

    Attributes:
        ids: the op of the graph at each position.
        last: for each position the last one of its place.
        replaces: for each position the positions that its op replaces.
        replaced_by: for each position those of the ops that replace it.
        optional: for each position, True if its op is optional and replaces none.
        sure: for each position, True if every schedule executes it in its place: it is of the program, and nothing replaces it.
        plain: True if all are sure.
    """

    ids: tuple[int, ...]
    last: tuple[int, ...]
    replaces: tuple[tuple[int, ...], ...]
    replaced_by: tuple[tuple[int, ...], ...]
    optional: tuple[bool, ...]
    sure: tuple[bool, ...]
    plain: bool

    def find_first(self, i: int) -> int:
        """Return the op of the program whose place i belongs to."""
        v = self.last[i]
        while self.replaces[v]:
            v -= 1
        return v

    def list_executed(self, instead: Collection[int]) -> list[int]:
        """Return the ops that are executed in their places if the ops `instead` replace others."""
        skipped = {i for b in instead for i in self.replaces[b]}
        return [
            i
            for i, sure in enumerate(self.sure)
            if sure or i in instead or not (self.optional[i] or self.replaces[i] or i in skipped)
        ]

    def list_alternatives(self, i: int) -> range:
        """Return the ops of which one, or none if its op of the program is replaced later, is executed in the place of i."""
        return range(self.find_first(i), self.last[i] + 1)


def find_places(graph: Graph) -> Places:
    """Return the places of `graph`, which has no transfers to the host.

    Optional ops that no schedule of the class can use are left out.
    """
    n = len(graph.program)
    if n == len(graph.ops):
        everywhere = tuple(range(n))
        return Places(everywhere, everywhere, ((),) * n, ((),) * n, (False,) * n, (True,) * n, plain=True)
    there = [t.static for t in graph.tensors]
    alternatives: dict[int, list[Op]] = {}
    loose = [op for op in graph.ops[n:] if not op.replaces]
    for op in graph.ops[n:]:
        if op.replaces and may_replace(graph, op):
            alternatives.setdefault(op.replaces[-1], []).append(op)
    ids: list[int] = []
    last: list[int] = []
    for op in graph.program:
        while (ready := next((other for other in loose if all(there[t] for t in other.inputs)), None)) is not None:
            loose.remove(ready)
            _put(ready, ids, there)
        instead = [other for other in alternatives.get(op.id, ()) if all(there[t] for t in other.inputs)]
        for other in (op, *instead):
            _put(other, ids, there)
        last += [len(ids) - 1] * (len(ids) - len(last))
    at = {op: position for position, op in enumerate(ids)}
    replaces = tuple(tuple(at[p] for p in graph.ops[op].replaces) for op in ids)
    replaced_by: list[list[int]] = [[] for _ in ids]
    for position, group in enumerate(replaces):
        for i in group:
            replaced_by[i].append(position)
    optional = tuple(graph.ops[op].optional and not graph.ops[op].replaces for op in ids)
    sure = tuple(not (graph.ops[op].optional or replaced_by[i]) for i, op in enumerate(ids))
    return Places(tuple(ids), tuple(last), replaces, tuple(map(tuple, replaced_by)), optional, sure, plain=all(sure))


def _put(op: Op, ids: list[int], there: list[bool]) -> None:
    ids.append(op.id)
    for t in op.outputs:
        there[t] = True


def may_replace(graph: Graph, op: Op) -> bool:
    """Return True if `op`, executed at the last op that it replaces, keeps the order of the rest of the program.

    It must produce the kept outputs of its group, except those that a pass end reads. With several ops in the group, none may
    write in place, no other op between them may write an input of `op`, and none may draw random numbers after an op of the group
    would have.
    """
    group = [graph.ops[p] for p in op.replaces]
    if not group:
        return False
    asked = find_requested_outputs(graph)
    if any(t in graph.kept and t not in op.outputs and t not in asked for p in group for t in p.outputs):
        return False
    if len(group) == 1:
        return True
    between = [p for p in graph.program[group[0].id : group[-1].id] if p.id not in op.replaces]
    first_random = next((p.id for p in group if p.random), len(graph.program))
    written = {t for p in between for t in p.mutates}
    late = any(p.random and p.id > first_random for p in between)
    return not op.mutates and written.isdisjoint(op.inputs) and not late


def find_circles(inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return sets of ops, by their inputs and outputs, each of which depends on all others in its set."""
    from scipy.sparse import csr_array  # 20 MB and a third of a second, for graphs with optional ops
    from scipy.sparse.csgraph import connected_components

    readers: dict[int, list[int]] = {}
    for op, tensors in enumerate(inputs):
        for t in tensors:
            readers.setdefault(t, []).append(op)
    edges = [(op, reader) for op, tensors in enumerate(outputs) for t in tensors for reader in readers.get(t, ())]
    rows, columns = zip(*edges, strict=True) if edges else ((), ())
    matrix = csr_array((np.ones(len(edges), dtype=np.int8), (rows, columns)), shape=(len(inputs), len(inputs)))
    _, number = connected_components(matrix, directed=True, connection="strong")
    members: dict[int, list[int]] = {}
    for op, component in enumerate(number.tolist()):
        members.setdefault(component, []).append(op)
    return tuple(sorted(tuple(ops) for ops in members.values() if len(ops) > 1))
