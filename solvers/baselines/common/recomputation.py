"""Recomputable ops, the last op that may need each, and schedules that recompute groups of forward ops."""

from collections.abc import Hashable, Iterable, Sequence, Set as AbstractSet

from planner.graphs.ir import Graph, Phase
from planner.graphs.schedule import Schedule, schedule_of


def find_repeatable(graph: Graph) -> tuple[bool, ...]:
    """Return for each op True if it may be recomputed at any time: no later op writes its inputs in place."""
    writers: dict[int, int] = {}
    for op in graph.ops:
        for t in op.mutates:
            writers[t] = op.id
    return tuple(op.recomputable and all(writers.get(t, -1) <= op.id for t in (*op.inputs, *op.mutates)) for op in graph.ops)


def find_last_needed(graph: Graph) -> tuple[int, ...]:
    """Return for each op the last op of the program that may need a recomputation of it, directly or indirectly.

    An op that cannot be recomputed, or all of whose outputs are kept, is needed for itself only.
    """
    fit = find_repeatable(graph)
    needed = list(range(len(graph.ops)))
    for op in reversed(graph.ops):
        if fit[op.id]:
            readers = (r for t in op.outputs if t not in graph.kept for r in graph.consumers[t])
            needed[op.id] = max((needed[r] for r in readers), default=op.id)
    return tuple(needed)


def free_source(graph: Graph, op_id: int) -> bool:
    """Return True if recomputing op `op_id` takes no time and reads no tensors other than static ones."""
    op = graph.ops[op_id]
    return op.time_s == 0.0 and all(graph.tensors[t].static for t in op.inputs)


def find_droppable(graph: Graph) -> frozenset[int]:
    """Return the tensors of the forward pass that may be freed and recomputed."""
    fit = find_repeatable(graph)
    return frozenset(t for op in graph.ops if op.phase is Phase.FORWARD and fit[op.id] for t in op.outputs if t not in graph.kept)


def read_later(graph: Graph) -> frozenset[int]:
    """Return the tensors that ops after the forward pass read."""
    return frozenset(t for op in graph.ops if op.phase is not Phase.FORWARD for t in op.inputs)


def find_needed(graph: Graph, wanted: Iterable[int], ops: Iterable[int], absent: AbstractSet[int]) -> list[int]:
    """Return those of `ops` that produce `wanted` and the `absent` tensors that these need, in program order."""
    needed = set(wanted)
    again = []
    for op_id in sorted(ops, reverse=True):
        op = graph.ops[op_id]
        if needed.intersection(op.outputs):
            needed.update(t for t in op.inputs if t in absent)
            again.append(op_id)
    return again[::-1]


def recompute_groups(
    graph: Graph, groups: Sequence[Hashable], *, saved: AbstractSet[int] = frozenset(), at_once: bool = True
) -> Schedule:
    """Return the schedule that frees the tensors inside each group of forward ops, and recomputes them when they are needed.

    Of a group stay tensors that forward ops outside it read, saved and kept ones, and those that cannot be recomputed. The others
    are recomputed once, before the ops after the forward pass that read them, as far as needed.

    Args:
        groups: for each op its group; None: its outputs stay.
        saved: tensors that stay.
        at_once: True to recompute all tensors of a group with the first one that is needed; otherwise each when it is needed
            itself.
    """
    groups = [group if op.phase is Phase.FORWARD else None for op, group in zip(graph.ops, groups, strict=True)]
    dropped = {t for t in find_droppable(graph) - saved if _is_inside(graph, groups, t)}
    members: dict[Hashable, list[int]] = {}
    for op_id, group in enumerate(groups):
        members.setdefault(group, []).append(op_id)
    wanted = read_later(graph) & dropped
    absent = set(dropped)
    computed: list[int] = []
    for op in graph.ops:
        if op.phase is not Phase.FORWARD:
            for t in op.inputs:
                if t not in absent:
                    continue
                inside = members[groups[graph.tensors[t].producers[0]]]
                again = find_needed(graph, wanted & absent if at_once else [t], inside, absent)
                computed += again
                absent.difference_update(made for i in again for made in graph.ops[i].outputs)
        computed.append(op.id)
    return schedule_of(graph, computed)


def _is_inside(graph: Graph, groups: Sequence[Hashable], t: int) -> bool:
    group = groups[graph.tensors[t].producers[0]]
    readers = (r for r in graph.consumers[t] if graph.ops[r].phase is Phase.FORWARD)
    return group is not None and all(groups[reader] == group for reader in readers)
