"""Decoding of an order with transfers between pools to a schedule: when transfers are issued, and when tensors are freed.

``transfer_plan.py`` says from when on each transfer may be issued. An early one waits in the queue of its channel: when the
channel is free, of those that are ready, the one that is due first is issued; to the host, the one whose source is freed first.
Before it is due, no device waits for space for it, unless the memory of its source is needed.

A tensor that is still being transferred after its last reader stays until the transfer is done, or until
its memory is needed: then the owner of the pool waits for the transfer.

It has clocks of its own, because they decide while the schedule is being made; times and peaks of the result are those of
``planner.graphs.simulate``. Known weakness: one transfer is looked at after the other. Coarse windows do not say in which order
memory and channels are needed inside, so their solutions often wait: ``strategies.offloading`` recomputes there instead.
"""

import math
from collections.abc import Sequence
from itertools import count

from planner.graphs.schedule import Schedule, Step
from planner.solvers.problem import Problem
from planner.solvers.windows.decoding.transfer_plan import PlannedTransfer, PoolStay, Reloads, TransferPlan

# Up to here one tensor is given up at a time, as each that stays on the device changes when the others are transferred; then
# twice as many in each attempt, for solutions with hundreds of tensors more than the host has space for.
_EXACT_ATTEMPTS = 16


def add_transfers(problem: Problem, computed: Sequence[int], reloads: Reloads = frozenset()) -> "TransferRun":
    """Return the run of an order of ops of the whole graph, with its transfers at the right time.

    Args:
        computed: with transfers between devices, each before its reader.
        reloads: transfers from the host; tensors that the host has no space for are not offloaded.
    """
    run = _add_transfers(problem, computed, reloads)
    if max(run.memory_bytes) > problem.budget_bytes and any(transfer.carried.must_run for transfer in run.plan.transfers):
        careful = _add_transfers(problem, computed, reloads, careful=True)
        return careful if max(careful.memory_bytes) <= problem.budget_bytes else run
    return run


def _add_transfers(problem: Problem, computed: Sequence[int], reloads: Reloads, *, careful: bool = False) -> "TransferRun":
    for attempt in count():
        most = 2 ** max(0, attempt - _EXACT_ATTEMPTS)
        run = TransferRun(TransferPlan(problem, computed, reloads, careful=careful), reloads, most)
        if not run.refused:
            break
        by_tensor = problem.round_trips
        reloads = frozenset((t, place) for t, place in reloads if by_tensor[t].host_tensor not in run.refused)
    return run


