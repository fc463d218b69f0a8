"""When the transfers of an order are due, and when they are issued at the latest.

The host is a device that computes nothing. A transfer is due when its target is read or the memory of its source is needed. If
the source is freed before the target is read (an offload, or a copy to another device), the transfer is early: it is issued as
soon as its channel can carry it. Any other transfer (a reload) is issued as late as it arrives in time, planned backwards over
its channel, or later if there is no space.

Due times assume that transfers take no time, so that no reader waits for one that arrives by then. How long they take is seen
when the order is executed with its clocks (``transfers.py``); both in one pass would need the positions before they are known.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.graphs.options.transfers import Transfer
from planner.solvers.problem import Problem

Reloads = frozenset[tuple[int, int]]  # (tensor, position of the execution that it is reloaded for)

BytesByPool = dict[int, NDArray[np.int64]]  # by pool, the bytes during each execution

_END = 2**62  # position until which kept tensors stay


@dataclass(slots=True, eq=False)
class PoolStay:
    """A tensor in a pool. Positions count executions, without transfers.

    Attributes:
        begin: position of the execution that produces it, or before which its transfer is issued.
        read: position of its first reader; where it is produced, `begin`.
        ready_s: the time at which it is produced if transfers take no time.
        by: the transfer that produces it, maybe together with others.
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
        sources: what it reads, without static tensors.
        place: position before which it is issued at the latest.
        index: its position in the order with transfers, -1 for one that was added.
        follows: the transfers that produce the previous stays of its targets, if any do.
        due_s: the time by which it must arrive, if other transfers take no time.
        begin: position from which it is issued (queued, if it is `early`).
        early: True if a source is freed before its target is read.
        urgent: True if the memory of a source is needed before its target is read.
    """

    carried: Transfer
    sources: tuple[PoolStay, ...]
    targets: tuple[PoolStay, ...]
    place: int
    index: int
    follows: "tuple[PlannedTransfer, ...]" = ()
    due_s: float = math.inf
    begin: int = 0
    early: bool = False
    urgent: bool = False
    issued: bool = False

    @property
    def op(self) -> int:
        """Its op."""
        return self.carried.op

    @property
    def turn(self) -> tuple[float, float, int]:
        """Its rank among the transfers of its channel."""
        return self.due_s, self.ready_s, self.index

    @property
    def ready_s(self) -> float:
        """The time at which its sources are there if transfers take no time."""
        return max((source.ready_s for source in self.sources), default=0.0)


class TransferPlan:
    """The stays of an order, as short as possible, and its transfers.

    Attributes:
        careful: True if gathers leave room for what the program's other transfers need in their places.
        streams: of the problem; `limits_bytes` of its pools are those of the solve.
        executed: the order without transfers.
        index: their positions in the order.
        stays, transfers: in the order in which they begin.
        ending: for each execution the stays that end with it; `written_over`: those that end as it writes over them.
        starts_s: the start of each execution if transfers take no time.
        clocks_s: for each stream its time before each execution, likewise.
    """

    def __init__(self, problem: Problem, computed: Sequence[int], reloads: Reloads, *, careful: bool = False) -> None:
        self.careful = careful
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
            if (transfer := streams.transfers.get(op)) is not None:
                self._transfer(transfer, [last[t] for t in streams.inputs[op]], place, index)
                continue
            for t in streams.inputs[op] if index in wanted else ():
                trip = problem.round_trips.get(t)
                if trip is not None and t in wanted[index]:
                    if trip.host_tensor not in last:
                        self._transfer(trip.out, [produced[t]], place, -1)
                    self._transfer(trip.back, [last[trip.host_tensor]], place, -1)
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
        self.ending: list[list[PoolStay]] = [[] for _ in executed]
        self.written_over: list[list[PoolStay]] = [[] for _ in executed]
        self._plan()

    def find_index(self, place: int) -> int:
        """Return the position in the order of the execution at `place`; `place` itself if there is none."""
        return self.index[place] if 0 <= place < len(self.index) else place

    def _transfer(self, carried: Transfer, sources: Sequence[PoolStay], place: int, index: int) -> None:
        ready_s = max((source.ready_s for source in sources), default=0.0)
        targets, follows = list[PoolStay](), list[PlannedTransfer]()
        for t in carried.targets:
            before, end = self._last.get(t), _END if self.streams.kept[t] else -1
            targets.append(PoolStay(t, place, -1, ready_s, end=end))
            self._last[t] = targets[-1]
            if before is not None:
                targets[-1].after = max(before.copied if before.end < 0 else before.end, before.begin - 1)
                follows += [] if before.by is None else [before.by]
        self.stays += targets
        transfer = PlannedTransfer(carried, tuple(sources), tuple(targets), place, index, tuple(follows))
        self.transfers.append(transfer)
        for target in targets:
            target.by = transfer
        for source in sources:
            source.copied = place
            source.unsent = (*source.unsent, transfer)
            if self.careful and carried.must_run:  # it is not copied away before, but waits for its place
                source.end = max(source.end, place - 1)
            if source.read < 0:
                source.read = place

    def _plan(self) -> None:
        """Set the positions from which transfers are issued; their memory is allocated from there on."""
        self._set_ends()
        memory = self._compute_memory_bytes()
        self._set_due(memory)
        self._plan_late()
        # The position from which the last transfer of the program is issued, of gathers, and of reductions.
        turn: dict[tuple[str, bool], int] = {}
        backward = self._find_backward()
        for transfer in self.transfers:
            begin = max(transfer.begin, *(target.after + 1 for target in transfer.targets))
            begin = max(begin, *(source.begin + (source.by is None) for source in transfer.sources), 0)
            kind = transfer.carried.stream, transfer.carried.may_be_early
            if transfer.carried.must_run:  # in their order, each within its pass
                begin = max(begin, turn.get(kind, 0), backward if transfer.place >= backward else 0)
            begin = min(begin, transfer.place)
            d, size = self.streams.home[transfer.op], self.streams.need_bytes[transfer.op]
            if d in memory:
                full = np.flatnonzero(memory[d][begin : transfer.place] + size > self.limits_bytes[d])
                if len(full):
                    begin += int(full[-1]) + 1
                # Until its place it is not waited for, also while others are issued there.
                issuing = self._issuing[d][transfer.place : transfer.place + 1] + transfer.carried.lent_bytes
                begin = transfer.place if (issuing > self.limits_bytes[d]).any() else begin
                memory[d][begin : transfer.place] += size
            transfer.begin = begin
            if transfer.carried.must_run:
                turn[kind] = begin
            for target in transfer.targets:
                target.begin = begin

    def _find_backward(self) -> int:
        """Return the position of the first execution after the forward pass; 0 if the program has none."""
        forward = set(self.streams.forward)
        for place, op in enumerate(self.executed if forward else ()):
            forward.discard(op)
            if not forward:
                return place + 1
        return 0

    def _set_ends(self) -> None:
        """Set the stays that end with each execution."""
        for stay in self.stays:
            if 0 <= stay.end < len(self.executed):
                over = stay.copied < 0 and stay.tensor in self.streams.overwritable[self.executed[stay.end]]
                (self.written_over if over else self.ending)[stay.end].append(stay)

    def _set_due(self, memory: BytesByPool) -> None:
        """Set the times by which transfers must arrive, and find those whose source is freed before."""
        starts_s = (*self.starts_s, math.inf)
        for transfer in reversed(self.transfers):
            op = transfer.op
            read = min((target.read for target in transfer.targets if target.read >= 0), default=transfer.place)
            for source in transfer.sources:
                transfer.early |= 0 <= source.end < read
                transfer.urgent |= 0 <= source.end < read
            if transfer.sources and self.streams.computes[self.streams.home[op]]:
                # Tensors leave devices because memory is needed.
                needed = min(self._find_needed(memory, source, read) for source in transfer.sources)
                transfer.urgent, read = needed < read, needed
            due_s = starts_s[read]
            if transfer.sources and transfer.carried.must_run:  # it cannot be done before its place
                due_s = transfer.ready_s + self.streams.time_s[op]
            transfer.due_s = min(transfer.due_s, due_s)
            for source in transfer.sources:
                if source.by is not None:
                    source.by.due_s = min(source.by.due_s, transfer.due_s - self.streams.time_s[op])

    def _find_needed(self, memory: BytesByPool, stay: PoolStay, until: int) -> int:
        """Return the first position after a stay at which its memory is needed, at most `until`."""
        d, begin, size = self.streams.pool[stay.tensor], max(stay.end, stay.begin) + 1, self.streams.sizes[stay.tensor]
        if d not in memory or begin >= until:
            return until
        occupied = memory[d][begin:until]
        if stay.end < 0:  # counted until it is transferred
            occupied = occupied.copy()
            occupied[: stay.copied + 1 - begin] -= size
        lacking = occupied > self.limits_bytes[d] - size
        first = int(lacking.argmax())
        return begin + first if lacking[first] else until

    def _plan_late(self) -> None:
        """Set the latest positions at which transfers arrive in time, from the last that is due to the first."""
        streams, until_s = self.streams, [math.inf] * len(self.streams.names)
        shared = {streams.stream[transfer.op] for transfer in self.transfers if not transfer.early}
        planned = (transfer for transfer in self.transfers if streams.stream[transfer.op] in shared)
        for transfer in sorted(planned, key=lambda x: x.turn, reverse=True):
            channel = streams.stream[transfer.op]
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
            for source in transfer.sources:
                if source.by is not None:
                    source.by.due_s = min(source.by.due_s, begin_s)

    def _compute_memory_bytes(self) -> BytesByPool:
        """Return the memory of the devices' pools that have a limit during each execution, with the shortest lifetimes."""
        streams, n = self.streams, len(self.executed)
        limited = [d for d, limit in enumerate(self.limits_bytes) if streams.computes[d] and limit < math.inf]
        change = {d: [0] * (n + 2) for d in limited}
        during = {d: [streams.need_bytes[op] if streams.home[op] == d else 0 for op in self.executed] for d in limited}
        pool, sizes = streams.pool, streams.sizes
        for stay in self.stays:
            t, begin, end = stay.tensor, stay.begin, stay.end
            if (d := pool[t]) in change:
                change[d][begin + (stay.by is None)] += sizes[t]
                change[d][min(max(stay.copied if end < 0 else end, begin), n) + 1] -= sizes[t]
        for end, written_over in enumerate(self.written_over):
            for stay in written_over:
                if (d := pool[stay.tensor]) in during:
                    during[d][end] -= sizes[stay.tensor]
        before = {d: np.cumsum(change[d][:n]) + streams.static_bytes[d] for d in limited}
        self._issuing = self._compute_issuing_bytes(before)
        memory = {d: before[d] + np.array(during[d], dtype=np.int64) for d in limited}
        return {d: np.maximum(memory[d], self._issuing[d]) for d in limited}

    def _compute_issuing_bytes(self, before: BytesByPool) -> BytesByPool:
        """Return the memory while the program's transfers are issued in their places, given that `before` each execution."""
        found = {d: np.zeros_like(memory) for d, memory in before.items()}
        for transfer in self.transfers:
            d, place = self.streams.home[transfer.op], transfer.place
            if self.careful and d in found and transfer.carried.must_run and place < len(self.executed):
                sources = sum(self.streams.sizes[source.tensor] for source in transfer.sources if source.end < place)
                taken = before[d][place] + transfer.carried.lent_bytes + sources
                found[d][place] = max(found[d][place], taken)
        return found
