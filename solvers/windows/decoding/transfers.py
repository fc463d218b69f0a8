"""Decoding of an order with transfers between pools to a schedule: when transfers are issued, and when tensors are freed.

The host is a device that computes nothing. A transfer is due when its target is read or the memory of its source is needed. If
the source is freed before the target is read (an offload, or a copy to another device), it waits in the queue of its channel:
when the channel is free, of those that are ready, the one that is due first is issued; to the host, the one whose source is
freed first. Any other transfer (a reload) is issued as late as it arrives in time, planned backwards over its channel, or later
if there is no space. Before it is due, no device waits for space for it, unless the memory of its source is needed.

A tensor that is still being transferred after its last reader stays until the transfer is done, or until
its memory is needed: then the owner of the pool waits for the transfer.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from graphs.schedule import Schedule, Step
from solvers.problem import Problem

Reloads = Collection[tuple[int, int]]  # (tensor, position of the execution that it is reloaded for)

PoolMemory = dict[int, NDArray[np.int64]]  # by pool, the bytes during each execution

_END = 2**62  # position until which kept tensors stay
# Up to here one tensor is given up at a time, as each that stays on the device changes when the others are transferred; then
# twice as many in each attempt, for solutions with hundreds of tensors more than the host has space for.
_EXACT_ATTEMPTS = 16


@dataclass(slots=True, eq=False)
class PoolStay:
    """A tensor in a pool. Positions count executions, without transfers.

    Attributes:
        begin: position of the execution that produces it, or before which its transfer is issued.
        read: position of its first reader; where it is produced, `begin`.
        ready_s: the time at which it is produced if transfers take no time.
        by: the transfer that produces it.
        after: end of the previous stay of the tensor, -1 if there is none.
        end: position of the last execution that reads or produces it, -1 if only transfers do, ``_END`` if it is kept.
        copied: position of the last transfer that reads it, -1 if there is none.
        unsent: transfers that read it and have not been issued.
    """

    tensor: int
    begin: int
    read: int
    ready_s: float
    by: "PlannedTransfer | None" = None
    after: int = -1
    end: int = -1
    copied: int = -1
    unsent: "tuple[PlannedTransfer, ...]" = ()


@dataclass(slots=True, eq=False)
class PlannedTransfer:
    """A transfer of an order.

    Attributes:
        op: its id.
        source: None for a static tensor.
        place: position before which it is issued at the latest.
        index: its position in the order with transfers, -1 for one that was added.
        follows: the transfer that produces the previous stay of its target, if one does.
        due_s: the time by which it must arrive, if other transfers take no time.
        begin: position from which it is issued (queued, if it is `early`).
        early: True if its source is freed before its target is read.
        urgent: True if the memory of its source is needed before its target is read.
    """

    op: int
    source: PoolStay | None
    target: PoolStay
    place: int
    index: int
    follows: "PlannedTransfer | None" = None
    due_s: float = math.inf
    begin: int = 0
    early: bool = False
    urgent: bool = False
    issued: bool = False

    @property
    def turn(self) -> tuple[float, float, int]:
        """Its rank among the transfers of its channel."""
        return self.due_s, 0.0 if self.source is None else self.source.ready_s, self.index


def with_transfers(problem: Problem, computed: Sequence[int], reloads: Reloads = ()) -> "TransferRun":
    """Return the run of an order of ops of the whole graph, with its transfers at the right time.

    Args:
        computed: with transfers between devices, each before its reader.
        reloads: transfers from the host; tensors that the host has no space for are not offloaded.
    """
    reloads = frozenset(reloads)
    for attempt in count():
        most = 2 ** max(0, attempt - _EXACT_ATTEMPTS)
        run = TransferRun(TransferPlan(problem, computed, reloads), reloads, most)
        if not run.refused:
            break
        by_tensor = problem.offloads.by_tensor
        reloads = frozenset((t, place) for t, place in reloads if by_tensor[t].host_tensor not in run.refused)
    return run


class TransferPlan:
    """The stays of an order, as short as possible, and its transfers.

    Attributes:
        executed: the order without transfers.
        index: their positions in the order.
        starts_s: the start of each execution if transfers take no time.
        clocks_s: for each stream its time before each execution, likewise.
    """

    def __init__(self, problem: Problem, computed: Sequence[int], reloads: Reloads) -> None:
        self.streams = streams = problem.streams
        self.limits_bytes = [problem.budget_bytes, *streams.limits_bytes[1:]]
        self.executed: list[int] = []
        self.index: list[int] = []
        self.stays: list[PoolStay] = []
        self.transfers: list[PlannedTransfer] = []
        self.starts_s: list[float] = []
        self.clocks_s: list[list[float]] = [[] for _ in range(len(streams.names))]
        self._last: dict[int, PoolStay] = {}
        now_s = [0.0] * len(streams.names)
        produced: dict[int, PoolStay] = {}  # the last time that an execution produced each
        wanted: dict[int, set[int]] = {}
        for t, place in reloads:
            wanted.setdefault(place, set()).add(t)
        last, executed, kept, stream = self._last, self.executed, streams.kept, streams.stream
        devices = [(s, self.clocks_s[s]) for d, s in enumerate(streams.owner) if streams.computes[d]]
        for index, op in enumerate(computed):
            place = len(executed)
            if streams.source[op] >= 0:
                self._transfer(op, last.get(streams.source[op]), place, index)
                continue
            for t in streams.inputs[op] if place in wanted else ():
                transfers = problem.offloads.by_tensor.get(t)
                if transfers is not None and t in wanted[place]:
                    if transfers.host_tensor not in last:
                        self._transfer(transfers.offload_op, produced[t], place, -1)
                    self._transfer(transfers.reload_op, last[transfers.host_tensor], place, -1)
            start_s = now_s[stream[op]]
            for t in streams.inputs[op]:
                stay = last[t]
                if stay.end < place:
                    stay.end = place
                if stay.read < 0:
                    stay.read = place
                if stay.ready_s > start_s:
                    start_s = stay.ready_s
            for s, clock_s in devices:
                clock_s.append(now_s[s])
            self.starts_s.append(start_s)
            end_s = now_s[stream[op]] = start_s + streams.time_s[op]
            for t in streams.outputs[op]:
                if not kept[t] or t not in last:
                    last[t] = produced[t] = stay = PoolStay(t, place, place, end_s, end=_END if kept[t] else place)
                    self.stays.append(stay)
            executed.append(op)
            self.index.append(index)
        self._plan()

    def _transfer(self, op: int, source: PoolStay | None, place: int, index: int) -> None:
        (t,) = self.streams.outputs[op]
        before, end = self._last.get(t), _END if self.streams.kept[t] else -1
        target = self._last[t] = PoolStay(t, place, -1, source.ready_s if source else 0.0, end=end)
        if before is not None:
            target.after = max(before.copied if before.end < 0 else before.end, before.begin - 1)
        self.stays.append(target)
        target.by = PlannedTransfer(op, source, target, place, index, before.by if before else None)
        self.transfers.append(target.by)
        if source is not None:
            source.copied = place
            source.unsent = (*source.unsent, target.by)
            if source.read < 0:
                source.read = place

    def _plan(self) -> None:
        """Set the positions from which transfers are issued; their memory is allocated from there on."""
        memory = self._memory_bytes()
        self._set_due(memory)
        self._plan_late()
        for transfer in self.transfers:
            target, source = transfer.target, transfer.source
            begin = max(transfer.begin, target.after + 1)
            if source is not None:
                begin = max(begin, source.begin + (source.by is None))
            begin = min(begin, transfer.place)
            d, size = self.streams.home[transfer.op], self.streams.sizes[target.tensor]
            if d in memory:
                full = np.flatnonzero(memory[d][begin : transfer.place] + size > self.limits_bytes[d])
                if len(full):
                    begin += int(full[-1]) + 1
                memory[d][begin : transfer.place] += size
            transfer.begin = target.begin = begin

    def _set_due(self, memory: PoolMemory) -> None:
        """Set the times by which transfers must arrive, and find those whose source is freed before."""
        starts_s = (*self.starts_s, math.inf)
        for transfer in reversed(self.transfers):
            source, read = transfer.source, transfer.target.read
            if read < 0:
                read = transfer.place
            if source is not None:
                transfer.early = transfer.urgent = 0 <= source.end < read
                if self.streams.computes[self.streams.home[transfer.op]]:  # tensors leave devices because memory is needed
                    needed = self._needed(memory, source, read)
                    transfer.urgent, read = needed < read, needed
            transfer.due_s = min(transfer.due_s, starts_s[read])
            if source is not None and source.by is not None:
                source.by.due_s = min(source.by.due_s, transfer.due_s - self.streams.time_s[transfer.op])

    def _needed(self, memory: PoolMemory, stay: PoolStay, until: int) -> int:
        """Return the first position after a stay at which its memory is needed, at most `until`."""
        d, begin, size = self.streams.pool[stay.tensor], max(stay.end, stay.begin) + 1, self.streams.sizes[stay.tensor]
        if d not in memory or begin >= until:
            return until
        beside = memory[d][begin:until]
        if stay.end < 0:  # counted until it is transferred
            beside = beside.copy()
            beside[: stay.copied + 1 - begin] -= size
        lacking = beside > self.limits_bytes[d] - size
        first = int(lacking.argmax())
        return begin + first if lacking[first] else until

    def _plan_late(self) -> None:
        """Set the latest positions at which transfers arrive in time, from the last that is due to the first."""
        streams, until_s = self.streams, [math.inf] * len(self.streams.names)
        shared = {streams.stream[transfer.op] for transfer in self.transfers if not transfer.early}
        planned = (transfer for transfer in self.transfers if streams.stream[transfer.op] in shared)
        for transfer in sorted(planned, key=lambda x: x.turn, reverse=True):
            source, channel = transfer.source, streams.stream[transfer.op]
            begin_s = until_s[channel] = min(transfer.due_s, until_s[channel]) - streams.time_s[transfer.op]
            if transfer.early:
                continue
            clocks_s = self.clocks_s[streams.owner[streams.home[transfer.op]]]
            if not clocks_s:
                transfer.begin = transfer.place
                continue
            # The first position at the latest time of the pool's owner before that.
            latest = bisect_right(clocks_s, begin_s) - 1
            transfer.begin = bisect_left(clocks_s, clocks_s[latest]) if latest >= 0 else 0
            if source is not None and source.by is not None:
                source.by.due_s = min(source.by.due_s, begin_s)

    def _memory_bytes(self) -> PoolMemory:
        """Return the memory of the devices' pools that have a limit during each execution, with the shortest lifetimes."""
        streams, n = self.streams, len(self.executed)
        limited = [d for d, limit in enumerate(self.limits_bytes) if streams.computes[d] and limit < math.inf]
        self.ending: list[list[PoolStay]] = [[] for _ in self.executed]
        self.written_over: list[list[PoolStay]] = [[] for _ in self.executed]
        change = {d: [0] * (n + 2) for d in limited}
        during = {d: [streams.need_bytes[op] if streams.home[op] == d else 0 for op in self.executed] for d in limited}
        executed, pool, sizes = self.executed, streams.pool, streams.sizes
        for stay in self.stays:
            t, begin, end, over = stay.tensor, stay.begin, stay.end, False
            if 0 <= end < n:
                over = stay.copied < 0 and t in streams.overwritable[executed[end]]
                (self.written_over if over else self.ending)[end].append(stay)
            if (d := pool[t]) in change:
                change[d][begin + (stay.by is None)] += sizes[t]
                change[d][min(max(stay.copied if end < 0 else end, begin), n) + 1] -= sizes[t]
                if over:
                    during[d][end] -= sizes[t]
        return {d: np.cumsum(change[d][:n]) + np.array(during[d], dtype=np.int64) + streams.static_bytes[d] for d in limited}


