"""Buffers of a step and their addresses in one arena: the data, and the judge of every answer.

The judge shares no code with any solver: a mistake there shows here.

Times are moments, of which a step of the schedule may have several: an op may free a first workspace before it asks for an
output, and on a device the order of requests decides where the allocator puts them.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.graphs.clocks import run_clocks
from planner.graphs.errors import PlannerError
from planner.graphs.ir import Graph, Op
from planner.graphs.overwriting import Overwriting, Pairs
from planner.graphs.pools import DEVICE
from planner.graphs.requests import WORKSPACE
from planner.graphs.schedule import Compute, Schedule, Step


@dataclass(frozen=True, slots=True)
class Lifetime:
    """An interval in which a tensor is in memory; a recomputed tensor has several.

    Attributes:
        first_step: index of the step that produces it.
        end_step: index of the step that frees it; the number of steps if none does.
        start_s: start of the op that produces it.
        end_s: time at which its bytes are free; the end of the schedule if they stay.
    """

    first_step: int
    end_step: int
    start_s: float
    end_s: float


def find_lifetimes(graph: Graph, schedule: Schedule) -> tuple[tuple[Lifetime, ...], ...]:
    """Return the lifetimes of each tensor of `graph`, in order; static tensors have none."""
    clocks = run_clocks(graph, schedule)
    found: list[list[Lifetime]] = [[] for _ in graph.tensors]
    since: dict[int, int] = {}
    for index, step in enumerate(schedule.steps):
        if isinstance(step, Compute):
            for t in graph.ops[step.op].outputs:
                since.setdefault(t, index)
        else:
            first = since.pop(step.tensor)
            found[step.tensor].append(Lifetime(first, index, clocks.starts_s[first], clocks.ends_s[index]))
    for t, first in since.items():
        found[t].append(Lifetime(first, len(schedule.steps), clocks.starts_s[first], max(clocks.clocks_s)))
    return tuple(map(tuple, found))


class AddressError(PlannerError):
    """Buffers that no arena can hold, or addresses at which they would overwrite each other; names the buffers."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory of one size that is in use for a while.

    Attributes:
        id: unique, for messages.
        lower, upper: in use in the half-open interval [lower, upper) of time.
        size: bytes.
        alignment: its offset must be a multiple of this.
        pool: buffers of different pools (or streams) never use the same address, not even at different times.

    Raises:
        AddressError: lower is not below upper; the size or the alignment is not above zero.
    """

    id: str
    lower: int
    upper: int
    size: int
    alignment: int = 1
    pool: str = DEVICE

    def __post_init__(self) -> None:
        if self.lower >= self.upper:
            raise AddressError(f"buffer {self.id!r} has the lifetime [{self.lower}, {self.upper}): lower must be below upper")
        if self.size <= 0:
            raise AddressError(f"buffer {self.id!r} has a size of {self.size}: it must be above 0")
        if self.alignment <= 0:
            raise AddressError(f"buffer {self.id!r} has an alignment of {self.alignment}: it must be above 0")


@dataclass(frozen=True, slots=True)
class Offsets:
    """An address for each of `buffers`, in bytes from the start of the arena.

    Raises:
        AddressError: an offset is below zero or not aligned; buffers that are in use at once overlap; pools overlap.
    """

    buffers: tuple[Buffer, ...]
    offsets: tuple[int, ...]

    def __post_init__(self) -> None:
        check_offsets(self.buffers, self.offsets)

    @property
    def height_bytes(self) -> int:
        """Bytes of the arena."""
        return max((offset + buffer.size for buffer, offset in zip(self.buffers, self.offsets, strict=True)), default=0)


def check_offsets(buffers: Sequence[Buffer], offsets: Sequence[int]) -> None:
    """Raise an AddressError unless `offsets` are addresses that `buffers` can have, in O(n log n) comparisons."""
    if len(buffers) != len(offsets):
        raise AddressError(f"there are {len(offsets)} offsets for {len(buffers)} buffers")
    for buffer, offset in zip(buffers, offsets, strict=True):
        if offset < 0 or offset % buffer.alignment:
            raise AddressError(f"buffer {buffer.id!r} is at {offset}: must be a multiple of {buffer.alignment}, 0 or more")
    _check_pools(buffers, offsets)
    # Those that are in use, by offset: as they do not overlap, only neighbours have to be compared.
    live: list[tuple[int, int]] = []
    ends = [(buffer.upper, 0, index) for index, buffer in enumerate(buffers)]
    starts = [(buffer.lower, 1, index) for index, buffer in enumerate(buffers)]
    for _, starting, index in sorted(ends + starts):
        entry = offsets[index], index
        place = bisect_left(live, entry)
        if not starting:
            del live[place]
            continue
        for other in live[max(0, place - 1) : place + 1]:
            (low, first), (high, second) = sorted((entry, other))
            if low + buffers[first].size > high:
                raise AddressError(
                    f"buffers {buffers[first].id!r} at {low} and {buffers[second].id!r} at {high} are in use at the same "
                    f"time, and the first takes {buffers[first].size} bytes"
                )
        insort(live, entry)


def _check_pools(buffers: Sequence[Buffer], offsets: Sequence[int]) -> None:
    """Raise if the ranges of addresses of two pools overlap."""
    ranges: dict[str, tuple[int, int]] = {}
    for buffer, offset in zip(buffers, offsets, strict=True):
        low, high = ranges.get(buffer.pool, (offset, offset))
        ranges[buffer.pool] = min(low, offset), max(high, offset + buffer.size)
    ordered = sorted((low, high, pool) for pool, (low, high) in ranges.items())
    for (_, high, pool), (low, _, other) in pairwise(ordered):
        if low < high:
            raise AddressError(f"pools {pool!r} and {other!r} share addresses: one ends at {high}, the other begins at {low}")


def live_bytes(buffers: Sequence[Buffer]) -> int:
    """Return the most bytes that are in use at once, summed over pools: no arena is smaller."""
    total = 0
    for pool in {buffer.pool for buffer in buffers}:
        changes = [(buffer.lower, buffer.size) for buffer in buffers if buffer.pool == pool]
        changes += [(buffer.upper, -buffer.size) for buffer in buffers if buffer.pool == pool]
        live = most = 0
        for _, change in sorted(changes):  # what ends goes first
            live += change
            most = max(most, live)
        total += most
    return total


def buffers_of(
    graph: Graph, schedule: Schedule, *, pool: str = DEVICE, alignment: int = 1, moments: int = 1
) -> tuple[Buffer, ...]:
    """Return the buffers in memory `pool` of a step, one for each stay of a tensor there.

    An output that is written over an input shares its buffer. Workspaces, and the second copies of outputs that are in
    memory already, are buffers of one step. Static tensors are left out: the most bytes in use at once are the peak of
    ``simulate`` less ``Graph.static_bytes``.

    Args:
        moments: a step of the schedule takes so much of the buffers' time. With 1, all that an op takes begins at once; with
            ``count_moments``, its requests follow one another.
    """
    in_order = _InOrder(graph, moments)
    stays = [{life.first_step: life.end_step for life in of_tensor} for of_tensor in find_lifetimes(graph, schedule)]
    overwriting = Overwriting(graph)
    pairs = [overwriting.follow(schedule.steps, index) for index in range(len(schedule.steps))]
    joined = _join_stays(pairs, stays)
    parts = set(joined.values())
    buffers = []
    for tensor, found in zip(graph.tensors, stays, strict=True):
        if tensor.pool != pool or not tensor.size_bytes:
            continue
        for number, first in enumerate(found, 1):
            stay = tensor.id, first
            if stay in parts:
                continue
            while stay in joined:
                stay = joined[stay]
            end = stays[stay[0]][stay[1]]
            name = tensor.name if number == 1 else f"{tensor.name}#{number}"
            lower = in_order.find_request_time(schedule.steps[first], first, tensor.id)
            buffers.append(Buffer(name, lower, end * moments, tensor.size_bytes, alignment, pool))
    for index, name, passing in _iterate_passing(graph, schedule, pairs, stays, pool, in_order):
        buffers.append(Buffer(f"{name} of step {index}", *passing, alignment, pool))
    return tuple(buffers)


def count_moments(graph: Graph) -> int:
    """Return the least number of moments in a step, so that all requests of an op have their own."""
    return 1 + max(max(len(op.requests), len(op.outputs) + 1) for op in graph.ops)


class _InOrder:
    """The times of the requests of ops: those of a step begin at its index times `moments`."""

    def __init__(self, graph: Graph, moments: int) -> None:
        self._graph, self._moments = graph, moments

    def end(self, index: int) -> int:
        """Return the time at which the step at `index` ends."""
        return (index + 1) * self._moments

    def find_request_time(self, step: Step, index: int, tensor: int) -> int:
        """Return the time at which the step at `index` requests memory for the output `tensor`."""
        if self._moments == 1 or not isinstance(step, Compute):
            return index * self._moments
        op = self._graph.ops[step.op]
        position = op.outputs.index(tensor)
        places = (place for place, request in enumerate(op.requests) if request.output == position)
        return index * self._moments + next(places, position)

    def iterate_workspaces(self, index: int, op: Op) -> Iterator[tuple[int, int, int]]:
        """Yield beginning, end and bytes of each workspace; all are freed within the step, if it has several moments."""
        begin = index * self._moments
        if self._moments == 1:
            if op.workspace_bytes:
                yield begin, begin + 1, op.workspace_bytes
        elif not op.requests:
            if op.workspace_bytes:
                yield begin + len(op.outputs), begin + len(op.outputs) + 1, op.workspace_bytes
        else:
            for place, request in enumerate(op.requests):
                if request.output == WORKSPACE:
                    yield begin + place, begin + request.until, request.size_bytes


_Stay = tuple[int, int]  # of a tensor: its id, and the step that makes it
_Stays = Sequence[Mapping[int, int]]  # by tensor: by the step that makes it the one that frees it


def _join_stays(pairs: Sequence[Pairs], stays: _Stays) -> dict[_Stay, _Stay]:
    """Return for each stay that is written over the one that follows at its address."""
    joined = {}
    for index, over in enumerate(pairs):
        for output, t in over:
            if index in stays[output]:  # else it is a second copy, which goes at once
                joined[t, max(first for first in stays[t] if first < index)] = output, index
    return joined


def _iterate_passing(
    graph: Graph, schedule: Schedule, pairs: Sequence[Pairs], stays: _Stays, pool: str, in_order: _InOrder
) -> Iterator[tuple[int, str, tuple[int, int, int]]]:
    """Yield the buffers that are in use during one step only: workspaces, and second copies of outputs.

    Each is yielded as the index of the step, a name, and a tuple of begin, end and bytes.
    """
    works_for = {owner: next(p.name for p in graph.pools if p.owner == owner) for owner in {p.owner for p in graph.pools}}
    for index, step in enumerate(schedule.steps):
        if not isinstance(step, Compute):
            continue
        op = graph.ops[step.op]
        if works_for.get(op.stream) == pool:
            for number, passing in enumerate(in_order.iterate_workspaces(index, op), 1):
                yield index, "workspace" if number == 1 else f"workspace {number}", passing
        over = {output for output, _ in pairs[index]}
        for t in op.outputs:
            tensor = graph.tensors[t]
            if index not in stays[t] and t not in over and tensor.pool == pool and tensor.size_bytes:
                begin, end = in_order.find_request_time(step, index, t), in_order.end(index)
                yield index, f"second {tensor.name}", (begin, end, tensor.size_bytes)
