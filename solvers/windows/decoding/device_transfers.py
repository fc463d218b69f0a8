"""From an order of executions on several devices to a schedule: when copies are issued, and when what is copied goes.

An order says what is copied before what reads it. Here each copy is issued as late as it arrives in time, planned backwards over
its channel, or as early as there is something to copy and room for it. A tensor that is still being copied when nothing else
wants it stays until the copy is done, or until its memory is called for: who frees it waits for the copy.
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
    """A schedule, and what it takes.

    Attributes:
        moved: for each execution, in the order of the schedule, its position in the order that it comes from.
        time_s: when the last stream has ended.
        memory_bytes: for each execution what the main device holds during it.
        fits_elsewhere: whether the other memories with a limit hold what is made there.
    """

    schedule: Schedule
    moved: tuple[int, ...]
    time_s: float
    memory_bytes: tuple[int, ...]
    fits_elsewhere: bool


def side_by_side(graph: Graph, computed: Sequence[int], budget_bytes: int) -> SideBySide:
    """The schedule of an order of ops of `graph`."""
    limits = [budget_bytes, *(pool.capacity_bytes for pool in graph.pools[1:])]
    moved = _Copies(graph, computed, limits).moved()
    run = Run(graph, schedule_of(graph, [computed[place] for place in moved]), limits)
    return SideBySide(Schedule(tuple(run.steps)), tuple(moved), max(run.clock_s), tuple(run.memory_bytes), run.fits_elsewhere)


class _Copies:
    """When the copies of an order are issued."""

    def __init__(self, graph: Graph, computed: Sequence[int], limits: Sequence[int | None]) -> None:
        self.graph, self.computed, self.limits = graph, computed, limits
        self.pool = {pool.name: d for d, pool in enumerate(graph.pools)}
        self.brief = schedule_of(graph, computed)  # each tensor is there as briefly as possible
        instant = Run(graph, self.brief, [None] * len(limits), instant_copies=True)
        self.starts_s, self.clocks_s, self.dying = instant.starts_s, instant.clocks_s, instant.dying

    def moved(self) -> list[int]:
        """The positions in the order of issue."""
        copies = [place for place, op in enumerate(self.computed) if between_devices(self.graph, self.graph.ops[op])]
        if not copies:
            return list(range(len(self.computed)))
        low, read, rank = self._between()
        latest = self._latest(copies, read)
        room = {d: self._room(d, limit) for d, limit in enumerate(self.limits) if limit is not None}
        issued = {place: place for place in copies}
        before: dict[int, int] = {}  # for what a copy has made, the position before which it is issued
        for place in copies:
            op = self.graph.ops[self.computed[place]]
            (source,), (target,) = op.inputs, op.outputs
            # What goes from where it is copied is copied at once: its memory is wanted.
            wanted = 0 if source in self.dying[place] else latest[place]
            begin = min(max(low[place], before.get(source, 0), wanted), place)
            free = room.get(self.pool[self.graph.tensors[target].pool])
            if free is not None:
                size = self.graph.tensors[target].size_bytes
                full = np.flatnonzero(free[begin:place] < size)
                begin += int(full[-1]) + 1 if len(full) else 0
                free[begin:place] -= size
            before[target] = issued[place] = begin
        # Of copies that are issued at the same place those first for which there is something to copy first.
        return sorted(
            range(len(self.computed)),
            key=lambda place: (issued.get(place, place), place not in issued, rank.get(place, place), place),
        )

    def _between(self) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
        """For each copy the position from which on it can be made, and that of the first that reads what it makes.

        And behind which position of the order there is something to copy.
        """
        low: dict[int, int] = {}
        read: dict[int, int] = {}
        rank: dict[int, int] = {}
        made: dict[int, int] = {}  # for each tensor the position after the op that has made it, if that is no copy
        used: dict[int, int] = {}  # and after the last that has made or read it
        latest: dict[int, int] = {}  # for each tensor the last copy that has made it
        copied: dict[int, int] = {}  # likewise, if that is not read yet
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
        """For each copy the last position at which it is issued so that it arrives in time, were all channels empty before."""
        until_s: dict[str, float] = {}
        latest: dict[int, int] = {}
        for place in sorted(copies, key=lambda place: read.get(place, place), reverse=True):
            op = self.graph.ops[self.computed[place]]
            wanted_s = self.starts_s[read.get(place, place)]
            until_s[op.stream] = min(until_s.get(op.stream, np.inf), wanted_s) - op.time_s
            owner = self.pool[self.graph.tensors[op.outputs[0]].pool]
            clocks = self.clocks_s[owner]
            # Where the owner of the memory comes to no later than that, and as soon as it is there.
            last = bisect_right(clocks, until_s[op.stream]) - 1
            latest[place] = bisect_left(clocks, clocks[last]) + 1 if last >= 0 else 0
        return latest

    def _room(self, d: int, limit: int) -> NDArray[np.int64]:
        """What is free in a memory during each execution, when each tensor is there as briefly as possible."""
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
    """A schedule run through by the clocks of the judge; each tensor is freed when nothing has to wait for that, or when it must.

    Attributes:
        steps: of the schedule.
        memory_bytes: as in ``SideBySide``.
        starts_s: for each execution when it begins.
        clocks_s: for each memory how far its owner is at each execution.
        dying: for each execution what nothing reads behind it.
    """

    def __init__(self, graph: Graph, schedule: Schedule, limits: Sequence[int | None], *, instant_copies: bool = False) -> None:
        """Run it.

        Args:
            schedule: holds each tensor as briefly as possible.
            limits: of the memories; None for no limit.
            instant_copies: count no time for them.
        """
        self.graph, self.limits, self.instant = graph, limits, instant_copies
        stream = {name: i for i, name in enumerate(graph.streams)}
        pool = {p.name: d for d, p in enumerate(graph.pools)}
        self.stream = stream
        self.pool = [pool[t.pool] for t in graph.tensors]
        self.owner = [stream[p.owner] for p in graph.pools]
        self.clock_s = [0.0] * len(stream)
        self.ready_s: dict[int, float] = {}
        self.used_s: dict[int, float] = {}  # for each tensor that is there when the last that has to do with it ends
        self.lent: set[int] = set()  # what another stream than its memory's has read
        self.lingering: list[set[int]] = [set() for _ in graph.pools]  # what goes as soon as it may
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
        """Free in a memory what nothing waits for any more; and where that is not enough, what is soonest done with."""
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