class TransferRun:
    """An order executed with the clocks of the simulation. Items are executions, and those transfers that the order has.

    Attributes:
        moved: for each item, its position in the order.
        refused: copies that the host has no space for, and that take none. The run ends when there are `most_refused`.
        memory_bytes: for each item the memory of the main device during it, including static memory.
        waits_s: for each item the time that its stream waits before it; 0 for transfers.
        ends: for each item the number of steps up to the frees after it.
        fits_elsewhere: True if the other pools are large enough.
    """

    def __init__(self, plan: TransferPlan, reloads: Reloads, most_refused: int) -> None:
        self.plan, self.streams, self.reloads, streams = plan, plan.streams, reloads, plan.streams
        self.clock_s, self.done_s = ([0.0] * len(streams.names) for _ in range(2))  # done: the end of the last execution
        self.ready_s, self.busy_s = ([0.0] * len(streams.pool) for _ in range(2))  # busy: until the last transfer ends
        self.there = [False] * len(streams.pool)
        self.lingering: list[dict[int, PoolStay]] = [{} for _ in streams.owner]  # tensors to be freed as soon as possible
        self.lending: list[PlannedTransfer] = []  # those whose workspaces the main device has not got back
        # For each channel the transfers that wait for it.
        self.queues: dict[int, list[PlannedTransfer]] = {streams.stream[transfer.op]: [] for transfer in plan.transfers}
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
        executed = self.plan.executed
        coming: list[list[PlannedTransfer]] = [[] for _ in range(len(executed) + 1)]
        due: list[list[PlannedTransfer]] = [[] for _ in range(len(executed) + 1)]
        for transfer in self.plan.transfers:
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
            # The channel may first carry others of its queue, if they are more urgent.
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
                ready = [x for x in queue if self._compute_ready_s(x) < end_s and not self._would_wait(x, op, start_s)]
                if not ready:
                    break
                self._send(channel, ready)

    def _would_wait(self, transfer: PlannedTransfer, op: int, start_s: float) -> bool:
        """Return True if the owner of the target's pool would wait for other transfers to end, for this one or for `op`.

        Args:
            op: the next execution.
        """
        streams, d = self.streams, self.streams.home[transfer.op]
        lingering, now_s, need = self.lingering[d], self.clock_s[streams.owner[d]], streams.need_bytes[transfer.op]
        if any(target.tensor in lingering and self.busy_s[target.tensor] > now_s for target in transfer.targets):
            return True
        if transfer.urgent or not lingering:
            return False
        if streams.home[op] == d:
            now_s, need = start_s, need + streams.need_bytes[op]
        need -= sum(streams.sizes[t] for t, stay in lingering.items() if not stay.unsent and self.busy_s[t] <= now_s)
        return self.live[d] + need > self.plan.limits_bytes[d]

    def _execute(self, op: int) -> None:
        streams, place, ready_s, busy_s = self.streams, self.place, self.ready_s, self.busy_s
        d, stream, outputs, over = streams.home[op], streams.stream[op], streams.outputs[op], self.plan.written_over[place]
        need, lingering = streams.need_bytes[op], self.lingering[d]
        if self.lending:
            self._take_back([one for one in self.lending if not set(streams.outputs[one.op]).isdisjoint(streams.inputs[op])])
        for stay in over:
            need -= streams.sizes[stay.tensor]
        if lingering or self.live[d] + need > self.plan.limits_bytes[d]:
            self._release(d, outputs)
            self._make_room(d, need)
        start_s = self.clock_s[stream]
        for t in streams.inputs[op]:
            if ready_s[t] > start_s:
                start_s = ready_s[t]
        for t in streams.mutates[op]:
            start_s = max(start_s, busy_s[t])
        self._step(op, self.plan.index[place], start_s - self.done_s[stream], need)
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
        for stay in self.plan.ending[place]:
            if stay.unsent or busy_s[stay.tensor] > end_s:
                lingering[stay.tensor] = stay
            else:
                self._free(stay.tensor)
        self.ends[-1] = len(self.steps)

    def _issue(self, transfer: PlannedTransfer) -> None:
        streams, op = self.streams, transfer.op
        d, channel, inputs, outputs = streams.home[op], streams.stream[op], streams.inputs[op], streams.outputs[op]
        for source in transfer.sources:
            if source.by is not None:
                self._require(source.by)
        # Two copies of one tensor in one pool may not be under way at once.
        for before in transfer.follows:
            self._require(before)
        self._release(d, outputs)
        # Only transfers that were added by the decoder can be left out again: the order needs the others.
        if not self._make_room(d, streams.need_bytes[op]) and d and transfer.index < 0:
            self.refused.update(outputs)
        start_s = max(self.clock_s[channel], self.clock_s[streams.owner[d]], *(self.ready_s[s] for s in inputs), 0.0)
        if transfer.index < 0:
            self.steps.append(streams.compute[op])
        else:
            self._step(op, transfer.index, 0.0, streams.need_bytes[op])
            self.ends[-1] = len(self.steps)
        end_s = self.clock_s[channel] = start_s + streams.time_s[op]
        for s in inputs:
            self.busy_s[s] = max(self.busy_s[s], end_s)
        for t in outputs:
            if not self.there[t]:
                self.there[t] = True
                self.ready_s[t] = self.busy_s[t] = end_s
                self.live[d] += 0 if t in self.refused else streams.sizes[t]
        transfer.issued = True
        if transfer.carried.lent_bytes:
            self.lending.append(transfer)
            self.live[0] += transfer.carried.lent_bytes
        for source in transfer.sources:
            source.unsent = tuple(x for x in source.unsent if x is not transfer)
        for stay in (*transfer.sources, *transfer.targets):
            if stay.end < self.place and not stay.unsent:  # nothing reads it any more
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
            owner, ready_s = self.streams.owner[self.streams.home[transfer.op]], [self._compute_ready_s(x) for x in queue]
            free_s = max(self.clock_s[channel], self.clock_s[owner], min(ready_s))
            transfer = min((x for x, at_s in zip(queue, ready_s, strict=True) if at_s <= free_s), key=self._compute_urgency)
            transfer = self._choose_before(transfer, queue) if self.plan.careful else transfer
        self._require(transfer)

    def _choose_before(self, transfer: PlannedTransfer, queue: Sequence[PlannedTransfer]) -> PlannedTransfer:
        """Return the first in the order of those that must run, if there is no room for it beside `transfer`; else `transfer`.

        A gather keeps its workspace until it is read, while a reduction can be waited for.
        """
        first = min(
            (x for x in queue if x.carried.must_run and x.index < transfer.index), key=lambda x: x.index, default=transfer
        )
        d, needs = self.streams.home[transfer.op], self.streams.need_bytes
        return first if self.live[d] + needs[first.op] + needs[transfer.op] > self.plan.limits_bytes[d] else transfer

    def _compute_ready_s(self, transfer: PlannedTransfer) -> float:
        """Return the time from which the sources are there, inf if one must be transferred first."""
        waits = any(source.by is not None and not source.by.issued for source in transfer.sources)
        return math.inf if waits else max((self.ready_s[s] for s in self.streams.inputs[transfer.op]), default=0.0)

    def _compute_urgency(self, transfer: PlannedTransfer) -> tuple[float, ...]:
        if not transfer.sources or self.streams.computes[self.streams.home[transfer.op]]:
            return transfer.turn
        return min(source.end for source in transfer.sources), *transfer.turn

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

    def _find_next_channel(self, d: int) -> int:
        """Return the channel from pool `d` with a queue that is free first, -1 if there is none."""
        channels = (c for c, queue in self.queues.items() if queue and self.streams.origin[queue[0].op] == d)
        return min(channels, key=self.clock_s.__getitem__, default=-1)

    def _make_room(self, d: int, need: int) -> bool:
        """Free tensors of pool `d` that are not in use and, if that is not enough, those whose use ends first.

        Return True if there is space for `need`. Where nothing is computed, memory is freed only if it is needed.
        """
        lingering, limit = self.lingering[d], self.plan.limits_bytes[d]
        if lingering and self.streams.computes[d]:
            now_s = self.clock_s[self.streams.owner[d]]
            for t in [t for t, stay in lingering.items() if not stay.unsent and self.busy_s[t] <= now_s]:
                self._free(t)
        while lingering and self.live[d] + need > limit:
            sent = [(self.busy_s[t], t) for t, stay in lingering.items() if not stay.unsent]
            if sent:
                self._free(min(sent)[1])
            elif (channel := self._find_next_channel(d)) >= 0:
                self._send(channel, self.queues[channel])
            else:
                break
        fits = self.live[d] + need <= limit
        self.fits_elsewhere &= fits or not d
        return fits

    def _take_back(self, waited_for: Sequence[PlannedTransfer]) -> None:
        """Free the workspaces of transfers that the main device waits for."""
        for transfer in waited_for:
            self.lending.remove(transfer)
            self.live[0] -= transfer.carried.lent_bytes

    def _free(self, t: int) -> None:
        d = self.streams.pool[t]
        if self.lending:
            inputs, outputs = self.streams.inputs, self.streams.outputs
            self._take_back([one for one in self.lending if t in inputs[one.op] or t in outputs[one.op]])
        owner = self.streams.owner[d]
        if self.busy_s[t] > self.clock_s[owner]:
            self.clock_s[owner] = self.busy_s[t]
        self.live[d] -= 0 if t in self.refused else self.streams.sizes[t]
        if t in self.lingering[d]:
            del self.lingering[d][t]
        self.there[t] = False
        self.steps.append(self.streams.free[t])