class TransferRun:
    """An order executed with the clocks of the simulation. Items are executions, and those transfers that the order has.

    Attributes:
        moved: for each item, its position in the order.
        reloads: the requested reloads.
        refused: copies that the host has no space for, and that take none. The run ends when there are `most_refused`.
        memory_bytes: for each item the memory of the main device during it, including static memory.
        waits_s: for each item the time that its stream waits before it; 0 for transfers.
        ends: for each item the number of steps up to the frees after it.
        fits_elsewhere: True if the other pools are large enough.
    """

    def __init__(self, lives: TransferPlan, reloads: frozenset[tuple[int, int]], most_refused: int) -> None:
        self.lives, self.streams, self.reloads, streams = lives, lives.streams, reloads, lives.streams
        self.clock_s, self.done_s = ([0.0] * len(streams.names) for _ in range(2))  # done: the end of the last execution
        self.ready_s, self.busy_s = ([0.0] * len(streams.pool) for _ in range(2))  # busy: until the last transfer ends
        self.there = [False] * len(streams.pool)
        self.lingering: list[dict[int, PoolStay]] = [{} for _ in streams.owner]  # tensors to be freed as soon as possible
        # For each channel the transfers that wait for it.
        self.queues: dict[int, list[PlannedTransfer]] = {streams.stream[transfer.op]: [] for transfer in lives.transfers}
        self.live = list(streams.static_bytes)
        self.steps: list[Step] = []
        self.moved: list[int] = []
        self.memory_bytes: list[int] = []
        self.waits_s: list[float] = []
        self.ends: list[int] = []
        self.fits_elsewhere = True
        self.refused: set[int] = set()
        self.place = 0  # of the execution
        self._run(most_refused)

    @property
    def schedule(self) -> Schedule:
        """The schedule."""
        return Schedule(tuple(self.steps))

    @property
    def time_s(self) -> float:
        """End of the last stream."""
        return max(self.clock_s)

    def _run(self, most_refused: int) -> None:
        executed = self.lives.executed
        coming: list[list[PlannedTransfer]] = [[] for _ in range(len(executed) + 1)]
        due: list[list[PlannedTransfer]] = [[] for _ in range(len(executed) + 1)]
        for transfer in self.lives.transfers:
            coming[transfer.begin].append(transfer)
            due[transfer.place if transfer.early else transfer.begin].append(transfer)
        for place, op in enumerate(executed):
            self.place = place
            if coming[place] or due[place]:
                self._send_due(coming[place], due[place])
            if any(self.queues.values()):
                self._send_ahead(op)
            self._execute(op)
            if len(self.refused) >= most_refused:
                return
        self.place = len(executed)
        self._send_due(coming[-1], due[-1])

    def _send_due(self, coming: Sequence[PlannedTransfer], due: Sequence[PlannedTransfer]) -> None:
        """Queue early transfers that are `coming`, and issue those that are `due`."""
        queues, stream = self.queues, self.streams.stream
        for transfer in coming:
            if transfer.early and not transfer.issued:
                queues[stream[transfer.op]].append(transfer)
        for transfer in due:
            if not transfer.early and not transfer.issued:
                queues[stream[transfer.op]].append(transfer)
        for transfer in due:
            while not transfer.issued:
                self._send(stream[transfer.op], queues[stream[transfer.op]])

    def _send_ahead(self, op: int) -> None:
        """Issue transfers that can start before the end of the next execution, unless a device would wait for it."""
        streams, clock_s, start_s = self.streams, self.clock_s, self.clock_s[self.streams.stream[op]]
        for t in streams.inputs[op]:
            if self.ready_s[t] > start_s:
                start_s = self.ready_s[t]
        end_s = start_s + streams.time_s[op]
        for channel, queue in self.queues.items():
            while queue and clock_s[channel] < end_s:
                ready = [x for x in queue if self._ready_s(x) < end_s and not self._would_wait(x, op, start_s)]
                if not ready:
                    break
                self._send(channel, ready)

    def _would_wait(self, transfer: PlannedTransfer, op: int, start_s: float) -> bool:
        """Return True if the owner of the target's pool would wait for other transfers to end, for this one or for `op`.

        Args:
            op: the next execution.
            start_s: its earliest start.
        """
        streams, d = self.streams, self.streams.home[transfer.op]
        lingering, now_s, need = self.lingering[d], self.clock_s[streams.owner[d]], streams.need_bytes[transfer.op]
        if transfer.target.tensor in lingering and self.busy_s[transfer.target.tensor] > now_s:
            return True
        if transfer.urgent or not lingering:
            return False
        if streams.home[op] == d:
            now_s, need = start_s, need + streams.need_bytes[op]
        need -= sum(streams.sizes[t] for t, stay in lingering.items() if not stay.unsent and self.busy_s[t] <= now_s)
        return self.live[d] + need > self.lives.limits_bytes[d]

    def _execute(self, op: int) -> None:
        streams, place, ready_s, busy_s = self.streams, self.place, self.ready_s, self.busy_s
        d, stream, outputs, over = streams.home[op], streams.stream[op], streams.outputs[op], self.lives.written_over[place]
        need, lingering = streams.need_bytes[op], self.lingering[d]
        for stay in over:
            need -= streams.sizes[stay.tensor]
        if lingering or self.live[d] + need > self.lives.limits_bytes[d]:
            self._release(d, outputs)
            self._make_room(d, need)
        start_s = self.clock_s[stream]
        for t in streams.inputs[op]:
            if ready_s[t] > start_s:
                start_s = ready_s[t]
        for t in streams.mutates[op]:
            start_s = max(start_s, busy_s[t])
        self._step(op, self.lives.index[place], start_s - self.done_s[stream], need)
        end_s = self.clock_s[stream] = self.done_s[stream] = start_s + streams.time_s[op]
        for t in streams.mutates[op]:
            ready_s[t] = end_s
        for t in outputs:
            if not self.there[t]:
                self.there[t] = True
                ready_s[t], busy_s[t] = end_s, 0.0
                self.live[d] += streams.sizes[t]
        for stay in over:  # directly after the op: only then does it overwrite them
            self._free(stay.tensor)
        for stay in self.lives.ending[place]:
            if stay.unsent or busy_s[stay.tensor] > end_s:
                lingering[stay.tensor] = stay
            else:
                self._free(stay.tensor)
        self.ends[-1] = len(self.steps)

    def _issue(self, transfer: PlannedTransfer) -> None:
        streams, op, t = self.streams, transfer.op, transfer.target.tensor
        s, d, channel = streams.source[op], streams.home[op], streams.stream[op]
        if transfer.source is not None and transfer.source.by is not None:
            self._require(transfer.source.by)
        if transfer.follows is not None:
            self._require(transfer.follows)
        self._release(d, (t,))
        if not self._make_room(d, streams.need_bytes[op]) and d and transfer.index < 0:
            self.refused.add(t)
        start_s = max(self.clock_s[channel], self.clock_s[streams.owner[d]], self.ready_s[s])
        if transfer.index < 0:
            self.steps.append(streams.compute[op])
        else:
            self._step(op, transfer.index, 0.0, streams.need_bytes[op])
            self.ends[-1] = len(self.steps)
        end_s = self.clock_s[channel] = start_s + streams.time_s[op]
        self.busy_s[s] = max(self.busy_s[s], end_s)
        if not self.there[t]:
            self.there[t] = True
            self.ready_s[t] = self.busy_s[t] = end_s
            self.live[d] += 0 if t in self.refused else streams.sizes[t]
        transfer.issued = True
        if transfer.source is not None:
            transfer.source.unsent = tuple(x for x in transfer.source.unsent if x is not transfer)
        for stay in (transfer.source, transfer.target):
            if stay is not None and stay.end < self.place and not stay.unsent:  # nothing reads it any more
                self.lingering[streams.pool[stay.tensor]][stay.tensor] = stay

    def _step(self, op: int, index: int, wait_s: float, need: int) -> None:
        self.steps.append(self.streams.compute[op])
        self.moved.append(index)
        self.memory_bytes.append(self.live[0] if self.streams.home[op] else self.live[0] + need)
        self.waits_s.append(wait_s)
        self.ends.append(0)

    def _send(self, channel: int, queue: Sequence[PlannedTransfer]) -> None:
        """Issue the next of these transfers, when the channel is free: of those that are ready, the most urgent one."""
        transfer = queue[0]
        if len(queue) > 1:
            owner, ready_s = self.streams.owner[self.streams.home[transfer.op]], [self._ready_s(x) for x in queue]
            free_s = max(self.clock_s[channel], self.clock_s[owner], min(ready_s))
            transfer = min((x for x, at_s in zip(queue, ready_s, strict=True) if at_s <= free_s), key=self._urgency)
        self._require(transfer)

    def _ready_s(self, transfer: PlannedTransfer) -> float:
        """Return the time from which the source is there, inf if it must be transferred first."""
        waits = transfer.source is not None and transfer.source.by is not None and not transfer.source.by.issued
        return math.inf if waits else self.ready_s[self.streams.source[transfer.op]]

    def _urgency(self, transfer: PlannedTransfer) -> tuple[float, ...]:
        source = transfer.source
        if source is None or self.streams.computes[self.streams.home[transfer.op]]:
            return transfer.turn
        return source.end, *transfer.turn

    def _require(self, transfer: PlannedTransfer) -> None:
        """Issue a transfer, unless it is issued."""
        if not transfer.issued:
            if transfer in (queue := self.queues[self.streams.stream[transfer.op]]):
                queue.remove(transfer)
            self._issue(transfer)

    def _release(self, d: int, tensors: Sequence[int]) -> None:
        """Free those of the tensors that linger in pool `d`, after their transfers."""
        for t in tensors:
            if (stay := self.lingering[d].get(t)) is not None:
                for transfer in stay.unsent:
                    self._require(transfer)
                self._free(t)

    def _next_channel(self, d: int) -> int:
        """Return the channel from pool `d` with a queue that is free first, -1 if there is none."""
        channels = (c for c, queue in self.queues.items() if queue and self.streams.pool[self.streams.source[queue[0].op]] == d)
        return min(channels, key=self.clock_s.__getitem__, default=-1)

    def _make_room(self, d: int, need: int) -> bool:
        """Free tensors of pool `d` that are not in use and, if that is not enough, those whose use ends first.

        Return True if there is space for `need`. Where nothing is computed, memory is freed only if it is needed.
        """
        lingering, limit = self.lingering[d], self.lives.limits_bytes[d]
        if lingering and self.streams.computes[d]:
            now_s = self.clock_s[self.streams.owner[d]]
            for t in [t for t, stay in lingering.items() if not stay.unsent and self.busy_s[t] <= now_s]:
                self._free(t)
        while lingering and self.live[d] + need > limit:
            sent = [(self.busy_s[t], t) for t, stay in lingering.items() if not stay.unsent]
            if sent:
                self._free(min(sent)[1])
            elif (channel := self._next_channel(d)) >= 0:
                self._send(channel, self.queues[channel])
            else:
                break
        fits = self.live[d] + need <= limit
        self.fits_elsewhere &= fits or not d
        return fits

    def _free(self, t: int) -> None:
        d = self.streams.pool[t]
        owner = self.streams.owner[d]
        if self.busy_s[t] > self.clock_s[owner]:
            self.clock_s[owner] = self.busy_s[t]
        self.live[d] -= 0 if t in self.refused else self.streams.sizes[t]
        if t in self.lingering[d]:
            del self.lingering[d][t]
        self.there[t] = False
        self.steps.append(self.streams.free[t])
