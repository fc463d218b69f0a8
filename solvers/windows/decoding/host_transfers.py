"""Decoding of an order with reloads from the host to a schedule on three streams.

The model knows windows, not the times of transfers. Tensors are offloaded when the channel is free, of those that are ready the
one that is freed first. They are reloaded as late as they arrive in time, planned backwards over the channel, or later if there
is no space. A tensor is freed once it is on the host; if its memory is needed before, the compute stream waits.
"""

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from graphs.schedule import Compute, Free, Step
from solvers.problem import Problem

Away = Collection[tuple[int, int]]  # (tensor, position of the execution that it is reloaded for)


@dataclass(slots=True)
class Stay:
    """A tensor in memory, from position `begin` of the executions to `end`.

    Attributes:
        read: position of its first reader.
        fetched: True if it is reloaded; otherwise an op produces it at `begin`.
        leaves: True if it is offloaded.
        after: end of the previous stay, -1 if there is none.
    """

    tensor: int
    begin: int
    end: int
    read: int
    fetched: bool
    leaves: bool = False
    after: int = -1


@dataclass(frozen=True, slots=True)
class Timed:
    """Steps, and for each execution the memory (without static memory) and the wait of the compute stream before it.

    Attributes:
        away: the requested reloads, except of tensors that the host had no space for.
        ends: for each execution the number of steps up to the frees after it.
        time_s: end of the computation.
    """

    away: frozenset[tuple[int, int]]
    steps: list[Step]
    memory_bytes: list[int]
    waits_s: list[float]
    ends: list[int]
    time_s: float


def stays_of(problem: Problem, computed: Sequence[int], away: Away) -> list[Stay]:
    """Return the intervals in which tensors are in memory, as short as possible; kept ones stay to the end.

    A tensor is offloaded once: in the last stay in which it is produced before its first reload.
    """
    stays: list[Stay] = []
    last: dict[int, Stay] = {}
    made: dict[int, Stay] = {}  # the last time that each was produced
    sent: set[int] = set()
    away = frozenset(away)
    for place, op in enumerate(computed):
        for t in problem.inputs[op]:
            stay = last[t]
            if (t, place) in away and stay.end < place and t in problem.offloads.by_tensor:
                if t not in sent:
                    made[t].leaves = True
                    sent.add(t)
                stay = last[t] = Stay(t, place, place, place, fetched=True, after=stay.end)
                stays.append(stay)
            stay.end = max(stay.end, place)
        for t in problem.outputs[op]:
            if problem.kept[t] and t in last:
                continue
            end = len(computed) if problem.kept[t] else place
            stay = last[t] = Stay(t, place, end, place, fetched=False)
            made[t] = stay
            stays.append(stay)
    return stays


def timed(problem: Problem, computed: Sequence[int], away: Away) -> Timed:
    """Return the steps; tensors that the host has no space for are not offloaded."""
    away = frozenset(away)
    while True:
        try:
            return _Run(problem, computed, away).run()
        except _HostFullError as full:
            away = frozenset(pair for pair in away if pair[0] != full.tensor)


class _HostFullError(Exception):
    def __init__(self, tensor: int) -> None:
        super().__init__(tensor)
        self.tensor = tensor


