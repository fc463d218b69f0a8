"""Exact search for offsets below a capacity, from the bottom of the arena to the top.

A solution is *canonical* if no buffer can be moved down alone: each lies at the bottom or on another one. If there is a
solution, there is a canonical one (Moffitt, MiniMalloc, ASPLOS 2023). Buffers are placed from the bottom: the state is the
set of those that are left, and in each section the *floor* below which none of them can be.

A *valley* is a run of sections with one floor, and a higher one on either side. In each of its sections there are two
possibilities: a buffer that is left lies on the floor (and within the valley), or none does, and the floor rises to where
the lowest may be. The search branches where the possibilities are fewest.

What differs from MiniMalloc: it branches over all buffers in the order of their offsets, this search over one section of a
valley; its section inference is the special case of the bound here in which all buffers are ready at once. CP-SAT of OR-Tools,
with no-overlap in two dimensions and a cumulative row, solved two of six public instances in a minute with two workers; this
search solves and proves all six (docs/addresses.md).

Known weaknesses: it needs luck, as about one dive in twenty solves the hardest public instance; and four plans of over 2,300
buffers (DenseNet-121) are left without a proof, at most 0.2% above the bound.
"""

import random
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

from planner.solvers.addresses.instance import Instance
from planner.solvers.clock import Clock, measure_rest

_WORK = 5e-7  # of one buffer in one section that is looked at
_CHECK = 2000  # such looks between two readings of the clock
_MOST_FAILED = 20_000_000  # numbers in the states that are remembered
_GROWTH = 1.03  # of the nodes of a dive, from one to the next


@dataclass(frozen=True, slots=True)
class CapacityAnswer:
    """The result of a search for offsets within one capacity.

    Attributes:
        offsets: offset of each buffer in units; None if none were found within the capacity.
        needed_bytes: proved lower bound on the size of the arena, above the capacity; 0 if nothing was proved.
    """

    offsets: tuple[int, ...] | None
    needed_bytes: int = 0


class _OutOfNodes(Exception):  # noqa: N818
    pass


class _OutOfTime(Exception):  # noqa: N818
    pass


@dataclass(slots=True)
class _State:
    """A node of the search: the floors, and the buffers that are not placed yet. Copied at each branch.

    Buffers with the same lifetime and alignment form a *kind* and share their lowest offset. Offsets and sizes are in units.

    Attributes:
        latest: for each section, the highest floor at which the unplaced buffers still fit below the capacity.
        resting: for each section, the number of distinct unplaced buffers that can lie on its floor.
        low: for each kind, the lowest feasible offset.
        members: for each kind, the unplaced buffers, largest first.
        total: for each kind, the total size of its members.
        variety: for each kind, the number of distinct members.
    """

    floor: list[int]
    latest: list[int]
    resting: list[int]
    low: list[int]
    members: list[tuple[int, ...]]
    total: list[int]
    variety: list[int]

    def copy(self) -> "_State":
        return _State(
            self.floor[:],
            self.latest[:],
            self.resting[:],
            self.low[:],
            self.members[:],
            self.total[:],
            self.variety[:],
        )


