"""Addresses for buffers in the smallest arena, or in one of a given capacity, with a proof or a gap.

Best fit alone takes up to 6.8% more than the bytes in use at once on the plans of the zoo. In a step that recomputes most buffers
are never in use with those of the peak: so those of the tightest sections are placed first, by all of this search, and the others
around them. Known weakness: above ``_LARGEST`` buffers there is no exact search, and a gap above the bytes in use at once stays
unproved.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.graphs.addresses import AddressError, Buffer, Offsets
from planner.solvers.addresses.greedy import construct_offsets, improve
from planner.solvers.addresses.instance import Instance, split_into_instances
from planner.solvers.addresses.search import AddressSearch
from planner.solvers.clock import Clock, WallClock, WorkClock, measure_rest
from planner.solvers.result import Status

_LARGEST = 3000  # buffers that are searched exactly
_IMPROVING = 0.03  # of the time, for the improvement of orders before it
_TIGHT = (0.97, 0.9, 0.8)  # of the most that is in use at once: buffers of the sections with more are placed first
_TIGHT_BUFFERS = 0.5  # of all buffers: where more are in those sections, nothing is gained by placing them first
_TIGHT_TIME = 0.1  # of the time that is left, for each share
_PATIENCE = 30  # orders that are tried without a gain
_AT_BOUND = 1 / 2  # of the time, for the first search at the bound, which is met nearly always
_ABOVE_BOUND = 1 / 8  # for each of the next ones, above it
_HEIGHTS = (0.0, 0.5, 0.75, 0.9, 1.0)  # between the bound and the best arena, which a search aims at


@dataclass(frozen=True, slots=True)
class AddressResult:
    """The result of a search for addresses: offsets, the size of the arena and its lower bound.

    Attributes:
        status: OPTIMAL (the arena is as small as the bound), FEASIBLE (or it fits the given capacity), INFEASIBLE
            (proved: no arena fits the capacity), LIMIT (none found that fits, and nothing proved).
        offsets: None unless the status is OPTIMAL or FEASIBLE.
        height_bytes: size of the smallest arena that was found, even if it exceeds the capacity.
        bound_bytes: lower bound on the size of any arena.
        capacity_bytes: the given capacity; None if the smallest arena was asked for.
        seconds: wall time of the search.
    """

    status: Status
    offsets: Offsets | None
    height_bytes: int
    bound_bytes: int
    capacity_bytes: int | None
    seconds: float

    @property
    def gap(self) -> float:
        """(height - bound) / bound."""
        return self.height_bytes / self.bound_bytes - 1 if self.bound_bytes else 0.0


def solve(
    buffers: Sequence[Buffer],
    capacity_bytes: int | None = None,
    *,
    time_limit_s: float = 60.0,
    work_limit: float | None = None,
    seed: int = 0,
) -> AddressResult:
    """Find offsets for `buffers` in an arena of `capacity_bytes`, or in the smallest one that is found.

    Args:
        buffers: of any number of pools, whose ranges of addresses are put one above the other.
        capacity_bytes: of the arena. None for the smallest.
        time_limit_s: seconds after which the best that was found is returned.
        work_limit: as many units of about a second each in place of it: the same answer on every machine.

    Raises:
        AddressError: two buffers have the same id.
    """
    clock: Clock = WallClock(time_limit_s) if work_limit is None else WorkClock(work_limit)
    return solve_by(clock, buffers, capacity_bytes, seed=seed)


def solve_by(clock: Clock, buffers: Sequence[Buffer], capacity_bytes: int | None = None, *, seed: int = 0) -> AddressResult:
    """Find offsets as ``solve`` does, until the limit of `clock`."""
    began = time.monotonic()
    _check_ids(buffers)
    arenas = [_Arena([b for b in buffers if b.pool == pool], seed) for pool in dict.fromkeys(b.pool for b in buffers)]
    for arena in arenas:
        arena.construct(clock)
    for number, arena in enumerate(arenas):
        goal = _build_goal(capacity_bytes, [other for other in arenas if other is not arena])
        arena.search(clock.start_part(measure_rest(clock) / (len(arenas) - number)), goal)
    return _build_result(buffers, arenas, capacity_bytes, time.monotonic() - began)


@dataclass(frozen=True, slots=True)
class _Goal:
    """Thresholds that end a search: an arena of at most `enough_bytes`, or a lower bound above `most_bytes`."""

    enough_bytes: int
    most_bytes: int


def _build_goal(capacity_bytes: int | None, others: Sequence["_Arena"]) -> _Goal | None:
    """Return the goal of an arena that shares a capacity with `others`; None is for the smallest."""
    if capacity_bytes is None:
        return None
    enough_bytes = capacity_bytes - sum(other.height_bytes for other in others)
    return _Goal(enough_bytes, capacity_bytes - sum(other.bound_bytes for other in others))


class _Arena:
    """The buffers of one pool, with the best offsets found so far and a lower bound on the size of the arena."""

    def __init__(self, buffers: Sequence[Buffer], seed: int) -> None:
        self.buffers = buffers
        self._seed = seed
        self._instances = split_into_instances(buffers)
        self._searches: dict[int, AddressSearch] = {}
        self._best: list[tuple[int, ...]] = []
        self._heights: list[int] = []
        self.bound_bytes = max(instance.bound_bytes for instance in self._instances)

    @property
    def height_bytes(self) -> int:
        """Bytes of the arena."""
        return max(self._heights)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Offsets in bytes."""
        offsets = [0] * len(self.buffers)
        for instance, best in zip(self._instances, self._best, strict=True):
            for index, offset in zip(instance.index, best, strict=True):
                offsets[index] = offset * instance.unit
        return tuple(offsets)

    def construct(self, clock: Clock) -> None:
        """Place buffers one after the other in several orders, and improve the orders for a while."""
        for instance in self._instances:
            found = construct_offsets(instance, clock)
            best = next(found)
            for offsets in found:
                if instance.compute_height_bytes(best) <= self.bound_bytes:
                    break
                best = min(best, offsets, key=instance.compute_height_bytes)
            if instance.compute_height_bytes(best) > self.bound_bytes:
                best = min([best, *self._place_tight_first(instance, clock)], key=instance.compute_height_bytes)
            exact = len(instance.size) <= _LARGEST
            part = clock.start_part(measure_rest(clock) * (_IMPROVING if exact else 1))
            best = improve(instance, best, self.bound_bytes, part, seed=self._seed, patience=_PATIENCE if exact else None)
            self._best.append(best)
            self._heights.append(instance.compute_height_bytes(best))

    def _place_tight_first(self, instance: Instance, clock: Clock) -> Iterator[tuple[int, ...]]:
        """Yield offsets that begin with the buffers of the tightest sections, which are placed by themselves.

        The rest has room to spare, and is placed around them. In a step that recomputes, where thousands of buffers are never in
        use with those of the peak, the bound is met so.
        """
        for share in _TIGHT:
            first = instance.find_tight_buffers(share)
            if len(first) > _TIGHT_BUFFERS * len(instance.size):
                return
            arena = _Arena([self.buffers[instance.index[u]] for u in first], self._seed)
            part = clock.start_part(_TIGHT_TIME * measure_rest(clock))
            arena.construct(part)
            arena.search(part.start_part(measure_rest(part) / 2), None)
            fixed = {u: offset // instance.unit for u, offset in zip(first, arena.offsets, strict=True)}
            for offsets in construct_offsets(instance, part, fits=(False, True), fixed=fixed):
                yield offsets
                if instance.compute_height_bytes(offsets) <= self.bound_bytes:
                    return

    def search(self, clock: Clock, goal: _Goal | None) -> None:
        """Search at one height after the other until the goal is reached, the bound is met, or the time is up."""
        time_limit = measure_rest(clock)
        rounds = 0
        while measure_rest(clock) > 0:
            for share in _HEIGHTS if goal is None else _HEIGHTS[:1]:
                floor_bytes = self.bound_bytes if goal is None else max(self.bound_bytes, goal.enough_bytes)
                if self.height_bytes <= floor_bytes or (goal is not None and self.bound_bytes > goal.most_bytes):
                    return
                target_bytes = int(floor_bytes + share * (self.height_bytes - 1 - floor_bytes))
                part = 1.0 if goal is not None else _ABOVE_BOUND if share else _AT_BOUND
                if self._search_within(target_bytes, clock.start_part(part * 2**rounds * time_limit)) or measure_rest(clock) <= 0:
                    break
            else:
                rounds += 1
            if not any(self._open(number) for number in range(len(self._instances))):
                return

    def _open(self, number: int) -> bool:
        """Return True if an instance is higher than the bound, and not too large to be searched."""
        return self._heights[number] > self.bound_bytes and len(self._instances[number].size) <= _LARGEST

    def _search_within(self, target_bytes: int, clock: Clock) -> bool:
        """Search for offsets of all instances within `target_bytes`; return True if they were found or proved not to exist."""
        for number, instance in enumerate(self._instances):
            if self._heights[number] <= target_bytes:
                continue
            if not self._open(number):
                return False
            if number not in self._searches:
                self._searches[number] = AddressSearch(instance, seed=self._seed)
            answer = self._searches[number].decide(target_bytes, clock)
            if answer.offsets is None:
                self.bound_bytes = max(self.bound_bytes, answer.needed_bytes)
                return answer.needed_bytes > 0
            self._best[number] = answer.offsets
            self._heights[number] = instance.compute_height_bytes(answer.offsets)
        return True


def _check_ids(buffers: Sequence[Buffer]) -> None:
    seen: set[str] = set()
    for buffer in buffers:
        if buffer.id in seen:
            raise AddressError(f"two buffers have the id {buffer.id!r}")
        seen.add(buffer.id)


def _build_result(
    buffers: Sequence[Buffer], arenas: Sequence[_Arena], capacity_bytes: int | None, seconds: float
) -> AddressResult:
    """Put the arenas one above the other."""
    offsets: dict[str, int] = {}
    base = 0
    for arena in arenas:
        base += -base % math.lcm(*(buffer.alignment for buffer in arena.buffers))
        offsets.update((b.id, base + offset) for b, offset in zip(arena.buffers, arena.offsets, strict=True))
        base += arena.height_bytes
    found = Offsets(tuple(buffers), tuple(offsets[buffer.id] for buffer in buffers))
    bound_bytes = sum(arena.bound_bytes for arena in arenas)
    height_bytes = found.height_bytes
    if capacity_bytes is not None and height_bytes > capacity_bytes:
        status = Status.INFEASIBLE if bound_bytes > capacity_bytes else Status.LIMIT
        return AddressResult(status, None, height_bytes, bound_bytes, capacity_bytes, seconds)
    status = Status.OPTIMAL if height_bytes == bound_bytes else Status.FEASIBLE
    return AddressResult(status, found, height_bytes, bound_bytes, capacity_bytes, seconds)
