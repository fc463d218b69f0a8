"""Conflicts of schedules: few of their buffers that no arena of a capacity holds."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from graphs.addresses import Buffer
from graphs.ir import Graph
from graphs.schedule import Schedule
from solvers.addresses.solve import solve_by
from solvers.arena.needs import ArenaRules
from solvers.clock import Clock, measure_rest
from solvers.conflicts import Conflict, Course, Moment, Pattern, Residency, Stay, set_of
from solvers.result import Status

_PROOF = 0.1  # of the limit, for each proof


@dataclass(frozen=True, slots=True)
class _Item:
    """A buffer of a conflict.

    Attributes:
        tensor: None for workspaces.
        first, last: executions, or first executions, during which it is in use.
        is_copy: True for the second copy of a tensor.
    """

    size: int
    first: int
    last: int
    tensor: int | None = None
    is_copy: bool = False

    @property
    def stays(self) -> bool:
        """True for a stay of a tensor."""
        return self.tensor is not None and not self.is_copy


def find_conflict(graph: Graph, schedule: Schedule, rules: ArenaRules, capacity_bytes: int, clock: Clock) -> Conflict | None:
    """Return a conflict that occurs in `schedule`, which has the shortest lifetimes; None if none is proved.

    With the first executions alone it is one of residency. Otherwise it is a pattern of all executions, unless outputs may be
    written over inputs: then buffers of shorter lifetimes need not be easier to place.

    Args:
        graph: plain.
        capacity_bytes: of the arena, whatever the schedule.
        clock: its limit ends the search.
    """
    course = Course.of(graph, schedule)
    prover = _Prover(rules, capacity_bytes, clock)
    if found := prover.find_smallest(_list_first_executions(graph, course, rules)):
        return Residency(tuple(Stay(i.tensor, i.first, i.last) for i in found if i.tensor is not None))
    if graph.writes_over_inputs:
        return None
    found = prover.find_smallest(_list_all_executions(graph, course, rules))
    return _build_pattern(course, found) if found else None


def _list_first_executions(graph: Graph, course: Course, rules: ArenaRules) -> list[_Item]:
    """Return the stays during first executions, numbered by these, and the workspaces of these.

    Where an op may write over its input, the input is not counted beside the outputs unless it stays.
    """
    places = [course.places[op] for op in range(len(graph.ops))]
    items = []
    for t, first, last in _iterate_stays(graph, course, rules):
        begin, end = bisect_left(places, first), bisect_right(places, last) - 1
        if end >= begin and any(over == t for _, over in graph.ops[end].overwrites):
            end -= 1
        if end >= begin:
            items.append(_Item(graph.tensors[t].size_bytes, begin, end, t))
    return items + [
        _Item(op.workspace_bytes, op.id, op.id) for op in graph.ops if op.workspace_bytes >= max(1, rules.least_bytes)
    ]


def _list_all_executions(graph: Graph, course: Course, rules: ArenaRules) -> list[_Item]:
    """Return all buffers of a graph without outputs that are written over inputs, numbered by executions."""
    items = [_Item(graph.tensors[t].size_bytes, first, last, t) for t, first, last in _iterate_stays(graph, course, rules)]
    for index, (op, fresh) in enumerate(zip(course.computed, course.fresh, strict=True)):
        size = graph.ops[op].workspace_bytes
        if size >= max(1, rules.least_bytes):
            items.append(_Item(size, index, index))
        items += [
            _Item(graph.tensors[t].size_bytes, index, index, t, is_copy=True)
            for t in graph.ops[op].outputs
            if not fresh >> t & 1 and rules.holds(graph, t) and graph.tensors[t].size_bytes
        ]
    return items


def _iterate_stays(graph: Graph, course: Course, rules: ArenaRules) -> Iterator[tuple[int, int, int]]:
    """Yield each stay in the arena: its tensor, and its first and last execution."""
    for t in range(len(graph.tensors)):
        if not graph.tensors[t].size_bytes or not rules.holds(graph, t):
            continue
        first: int | None = None
        for index, (there, fresh) in enumerate(zip(course.during, course.fresh, strict=True)):
            if first is not None and (fresh >> t & 1 or not there >> t & 1):
                yield t, first, index - 1
                first = None
            if fresh >> t & 1:
                first = index
        if first is not None:
            yield t, first, len(course.computed) - 1


def _build_pattern(course: Course, items: Sequence[_Item]) -> Pattern:
    """Return the moments of a conflict: the executions with the most of its buffers."""
    during = [frozenset(n for n, i in enumerate(items) if i.first <= index <= i.last) for index in range(len(course.computed))]
    chosen: list[int] = []
    for index, there in enumerate(during):
        while chosen and during[chosen[-1]] <= there:
            chosen.pop()
        if there and not (chosen and there <= during[chosen[-1]]):
            chosen.append(index)
    moments = []
    for index, following in zip(chosen, [*chosen[1:], None], strict=True):
        here = [items[n] for n in during[index]]
        goes_on = [items[n] for n in during[index] if following is not None and n in during[following]]
        moments.append(
            Moment(
                op=None if all(i.stays for i in here) else course.computed[index],
                held=set_of(i.tensor for i in here if i.tensor is not None),
                twice=set_of(i.tensor for i in here if i.tensor is not None and i.is_copy),
                on=set_of(i.tensor for i in goes_on if i.tensor is not None),
            )
        )
    return Pattern(tuple(moments))


@dataclass(frozen=True, slots=True)
class _Prover:
    """Proofs that buffers do not fit, until the limit of the clock."""

    rules: ArenaRules
    capacity_bytes: int
    clock: Clock

    def find_smallest(self, items: Sequence[_Item]) -> list[_Item] | None:
        """Return few of `items`, as short as possible, that do not fit; None if that is not proved of all."""
        found = list(items)
        if not self._refutes(found):
            return None
        found = self._remove_unnecessary(found)
        for n in range(len(found)):
            found[n] = self._shorten(found, n)
        return found

    def _refutes(self, items: Sequence[_Item]) -> bool:
        """Return True if it is proved that `items` do not fit."""
        buffers = [Buffer(str(n), i.first, i.last + 1, i.size, self.rules.alignment) for n, i in enumerate(items)]
        if not buffers or measure_rest(self.clock) <= 0:
            return False
        return (
            solve_by(self.clock.start_part(_PROOF * self.clock.limit), buffers, self.capacity_bytes).status is Status.INFEASIBLE
        )

    def _remove_unnecessary(self, items: list[_Item]) -> list[_Item]:
        """Return `items` without those that a proof does not need: many at once, then one by one, small ones first."""
        found = sorted(items, key=lambda item: item.size * (item.last - item.first + 1))
        count = len(found) // 2
        while count:
            begin = 0
            while begin < len(found):
                fewer = found[:begin] + found[begin + count :]
                if self._refutes(fewer):
                    found = fewer
                else:
                    begin += count
            count //= 2
        return found

    def _shorten(self, items: Sequence[_Item], n: int) -> _Item:
        """Return item n of `items` with the shortest lifetime with which they do not fit."""

        def is_refuted(item: _Item) -> bool:
            return self._refutes([*items[:n], item, *items[n + 1 :]])

        item = items[n]
        first = _find_last_true(item.first, item.last, lambda first: is_refuted(replace(item, first=first)))
        item = replace(item, first=first)
        last = -_find_last_true(-item.last, -item.first, lambda last: is_refuted(replace(item, last=-last)))
        return replace(item, last=last)


def _find_last_true(first: int, last: int, holds: Callable[[int], bool]) -> int:
    """Return the last number from `first`, for which `holds` is true, to `last` for which it is, if it is monotone."""
    return last - bisect_left(range(last, first, -1), True, key=holds)