class AddressSearch:
    """An exact search for one instance, which remembers infeasible states from one call to the next."""

    def __init__(self, instance: Instance, *, seed: int = 0) -> None:
        self._instance = instance
        self._size = instance.size
        self._random = random.Random(seed)
        kinds: dict[tuple[int, int, int], list[int]] = {}
        for u, lifetime in enumerate(zip(instance.lower, instance.upper, instance.alignment, strict=True)):
            kinds.setdefault(lifetime, []).append(u)
        self._lower, self._upper, self._alignment = zip(*kinds, strict=True)
        self._members = [tuple(sorted(kind, key=self._look_of)) for kind in kinds.values()]
        self._kind = {u: kind for kind, members in enumerate(self._members) for u in members}
        # Kinds that are in use in each section, and at the same time as another.
        self._sections = [sorted({self._kind[u] for u in section}) for section in instance.sections]
        self._met = [
            [v for v, (low, high) in enumerate(zip(self._lower, self._upper, strict=True)) if low < end and start < high]
            for start, end in zip(self._lower, self._upper, strict=True)
        ]
        self._offsets = [0] * len(self._size)
        self._failed: dict[tuple[object, ...], int] = {}  # by state: bytes that it takes at least
        self._failed_numbers = 0
        self._looks = 0

    def decide(self, capacity_bytes: int, clock: Clock) -> CapacityAnswer:
        """Find offsets within `capacity_bytes`, or prove that there are none, until `clock` is at its limit.

        Each dive is given up after some nodes, and the next one orders what it tries in another way; what was proved stays.
        """
        n, unit, pads = len(self._size), self._instance.unit, self._instance.pad_bytes
        self._padded = max(pads) > 0
        self._capacity_bytes, self._capacity = capacity_bytes, (capacity_bytes + max(pads)) // unit
        self._clock = clock
        nodes = 2.0 * n + 50
        with _allow_deep_recursion(10 * n):
            for dive in count():
                if measure_rest(clock) <= 0:
                    break
                self._rank, self._fitting = self._compute_ranks()
                self._by_level = dive % 4 == 3
                self._nodes = int(nodes)
                nodes *= _GROWTH
                try:
                    needed = self._search_root()
                except _OutOfNodes:
                    continue
                except _OutOfTime:
                    break
                return CapacityAnswer(None, needed) if needed else CapacityAnswer(tuple(self._offsets))
        return CapacityAnswer(None)

    def _look_of(self, u: int) -> tuple[int, int]:
        """Return the sort key of buffer `u` within its kind, largest first; buffers with equal keys are interchangeable."""
        return -self._size[u], -self._instance.pad_bytes[u]

    def _find_representatives(self, members: Sequence[int]) -> dict[tuple[int, int], int]:
        """Return the first of `members` for each key: of interchangeable buffers, only this one need be tried."""
        return {self._look_of(u): u for u in reversed(members)}

    def _compute_ranks(self) -> tuple[list[float], float]:
        """Return a randomized priority for each buffer from its size and lifetime, and a bonus for buffers that fit a valley."""
        draw = self._random
        of_size, of_length, noise = draw.random(), draw.random(), draw.choice((0.1, 0.3, 0.6))
        lengths = [high - low for low, high in zip(self._instance.lower, self._instance.upper, strict=True)]
        ranks = [
            size**of_size * length**of_length * (1 + draw.uniform(-noise, noise))
            for size, length in zip(self._size, lengths, strict=True)
        ]
        return ranks, draw.choice((0.0, 0.5, 2.0))

    def _search_root(self) -> int:
        k, m = len(self._members), len(self._sections)
        state = _State(
            floor=[0] * m,
            latest=[self._capacity - live for live in self._instance.live],
            resting=[0] * m,
            low=[0] * k,
            members=self._members[:],
            total=[sum(self._size[u] for u in members) for members in self._members],
            variety=[len(self._find_representatives(members)) for members in self._members],
        )
        return self._follow_floor(state, 0, m, 0, range(k)) or self._place(list(range(k)), state)

    def _place(self, rest: list[int], state: _State) -> int:
        """Place the unplaced buffers of the kinds `rest`; return 0, or a lower bound on the bytes of the arena if none fits."""
        worst = sys.maxsize
        while True:
            self._nodes -= 1
            if self._nodes < 0:
                raise _OutOfNodes
            parts = self._split_into_parts(rest)
            if len(parts) != 1:
                return min(worst, self._complete_each(parts, state)) if parts else 0
            start, end = self._lower[rest[0]], max([self._upper[v] for v in rest])
            section, first, last = self._find_narrowest(start, end, state)
            choices, raised, needed = self._list_choices(rest, section, state)
            worst = min(worst, needed)
            if len(choices) + (raised is not None) != 1:
                break
            # Forced: no other choice, so neither a copy of the state nor a level of recursion is needed.
            needed = self._apply(choices[0] if choices else None, section, raised, state)
            if needed:
                return min(worst, needed)
            if choices and not state.members[self._kind[choices[0]]]:
                rest = [v for v in rest if state.members[v]]
        if not choices and raised is None:
            return worst
        # How what is below was stacked does not matter for what is left, so it is not in the key.
        key = (*[state.members[v] for v in rest], *state.floor[start:end])
        # Also of searches at other capacities: what is known is how much the state takes at least.
        if (known := self._failed.get(key, 0)) > self._capacity_bytes:
            return min(worst, known)
        self._sort(choices, first, last, state)
        for u in [*choices, *([None] if raised is not None else [])]:
            branch = state.copy()
            needed = self._apply(u, section, raised, branch) or self._place([v for v in rest if branch.members[v]], branch)
            if not needed:
                return 0
            worst = min(worst, needed)
        self._remember(key, worst)
        return worst

    def _complete_each(self, parts: list[list[int]], state: _State) -> int:
        """Complete each of `parts`, which have no section in common: smallest first, and none if one cannot be."""
        for part in sorted(parts, key=len):
            if needed := self._place(part, state):
                return needed
        return 0

    def _split_into_parts(self, rest: list[int]) -> list[list[int]]:
        """Return `rest` in groups that have no section in common."""
        parts: list[list[int]] = []
        begin, end, lower, upper = 0, -1, self._lower, self._upper
        for place, v in enumerate(rest):
            if lower[v] >= end:
                if place:
                    parts.append(rest[begin:place])
                begin = place
            if upper[v] > end:
                end = upper[v]
        if rest:
            parts.append(rest[begin:])
        return parts

    def _find_narrowest(self, start: int, end: int, state: _State) -> tuple[int, int, int]:
        """Return the section with the fewest choices among those of valleys, and the valley's first section and end.

        Among equals it is one with the least slack, or in every fourth dive the lowest floor.
        """
        floor, resting, latest = state.floor, state.resting, state.latest
        best, found = (sys.maxsize, 0), (start, start, end)
        by_level = self._by_level
        i = start
        while i < end:
            level, j = floor[i], i + 1
            while j < end and floor[j] == level:
                j += 1
            if (i == start or floor[i - 1] > level) and (j == end or floor[j] > level):
                for s in range(i, j):
                    slack = latest[s] - level
                    score = resting[s] + (slack > 0), level if by_level else slack
                    if score < best:
                        best, found = score, (s, i, j)
            i = j
        return found

    def _list_choices(self, rest: Sequence[int], section: int, state: _State) -> tuple[list[int], int | None, int]:
        """Return the branches in `section`: buffers that may lie on its floor, and the offset to which it rises if none does.

        The offset is None if the capacity is too small for the floor to rise. The third item is then the capacity in bytes from
        which it could rise; ``sys.maxsize`` if there is none.
        """
        low, members, size, lower, upper = state.low, state.members, self._size, self._lower, self._upper
        level = state.floor[section]
        resting, raised = [], sys.maxsize
        for v in self._sections[section]:
            if members[v]:
                if low[v] == level:
                    resting.append(v)
                elif low[v] < raised:
                    raised = low[v]
        # One of `resting` that does not lie on the floor lies on another one, which is not in this section.
        begin, end = min([lower[v] for v in resting]), max([upper[v] for v in resting])
        for v in rest:
            if lower[v] < end and begin < upper[v] and not lower[v] <= section < upper[v]:
                top = low[v] + size[members[v][-1]]
                if top < raised:
                    raised = top
        choices = [u for v in resting for u in self._find_representatives(members[v]).values()]
        if raised <= state.latest[section]:
            return choices, raised, sys.maxsize
        needed = sys.maxsize if raised == sys.maxsize else self._compute_bytes(self._capacity + raised - state.latest[section])
        return choices, None, needed

    def _sort(self, choices: list[int], first: int, last: int, state: _State) -> None:
        """Put large buffers first, and those that fill the width of the valley or end at the height of one of its sides."""
        rank, fitting, floor, kind = self._rank, self._fitting, state.floor, self._kind
        gains = 1.0, 1.0 + fitting, (1.0 + fitting) * (1.0 + fitting)
        sides = {floor[first - 1] if first else -1, floor[last] if last < len(floor) else -1}
        values: dict[int, float] = {}
        for u in choices:
            v = kind[u]
            fits = (state.low[v] + self._size[u] in sides) + (self._upper[v] - self._lower[v] == last - first)
            values[u] = -rank[u] * gains[fits]
        choices.sort(key=values.__getitem__)

    def _apply(self, u: int | None, section: int, raised: int | None, state: _State) -> int:
        """Place `u` at its lowest offset, or raise the floor of `section`. Returns 0 or a lower bound, as ``_follow_floor``."""
        if u is None:
            assert raised is not None
            state.floor[section] = raised
            return self._follow_floor(state, section, section + 1, raised, self._sections[section])
        v, size = self._kind[u], self._size[u]
        start, end, offset = self._lower[v], self._upper[v], state.low[v]
        self._offsets[u] = offset
        state.members[v] = members = tuple([other for other in state.members[v] if other != u])
        state.total[v] -= size
        state.variety[v] = len(self._find_representatives(members))
        state.floor[start:end] = [offset + size] * (end - start)
        state.latest[start:end] = [latest + size for latest in state.latest[start:end]]
        return self._follow_floor(state, start, end, offset + size, self._met[v])

    def _follow_floor(self, state: _State, start: int, end: int, level: int, met: Sequence[int]) -> int:
        """Follow the floor of the sections from `start` to `end`, which is at `level` now.

        The kinds `met` in use there are raised; a section where none rests on the floor any more has its floor raised to the
        lowest of them. Returns 0, or a lower bound on the bytes of the arena if the rest does not fit.
        """
        floor, latest, resting, low, members = state.floor, state.latest, state.resting, state.low, state.members
        lower, upper, alignment = self._lower, self._upper, self._alignment
        changed, full = set(range(start, end)), set[int]()
        for v in met:
            before = low[v]
            if before >= level or not members[v]:
                continue
            now = level + -level % alignment[v]
            if self._padded and (needed := self._find_needed_bytes_at(now, members[v])):
                return needed
            low[v] = now
            first, last = lower[v], upper[v]
            try:
                s = first - 1
                while True:
                    s = floor.index(before, s + 1, last)
                    if not start <= s < end:
                        resting[s] -= state.variety[v]
                        if resting[s] <= 0:
                            changed.add(s)
            except ValueError:  # it rests in no other section
                pass
            if now > min(latest[first:last]):
                full.update([s for s in range(first, last) if latest[s] < now])
        for s in changed:
            kinds = [v for v in self._sections[s] if members[v]]
            if kinds:
                lows = [low[v] for v in kinds]
                floor[s] = lowest = min(lows)
                resting[s] = sum([state.variety[v] for v in kinds if low[v] == lowest])
                if max(lows) > latest[s]:
                    full.add(s)
        self._count(len(met) + 8 * (len(changed) + len(full)))
        return self._find_needed_bytes(full, state)

    def _find_needed_bytes(self, sections: Collection[int], state: _State) -> int:
        """Return 0, or the bytes that one of `sections` takes at least.

        What is left in a section are jobs on one machine, which is ready for each at its lowest offset: done in the order of
        these, they end as early as possible.
        """
        low, total, members = state.low, state.total, state.members
        for s in sections:
            jobs = [(low[v], total[v]) for v in self._sections[s] if members[v]]
            jobs.sort(reverse=True)
            behind = 0
            for ready, takes in jobs:
                behind += takes
                if ready + behind > self._capacity:
                    return self._compute_bytes(ready + behind)
        return 0

    def _find_needed_bytes_at(self, offset: int, members: Sequence[int]) -> int:
        """Return 0, or the bytes that one of `members` takes at least at `offset`."""
        unit, pads = self._instance.unit, self._instance.pad_bytes
        needed = max([(offset + self._size[u]) * unit - pads[u] for u in members])
        return needed if needed > self._capacity_bytes else 0

    def _compute_bytes(self, units: int) -> int:
        """Return the least bytes of an arena that takes `units`, whatever lies on top."""
        return units * self._instance.unit - max(self._instance.pad_bytes)

    def _count(self, looks: int) -> None:
        self._looks += looks
        if self._looks > _CHECK:
            self._clock.spend(_WORK * self._looks)
            self._looks = 0
            if measure_rest(self._clock) <= 0:
                raise _OutOfTime

    def _remember(self, key: tuple[object, ...], needed: int) -> None:
        """Record the least bytes that a state, given by its key, needs."""
        if self._failed_numbers > _MOST_FAILED:
            self._failed.clear()
            self._failed_numbers = 0
        self._failed_numbers += len(key)
        self._failed[key] = needed


@contextmanager
def _allow_deep_recursion(depth: int) -> Iterator[None]:
    """Let functions call each other so deep; a call of Python takes none of the C stack."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, before + depth))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
