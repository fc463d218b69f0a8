"""Reordering of ops: the program order is one topological order of many, and another may need less memory at no cost.

Known weakness: an order is judged by the peak of keeping everything and by the bound on the least budget, not by the overhead at
the budget, which only a solve tells. Orders that do not lower that peak gain nothing where program order is solved in seconds;
where it is not, they are often solved faster: ViT-L at 3% above its least budget in 1 s, where program order keeps a gap of 0.6%
after a minute.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from planner.graphs.ir import Graph
from planner.graphs.options import extract_eager_program, remove_options
from planner.graphs.reordering import Reordering, keep_program_order, permute
from planner.graphs.schedule import Schedule
from planner.solvers.bounds import bound_least_budget
from planner.solvers.clock import Clock, WorkClock, poll
from planner.solvers.order.peak import bound_any_order_peak_bytes, find_peak, keep_everything_peak_bytes
from planner.solvers.order.sifting import sift_ops
from planner.solvers.places import may_replace
from planner.solvers.result import Result

_WORK_PER_MOVE = 1e-7  # per move and passed op
_LOWER = 1e-4  # relative to the peak; a smaller decrease gains nothing


def map_result_back(order: Reordering, result: Result) -> Result:
    """Return a result for the graph in `order` as a result for its source; its settings record if the order has changed.

    Its bound is valid for schedules whose first executions are in the new order.
    """
    schedule = None if result.schedule is None else order.map_back(result.schedule)
    return result.map_to(schedule=schedule, settings=replace(result.settings, reordered=order.changed))


def find_order(graph: Graph, clock: Clock | None = None, should_stop: Callable[[], bool] | None = None) -> Reordering:
    """Return `graph` in the best order found; in its own order if none is better, or the search was stopped early.

    Ops stay in their phase. Ops that draw random numbers, or may have effects that the graph does not show, keep their order, and
    readers of tensors written in place stay on their side of the write. In the new order, keeping everything has no higher peak,
    and the least budget no higher lower bound. Optional ops come after the program's as before; alternatives that are usable in
    one order stay usable in the other, and still come before the readers of their outputs.
    """
    if not graph.plain:
        program = remove_options(graph)
        found = permute(graph, (*find_order(program, clock, should_stop).original, *range(len(program.ops), len(graph.ops))))
        optional = range(len(program.ops), len(graph.ops))
        lost = any(_comes_in_time(graph, op) and not _comes_in_time(found.graph, op) for op in optional)
        return keep_program_order(graph) if lost else found
    before, after = list_constraints(graph)
    has_ended = partial(poll, clock or WorkClock(math.inf), _WORK_PER_MOVE * len(graph.ops), should_stop)
    order = sift_ops(graph, before, after, should_stop=has_ended)
    if order is None:
        return keep_program_order(graph)
    found = permute(graph, order)
    return found if found.changed and _is_no_worse(found.graph, graph) else keep_program_order(graph)


def _comes_in_time(graph: Graph, op: int) -> bool:
    """Return True if an optional op can replace its group at the last op of it, and no other op reads their outputs before."""
    alternative = graph.ops[op]
    if not may_replace(graph, alternative):
        return False
    made = {t for p in alternative.replaces for t in graph.ops[p].outputs}
    between = graph.ops[alternative.replaces[0] : alternative.replaces[-1]]
    return all(p.id in alternative.replaces or made.isdisjoint(p.inputs) for p in between)


def may_lower_peak(graph: Graph) -> bool:
    """Return False if no order of the ops has a notably lower peak of keeping everything than program order.

    The recomputation at a budget depends on that peak: on twelve models of the zoo, orders that did not lower it lowered no
    overhead by more than 0.01 points at any budget.
    """
    program = extract_eager_program(graph)
    peak_bytes, op = find_peak(program)
    return bound_any_order_peak_bytes(program, op, *list_constraints(program)) < (1 - _LOWER) * peak_bytes


def lowers_peak(order: Reordering) -> bool:
    """Return True if keeping everything has a notably lower peak in `order` than in program order."""
    before, after = (keep_everything_peak_bytes(extract_eager_program(graph)) for graph in (order.source, order.graph))
    return after < (1 - _LOWER) * before


def reorder_by(graph: Graph, schedule: Schedule) -> Reordering:
    """Return `graph`, without optional ops, in the order of the first executions of `schedule`."""
    order = tuple(dict.fromkeys(schedule.computed))
    return keep_program_order(graph) if order == tuple(range(len(graph.ops))) else permute(graph, order)


def list_constraints(graph: Graph) -> tuple[list[set[int]], list[set[int]]]:
    """Return for each op the ops that must come before it and those that must come after it; others follow from these."""
    before: list[set[int]] = [set() for _ in graph.ops]
    after: list[set[int]] = [set() for _ in graph.ops]
    for first, second in _iterate_pairs(graph):
        before[second].add(first)
        after[first].add(second)
    return before, after


def _iterate_pairs(graph: Graph) -> Iterable[tuple[int, int]]:
    written = {t for op in graph.ops for t in op.mutates}
    # What must run once for a reason that the graph does not show: it may write its inputs.
    hidden = {op.id for op in graph.ops if not (op.recomputable or op.mutates or written.intersection(op.inputs))}
    touching: dict[int, list[tuple[int, bool]]] = {}  # by tensor: the ops that read or write it, with True for writes
    ordered: int | None = None
    for op in graph.ops:
        yield from ((p, op.id) for t in op.inputs for p in graph.tensors[t].producers)
        for t in {*op.inputs, *op.mutates}:
            touching.setdefault(t, []).append((op.id, t in op.mutates or op.id in hidden))
        if op.random or op.id in hidden:
            if ordered is not None:
                yield ordered, op.id
            ordered = op.id
    for users in touching.values():
        yield from _iterate_pairs_around_writes(users)


def _iterate_pairs_around_writes(users: list[tuple[int, bool]]) -> Iterable[tuple[int, int]]:
    """Yield pairs that keep the readers of one tensor on their side of each write, and the writes in order."""
    writer: int | None = None
    readers: list[int] = []
    for op, writes in users:
        if writer is not None:
            yield writer, op
        if writes:
            yield from ((reader, op) for reader in readers)
            writer, readers = op, []
        else:
            readers.append(op)


def _is_no_worse(graph: Graph, than: Graph) -> bool:
    """Return True if neither the peak of keeping everything nor the lower bound on the least budget is higher."""
    return keep_everything_peak_bytes(graph) <= keep_everything_peak_bytes(than) and (
        bound_least_budget(graph).budget_bytes <= bound_least_budget(than).budget_bytes
    )
