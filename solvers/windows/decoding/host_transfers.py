"""From an order of executions, and where tensors come back from the host before they are read, to steps on three streams.

When to copy is not asked of the model, which knows windows only. Out when the channel is free, of what is made by then what is to
go first. In as late as it arrives in time, planned backwards over the channel, later where there is no room. A tensor goes once
it is on the host, and where memory is called for before, the computation waits for that.
"""

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from graphs.options.offload import Copies
from graphs.schedule import Compute, Free, Step
from solvers.problem import Problem

Away = Collection[tuple[int, int]]  # (tensor, position of an execution that it is brought back for)


@dataclass(slots=True)
class Stay:
    """A tensor in memory, from position `begin` of the executions to `end`.

    Attributes:
        read: the position it is first wanted at.
        fetched: it comes from the host; else an op makes it at `begin`.
        leaves: it is copied out.
        after: where the stay before it ended, -1 if there is none.
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
    """Steps, and by execution what is in memory (static bytes left out) and how long the computation waits before it.

    Attributes:
        away: what was asked for, less what the host had no room for.
        ends: for each execution how many steps there are until what goes after it at once is gone.
        time_s: when the computation is done.
    """

    away: frozenset[tuple[int, int]]
    steps: list[Step]
    memory_bytes: list[int]
    waits_s: list[float]
    ends: list[int]
    time_s: float


def stays_of(problem: Problem, computed: Sequence[int], away: Away) -> list[Stay]:
    """When tensors are in memory, as short as can be; kept ones to the end.

    A tensor is copied out once: in the last stay for which it is made before it is fetched for the first time.
    """
    assert problem.copies is not None
    stays: list[Stay] = []
    last: dict[int, Stay] = {}
    made: dict[int, Stay] = {}  # the last time each was
    sent: set[int] = set()
    away = frozenset(away)
    for place, op in enumerate(computed):
        for t in problem.inputs[op]:
            stay = last[t]
            if (t, place) in away and stay.end < place and t in problem.copies.trips:
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
    """The steps. What the host has no room for when it would go there stays."""
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
        assert problem.copies is not None
        self.problem = problem
        self.away = away
        stays = stays_of(problem, computed, away)
        self.copies: Copies = problem.copies
        self.computed = computed
        self.stays = stays
        self.ending: list[list[Stay]] = [[] for _ in computed]
        self.written_over: list[list[Stay]] = [[] for _ in computed]  # of those that end, apart from the others
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
        self.here_again: dict[int, float] = {}  # what was copied in for the last time, and when that ends
        self.waiting: list[Stay] = []  # to be copied out
        self.made_s: dict[int, float] = {}  # for these, when they were made
        self.lingering: set[int] = set()  # tensors that go once they are on the host
        self.lingering_bytes = 0

    def _memory_bytes(self) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """By execution: its workspace, and all stays, those from the host from their first read on."""
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
        """Set where copies in are issued, the last first: their memory is taken from there on."""
        problem = self.problem
        starts_s = list(accumulate((problem.time_s[op] for op in self.computed), initial=0.0))
        free_until_s = starts_s[-1]
        for stay in sorted((s for s in self.stays if s.fetched), key=lambda s: -s.read):
            size = problem.sizes[stay.tensor]
            free_until_s = min(free_until_s, starts_s[stay.read]) - self.copies.trips[stay.tensor].in_s
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
            for stay in self.written_over[place]:  # right behind the op: that is what makes it write over them
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
        """Free what lingers: all that is on the host by now, and what is in the way, as soon as it is there."""
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
        """Free what lingers, once it is on the host."""
        self.now_s = max(self.now_s, self.on_host_s[t])
        self.lingering.discard(t)
        self.lingering_bytes -= self.problem.sizes[t]
        self.steps.append(Free(t))

    def _send(self) -> None:
        """Issue a copy out: when the channel is free, what is to go first of all that is made by then."""
        free_s = max(self.out_s, min(self.made_s[stay.tensor] for stay in self.waiting))
        made = [stay for stay in self.waiting if self.made_s[stay.tensor] <= free_s]
        stay = min(made, key=lambda stay: (stay.end, stay.begin, stay.tensor))
        self.waiting.remove(stay)
        self._copy_out(stay)

    def _copy_in(self, stay: Stay) -> None:
        t, trip = stay.tensor, self.copies.trips[stay.tensor]
        self.steps.append(Compute(trip.in_op))
        self.in_s = max(self.in_s, self.now_s, self.on_host_s[t]) + trip.in_s
        self.ready_s[t] = self.in_s
        if self.last_come[t] == stay.begin:
            self.here_again[t] = self.in_s

    def _copy_out(self, stay: Stay) -> None:
        t, trip = stay.tensor, self.copies.trips[stay.tensor]
        if self.copies.host_bytes is not None and not self._make_room_on_host(self.copies.host_bytes - self.problem.sizes[t]):
            raise _HostFullError(t)
        self.host_bytes += self.problem.sizes[t]
        self.steps.append(Compute(trip.out_op))
        self.out_s = max(self.out_s, self.made_s[t]) + trip.out_s
        self.on_host_s[t] = self.out_s

    def _make_room_on_host(self, most_bytes: int) -> bool:
        """Free there what will not be wanted again, until no more than `most_bytes` are taken."""
        while self.host_bytes > most_bytes and self.here_again:
            t, done_s = self.here_again.popitem()
            self.out_s = max(self.out_s, done_s)
            self.host_bytes -= self.problem.sizes[t]
            self.steps.append(Free(self.copies.trips[t].host_tensor))
        return self.host_bytes <= most_bytes

    def _end(self, stay: Stay) -> None:
        t = stay.tensor
        if stay.leaves and self.on_host_s.get(t, math.inf) > self.now_s:
            self.lingering.add(t)
            self.lingering_bytes += self.problem.sizes[t]
        else:
            self.steps.append(Free(t))
