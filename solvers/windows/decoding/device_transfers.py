"""Decoding of an order on several devices to a schedule: when transfers are issued, and when their tensors are freed.

The order has each transfer before its reader. Here each is issued as late as it arrives in time, planned backwards over its
channel, or as early as its source is ready and its target has space. A tensor that is still being transferred after its last
reader stays until the transfer is done, or until its memory is needed: then the owner of the pool waits for the transfer.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphs.ir import Graph
from graphs.options.placement import between_devices
from graphs.schedule import Compute, Free, Schedule, Step, schedule_of
from solvers.devices import sizes_in, workspace_bytes_in


@dataclass(frozen=True, slots=True)
class SideBySide:
    """A schedule on several devices.

    Attributes:
        moved: for each execution, in the order of the schedule, its position in the original order.
        time_s: end of the last stream.
        memory_bytes: for each execution the memory of the main device during it.
        fits_elsewhere: True if the other pools with a capacity are large enough.
    """

    schedule: Schedule
    moved: tuple[int, ...]
    time_s: float
    memory_bytes: tuple[int, ...]
    fits_elsewhere: bool


def side_by_side(graph: Graph, computed: Sequence[int], budget_bytes: int) -> SideBySide:
    """Return the schedule of an order of ops of `graph`."""
    limits = [budget_bytes, *(pool.capacity_bytes for pool in graph.pools[1:])]
    moved = _Copies(graph, computed, limits).moved()
    run = Run(graph, schedule_of(graph, [computed[place] for place in moved]), limits)
    return SideBySide(Schedule(tuple(run.steps)), tuple(moved), max(run.clock_s), tuple(run.memory_bytes), run.fits_elsewhere)


class _Copies:
    """The transfers of an order and their positions of issue."""

    def __init__(self, graph: Graph, computed: Sequence[int], limits: Sequence[int | None]) -> None:
        self.graph, self.computed, self.limits = graph, computed, limits
        self.pool = {pool.name: d for d, pool in enumerate(graph.pools)}
        self.brief = schedule_of(graph, computed)  # with the shortest lifetimes
        instant = Run(graph, self.brief, [None] * len(limits), instant_copies=True)
        self.starts_s, self.clocks_s, self.dying = instant.starts_s, instant.clocks_s, instant.dying

    def moved(self) -> list[int]:
        """Return the positions of the order in the order of issue."""
        copies = [place for place, op in enumerate(self.computed) if between_devices(self.graph, self.graph.ops[op])]
        if not copies:
            return list(range(len(self.computed)))
        low, read, rank = self._between()
        latest = self._latest(copies, read)
        room = {d: self._room(d, limit) for d, limit in enumerate(self.limits) if limit is not None}
        issued = {place: place for place in copies}
        before: dict[int, int] = {}  # by transferred tensor, the position before which the transfer is issued
        for place in copies:
            op = self.graph.ops[self.computed[place]]
            (source,), (target,) = op.inputs, op.outputs
            # A source that is freed afterwards is transferred at once: its memory is needed.
            wanted = 0 if source in self.dying[place] else latest[place]
            begin = min(max(low[place], before.get(source, 0), wanted), place)
            free = room.get(self.pool[self.graph.tensors[target].pool])
            if free is not None:
                size = self.graph.tensors[target].size_bytes
                full = np.flatnonzero(free[begin:place] < size)
                begin += int(full[-1]) + 1 if len(full) else 0
                free[begin:place] -= size
            before[target] = issued[place] = begin
        # Of transfers issued at the same position, those come first whose source is ready first.
        return sorted(
            range(len(self.computed)),
            key=lambda place: (issued.get(place, place), place not in issued, rank.get(place, place), place),
        )

    def _between(self) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
        """Return for each transfer the first position at which it can be issued, and the position of its first reader.

        Return also the position after which its source is ready.
        """
        low: dict[int, int] = {}
        read: dict[int, int] = {}
        rank: dict[int, int] = {}
        made: dict[int, int] = {}  # for each tensor the position after the op that produced it, unless that is a transfer
        used: dict[int, int] = {}  # and after the last op that produced or read it
        latest: dict[int, int] = {}  # for each tensor the last transfer that produced it
        copied: dict[int, int] = {}  # likewise, if it has not been read yet
        for place, op_id in enumerate(self.computed):
            op = self.graph.ops[op_id]
            for t in op.inputs:
                if t in copied:
                    read[copied.pop(t)] = place
                used[t] = place + 1
            for t in op.outputs:
                if between_devices(self.graph, op):
                    (source,) = op.inputs
                    low[place] = max(made.get(source, 0), used.get(t, 0))
                    rank[place] = made.get(source, latest.get(source, -1) + 1)
                    copied[t] = latest[t] = place
                    made.pop(t, None)
                else:
                    made[t] = place + 1
                used[t] = place + 1
        return low, read, rank

    def _latest(self, copies: Sequence[int], read: dict[int, int]) -> dict[int, int]:
        """Return for each transfer the last position of issue at which it arrives in time, if its channel is idle before."""
        until_s: dict[str, float] = {}
        latest: dict[int, int] = {}
        for place in sorted(copies, key=lambda place: read.get(place, place), reverse=True):
            op = self.graph.ops[self.computed[place]]
            wanted_s = self.starts_s[read.get(place, place)]
            until_s[op.stream] = min(until_s.get(op.stream, np.inf), wanted_s) - op.time_s
            owner = self.pool[self.graph.tensors[op.outputs[0]].pool]
            clocks = self.clocks_s[owner]
            # The first position at the latest time of the pool's owner before that.
            last = bisect_right(clocks, until_s[op.stream]) - 1
            latest[place] = bisect_left(clocks, clocks[last]) + 1 if last >= 0 else 0
        return latest

    def _room(self, d: int, limit: int) -> NDArray[np.int64]:
        """Return the free memory of a pool during each execution, with the shortest lifetimes."""
        graph, pool = self.graph, self.graph.pools[d]
        sizes = sizes_in(graph, pool)
        live = graph.static_bytes_by_pool[pool.name]
        there: set[int] = set()
        free: list[int] = []
        for step in self.brief.steps:
            if isinstance(step, Free):
                there.discard(step.tensor)
                live -= sizes[step.tensor]
                continue
            op = graph.ops[step.op]
            free.append(limit - live - sum(sizes[t] for t in op.outputs) - workspace_bytes_in(pool, op))
            live += sum(sizes[t] for t in op.outputs if t not in there)
            there.update(op.outputs)
        return np.array(free, dtype=np.int64)


class Run:
    """A schedule executed with the clocks of the simulation; tensors are freed when no stream waits for it, or when they must.

    Attributes:
        steps: of the schedule.
        memory_bytes: as in ``SideBySide``.
        starts_s: for each execution its start.
        clocks_s: for each pool the time of its owner at each execution.
        dying: for each execution the tensors that are not read after it.
    """

    def __init__(self, graph: Graph, schedule: Schedule, limits: Sequence[int | None], *, instant_copies: bool = False) -> None:
        """Execute the schedule.

        Args:
            schedule: has the shortest lifetimes.
            limits: capacities of the pools; None for no limit.
            instant_copies: True if transfers take no time.
        """
        self.graph, self.limits, self.instant = graph, limits, instant_copies
        stream = {name: i for i, name in enumerate(graph.streams)}
        pool = {p.name: d for d, p in enumerate(graph.pools)}
        self.stream = stream
        self.pool = [pool[t.pool] for t in graph.tensors]
        self.owner = [stream[p.owner] for p in graph.pools]
        self.clock_s = [0.0] * len(stream)
        self.ready_s: dict[int, float] = {}
        self.used_s: dict[int, float] = {}  # for each live tensor the end of the last op that uses it
        self.lent: set[int] = set()  # live tensors that another stream than their pool's owner has read
        self.lingering: list[set[int]] = [set() for _ in graph.pools]  # tensors to be freed as soon as possible
        self.live = [graph.static_bytes_by_pool[p.name] for p in graph.pools]
        self.steps: list[Step] = []
        self.memory_bytes: list[int] = []
        self.starts_s: list[float] = []
        self.clocks_s: list[list[float]] = [[] for _ in graph.pools]
        self.dying: list[list[int]] = []
        self.fits_elsewhere = True
        steps = schedule.steps
        at = 0
        while at < len(steps):
            step, at = steps[at], at + 1
            assert isinstance(step, Compute)
            begin = at
            while at < len(steps) and isinstance(steps[at], Free):
                at += 1
            self.dying.append([dying.tensor for dying in steps[begin:at] if isinstance(dying, Free)])
            self._compute(step.op, self.dying[-1])

    def _compute(self, op_id: int, dying: Sequence[int]) -> None:
        graph, op = self.graph, self.graph.ops[op_id]
        stream = self.stream[op.stream]
        over = [t for _, t in op.overwrites if t in dying and t not in self.lent]
        for t in op.outputs:
            if t in self.lingering[self.pool[t]]:
                self._free(t)
        needs = [0] * len(graph.pools)
        for t in op.outputs:
            needs[self.pool[t]] += graph.tensors[t].size_bytes
        for d, owner in enumerate(self.owner):
            if owner == stream:
                needs[d] += op.workspace_bytes
                break
        for t in over:
            needs[self.pool[t]] -= graph.tensors[t].size_bytes
        for d, need in enumerate(needs):
            self._make_room(d, need)
        self.memory_bytes.append(self.live[0] + needs[0])
        waits_s = [self.clock_s[self.owner[self.pool[t]]] for t in op.outputs]
        waits_s += (self.ready_s.get(t, 0.0) for t in op.inputs)
        waits_s += (self.used_s.get(t, 0.0) for t in op.mutates)
        start_s = max(self.clock_s[stream], *waits_s, 0.0)
        end_s = self.clock_s[stream] = start_s + (0.0 if self.instant and between_devices(self.graph, op) else op.time_s)
        self.starts_s.append(start_s)
        for d, owner in enumerate(self.owner):
            self.clocks_s[d].append(self.clock_s[owner])
        self.steps.append(Compute(op_id))
        for t in (*op.inputs, *op.mutates):
            self.used_s[t] = max(end_s, self.used_s.get(t, 0.0))
            if self.owner[self.pool[t]] != stream:
                self.lent.add(t)
        for t in op.mutates:
            self.ready_s[t] = end_s
        for t in op.outputs:
            if t not in self.ready_s:
                self.ready_s[t] = self.used_s[t] = end_s
                self.live[self.pool[t]] += graph.tensors[t].size_bytes
        for t in over:
            self._free(t)
        for t in dying:
            if t not in over:
                self.lingering[self.pool[t]].add(t)

    def _make_room(self, d: int, need: int) -> None:
        """Free tensors of pool `d` that no stream uses any more and, if that is not enough, those whose use ends first."""
        waiting, now_s, limit = self.lingering[d], self.clock_s[self.owner[d]], self.limits[d]
        for t in sorted(t for t in waiting if self.used_s[t] <= now_s):
            self._free(t)
        while limit is not None and waiting and self.live[d] + need > limit:
            self._free(min(waiting, key=lambda t: (self.used_s[t], t)))
        if d and limit is not None and self.live[d] + need > limit:
            self.fits_elsewhere = False

    def _free(self, t: int) -> None:
        d = self.pool[t]
        owner = self.owner[d]
        self.clock_s[owner] = max(self.clock_s[owner], self.used_s.pop(t))
        self.live[d] -= self.graph.tensors[t].size_bytes
        self.lingering[d].discard(t)
        self.lent.discard(t)
        del self.ready_s[t]
        self.steps.append(Free(t))