class _Run:
    def __init__(self, problem: Problem, computed: Sequence[int], away: frozenset[tuple[int, int]]) -> None:
        self.problem = problem
        self.away = away
        stays = stays_of(problem, computed, away)
        self.offloads = problem.offloads
        self.computed = computed
        self.stays = stays
        self.ending: list[list[Stay]] = [[] for _ in computed]
        self.written_over: list[list[Stay]] = [[] for _ in computed]  # stays that end because an output overwrites the tensor
        for stay in stays:
            if stay.end < len(computed):
                over = not stay.leaves and problem.may_overwrite(computed[stay.end], stay.tensor)
                (self.written_over if over else self.ending)[stay.end].append(stay)
        self.memory = self._memory_bytes()
        self._plan_copies_in()
        self.leaving: list[list[Stay]] = [[] for _ in computed]
        self.coming: list[list[Stay]] = [[] for _ in computed]
        last_come: dict[int, int] = {}
        for stay in stays:
            if stay.leaves:
                self.leaving[stay.begin].append(stay)
            if stay.fetched:
                self.coming[stay.begin].append(stay)
                last_come[stay.tensor] = max(stay.begin, last_come.get(stay.tensor, -1))
        self.last_come = last_come
        self.steps: list[Step] = []
        self.now_s = self.out_s = self.in_s = 0.0
        self.ready_s: dict[int, float] = {}
        self.on_host_s: dict[int, float] = {}
        self.host_bytes = 0
        self.here_again: dict[int, float] = {}  # tensors after their last reload, and its end
        self.waiting: list[Stay] = []  # to be offloaded
        self.made_s: dict[int, float] = {}  # when these were produced
        self.lingering: set[int] = set()  # tensors that are freed once they are on the host
        self.lingering_bytes = 0

    def _memory_bytes(self) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """Return the memory of each execution: its workspace and all stays, from the first read on if reloaded."""
        problem, n = self.problem, len(self.computed)
        change = np.zeros(n + 2, dtype=np.int64)
        for stay in self.stays:
            change[stay.begin] += problem.sizes[stay.tensor]
            change[stay.end + 1] -= problem.sizes[stay.tensor]
        memory = np.cumsum(change)[:n]
        seen = -1
        for place, op in enumerate(self.computed):
            memory[place] += problem.graph.ops[op].workspace_bytes
            if op <= seen:
                memory[place] += problem.again_bytes[op] - problem.own_bytes[op]
            memory[place] -= sum(problem.sizes[stay.tensor] for stay in self.written_over[place])
            seen = max(seen, op)
        return memory

    def _plan_copies_in(self) -> None:
        """Set the positions at which reloads are issued, the last first: their memory is allocated from there on."""
        problem = self.problem
        starts_s = list(accumulate((problem.time_s[op] for op in self.computed), initial=0.0))
        free_until_s = starts_s[-1]
        for stay in sorted((s for s in self.stays if s.fetched), key=lambda s: -s.read):
            size = problem.sizes[stay.tensor]
            free_until_s = min(free_until_s, starts_s[stay.read]) - self.offloads.by_tensor[stay.tensor].reload_s
            begin = bisect_right(starts_s, free_until_s, hi=stay.read + 1) - 1
            begin = max(begin, stay.after + 1, 0)
            full = np.flatnonzero(self.memory[begin : stay.read] + size > problem.capacity_bytes)
            if len(full):
                begin += int(full[-1]) + 1
            self.memory[begin : stay.read] += size
            stay.begin = begin

    def run(self) -> Timed:
        problem = self.problem
        waits_s: list[float] = []
        memory_bytes: list[int] = []
        ends: list[int] = []
        for place, op in enumerate(self.computed):
            before_s = self.now_s
            self._release(place)
            coming = sorted(self.coming[place], key=lambda stay: stay.read)
            for stay in coming:
                self._copy_in(stay)
            outputs = problem.outputs[op]
            for t in (*problem.inputs[op], *outputs):
                if t in self.ready_s:
                    self.now_s = max(self.now_s, self.ready_s.pop(t))
            waits_s.append(self.now_s - before_s)
            memory_bytes.append(int(self.memory[place]) + self.lingering_bytes)
            self.steps.append(Compute(op))
            self.now_s += problem.time_s[op]
            for stay in self.written_over[place]:  # directly after the op: only then does it overwrite them
                self._end(stay)
            for stay in self.leaving[place]:
                self.made_s[stay.tensor] = self.now_s
                self.waiting.append(stay)
            next_s = self.now_s + (problem.time_s[self.computed[place + 1]] if place + 1 < len(self.computed) else 0.0)
            while self.waiting and self.out_s < next_s:
                self._send()
            for stay in self.ending[place]:
                self._end(stay)
            ends.append(len(self.steps))
        return Timed(self.away, self.steps, memory_bytes, waits_s, ends, self.now_s)

    def _release(self, place: int) -> None:
        """Free lingering tensors: all that are on the host, and those whose memory is needed, as soon as they are there."""
        if not self.lingering:
            return
        for t in [t for t in self.lingering if self.on_host_s.get(t, math.inf) <= self.now_s]:
            self._free(t)
        for t in (*(stay.tensor for stay in self.coming[place]), *self.problem.outputs[self.computed[place]]):
            while t in self.lingering and t not in self.on_host_s:
                self._send()
            if t in self.lingering:
                self._free(t)
        while self.lingering and int(self.memory[place]) + self.lingering_bytes > self.problem.capacity_bytes:
            sent = [(self.on_host_s[t], t) for t in self.lingering if t in self.on_host_s]
            if sent:
                self._free(min(sent)[1])
            else:
                self._send()

    def _free(self, t: int) -> None:
        """Free a lingering tensor, once it is on the host."""
        self.now_s = max(self.now_s, self.on_host_s[t])
        self.lingering.discard(t)
        self.lingering_bytes -= self.problem.sizes[t]
        self.steps.append(Free(t))

    def _send(self) -> None:
        """Issue the next offload when the channel is free: of the tensors that are ready, the one that is freed first."""
        free_s = max(self.out_s, min(self.made_s[stay.tensor] for stay in self.waiting))
        made = [stay for stay in self.waiting if self.made_s[stay.tensor] <= free_s]
        stay = min(made, key=lambda stay: (stay.end, stay.begin, stay.tensor))
        self.waiting.remove(stay)
        self._copy_out(stay)

    def _copy_in(self, stay: Stay) -> None:
        t, transfers = stay.tensor, self.offloads.by_tensor[stay.tensor]
        self.steps.append(Compute(transfers.reload_op))
        self.in_s = max(self.in_s, self.now_s, self.on_host_s[t]) + transfers.reload_s
        self.ready_s[t] = self.in_s
        if self.last_come[t] == stay.begin:
            self.here_again[t] = self.in_s

    def _copy_out(self, stay: Stay) -> None:
        t, transfers = stay.tensor, self.offloads.by_tensor[stay.tensor]
        if self.offloads.host_bytes is not None and not self._make_room_on_host(self.offloads.host_bytes - self.problem.sizes[t]):
            raise _HostFullError(t)
        self.host_bytes += self.problem.sizes[t]
        self.steps.append(Compute(transfers.offload_op))
        self.out_s = max(self.out_s, self.made_s[t]) + transfers.offload_s
        self.on_host_s[t] = self.out_s

    def _make_room_on_host(self, most_bytes: int) -> bool:
        """Free host tensors that are not needed again, until at most `most_bytes` are used; return True if that suffices."""
        while self.host_bytes > most_bytes and self.here_again:
            t, done_s = self.here_again.popitem()
            self.out_s = max(self.out_s, done_s)
            self.host_bytes -= self.problem.sizes[t]
            self.steps.append(Free(self.offloads.by_tensor[t].host_tensor))
        return self.host_bytes <= most_bytes

    def _end(self, stay: Stay) -> None:
        t = stay.tensor
        if stay.leaves and self.on_host_s.get(t, math.inf) > self.now_s:
            self.lingering.add(t)
            self.lingering_bytes += self.problem.sizes[t]
        else:
            self.steps.append(Free(t))
