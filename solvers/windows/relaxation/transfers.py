"""Offloading: variables, and rows 10 to 13. Relaxations; none for graphs without transfers to the host.

    A[k,t]  memory for t is allocated in window k, to be filled from the host
    Y[k,t]  the part of a reload of t that is done in window k
    V[k,t]  the part of t that is valid when window k begins; V <= S, its memory
    X[k,t]  the part of an offload of t that is done in window k
    W[k,t]  the part of t@host that exists when window k begins
    stall[k] >= 0  the time that the compute stream waits in window k

Memory is counted in the order of issue, transfers in time: those issued in a window may be done in later ones.

A transfer may be in progress over several windows, so Y and V are fractions, and short windows stay a relaxation. The rows by
which A, Y and (in merged windows) F are at most what was offloaded before were found the hard way: without them half a tensor,
offloaded once, is reloaded twice, and the bound of a step fell from 10.1 to 7.8% as windows were added. Without merged windows
likewise.
"""

from bisect import bisect_left
from itertools import accumulate

import numpy as np

from planner.solvers.problem import OBJECTIVE_SCALE
from planner.solvers.windows.relaxation.draft import NONE, ModelDraft

_PARTS = 8  # row 13 divides a window into halves, quarters next to its ends, and so on
_LONG = 1e-3  # of the step: an op that takes as long is worth rows for transfers that end before it


def add_offloads(draft: ModelDraft) -> None:
    """Add the variables, and rows 10 to 12 for every window."""
    trips = draft.problem.round_trips
    for k in range(draft.windows):
        for t in trips:
            _add_variables(draft, k, t)
    for k in range(draft.windows):
        for t in trips:
            if (k, t) in draft.taken:
                add_reload(draft, k, t)
            if (k, t) in draft.stored:
                add_offload(draft, k, t)
        add_host_memory(draft, k)


def _add_variables(draft: ModelDraft, k: int, t: int) -> None:
    """Add X[k,t] while t may be read later; A and Y if it may also have been freed before; V and W if it is old."""
    problem = draft.problem
    producer, start, end = problem.producer[t], draft.starts[k], draft.discretization.ends[k]
    if producer > end or problem.last_use[t] < start:
        return
    draft.stored[k, t] = draft.add_column()
    if producer < end and problem.last_use[t] > producer:
        draft.taken[k, t] = draft.add_column(integer=True)
        draft.fetched[k, t] = draft.add_column()
    if producer < start:
        draft.hosted[k, t] = draft.add_column()
        if (k - 1, t) in draft.taken:
            draft.valid[k, t] = draft.add_column()


def add_reload(draft: ModelDraft, k: int, t: int) -> None:
    """Add row 10: reloads, and the valid parts of tensors.

    Y[k,t] <= S[k,t] + A[k,t]                           (new t: no S)
    A[k,t] <= W[k,t] + X[k,t], Y[k,t] likewise          (new t: no W; Y only if the host's capacity is unlimited)
    V[k,t] <= S[k,t]                                    old t
    V[k+1,t] <= V[k,t] + Y[k,t] + R[k,p(t)]             old t
    V[k+1,t] + A[k,t] <= 1 + Y[k,t] + R[k,p(t)]         Q for new t
    """
    taken, fetched = draft.taken[k, t], draft.fetched[k, t]
    old = (k, t) in draft.handed
    draft.add_only_with(fetched, [draft.handed[k, t], taken] if old else [taken])
    on_host = [draft.hosted[k, t], draft.stored[k, t]] if old else [draft.stored[k, t]]
    draft.add_only_with(taken, on_host)
    if draft.problem.host_bytes is None:
        draft.add_only_with(fetched, on_host)
    if (k, t) in draft.valid:
        draft.add_only_with(draft.valid[k, t], [draft.handed[k, t]])
    if (k + 1, t) in draft.valid:
        valid, arriving = draft.valid[k + 1, t], [fetched, *draft.list_recomputing(k, t)]
        makes = draft.sum_productions(k, t, draft.discretization.ends[k] + 1)
        if old:
            draft.add_only_with(valid, [draft.valid.get((k, t), draft.handed[k, t]), *arriving], makes)
        # A tensor that an op certainly produces in its place is produced before it can be offloaded.
        if not makes[0] or (draft.problem.places.sure[draft.problem.producer[t]] and makes == (1.0, [], [])):
            values = [1.0, 1.0] + [-1.0] * len(arriving) + [-value for value in makes[2]]
            draft.add_row([valid, taken, *arriving, *makes[1]], values, -np.inf, 1.0)


def add_offload(draft: ModelDraft, k: int, t: int) -> None:
    """Add row 11: X[k,t] <= S[k,t] + R[k,p(t)] for old t, and W[k+1,t] <= W[k,t] + X[k,t]."""
    old = (k, t) in draft.hosted
    if old:
        makes = draft.sum_productions(k, t, draft.discretization.ends[k] + 1)
        draft.add_only_with(draft.stored[k, t], [draft.handed[k, t], *draft.list_recomputing(k, t)], makes)
    if (k + 1, t) in draft.hosted:
        earlier = [draft.hosted[k, t]] if old else []
        draft.add_only_with(draft.hosted[k + 1, t], [*earlier, draft.stored[k, t]])


def add_host_memory(draft: ModelDraft, k: int) -> None:
    """Add row 12, if the host has a capacity: sum of b_t W[k,t] <= its capacity."""
    capacity_bytes, held = draft.problem.host_bytes, [t for t in draft.problem.round_trips if (k, t) in draft.hosted]
    if capacity_bytes is not None and held:
        unit = max(1.0, capacity_bytes / 1e3)
        sizes = [draft.problem.sizes[t] / unit for t in held]
        draft.add_row([draft.hosted[k, t] for t in held], sizes, -np.inf, capacity_bytes / unit)


def add_channels(draft: ModelDraft) -> None:
    """Add row 13, for each window and direction: sum of seconds x Y, or X, <= T_k = c of its new ops + c (R + Q) + stall[k].

    T_k is the time of the compute stream in window k, including waits: the sum of them is the time of a schedule. For some new
    ops v of the window there are also rows for the part of T_k after v, for tensors produced by v and later ops, and the part
    before v:

    sum of out seconds x X[k,t] <= T_k - c of the new ops up to v                       new t, produced by v or later
    sum of out seconds x Z[k,t] <= the same - c of e_k                                  also for all t, with v = 0
    sum of in seconds x (1 - V[k,t] - R[k,p(t)]) <= T_k - c of the new ops from v on    old t, read by a new op up to v

    Z[k,t] >= X[k,t] - S[k+1,t] for t outside io(e_k): tensors freed before e_k were offloaded before.
    """
    if not draft.problem.round_trips:
        return
    channels = _Channels(draft)
    for k in range(draft.windows):
        channels.add_window(k)


class _Channels:
    def __init__(self, draft: ModelDraft) -> None:
        self.draft, trips = draft, draft.problem.round_trips
        units = draft.problem.convert_to_units
        sure = draft.problem.places.sure
        self.new = [units(time_s) if sure[v] else 0.0 for v, time_s in enumerate(draft.problem.time_s)]
        self.out = {t: units(transfers.out.time_s) for t, transfers in trips.items()}
        self.back = {t: units(transfers.back.time_s) for t, transfers in trips.items()}
        self.most = sum(max(self.out[t], self.back[t]) for t in trips)  # longest wait in a window
        self.recomputed: list[list[tuple[int, float]]] = [[] for _ in range(draft.windows)]
        for (k, _), column in draft.recomputed.items():
            self.recomputed[k].append((column, draft.cost[column]))

    def add_window(self, k: int) -> None:
        draft, ops = self.draft, range(self.draft.starts[k], self.draft.discretization.ends[k] + 1)
        clock = [*self.recomputed[k], (draft.add_column(1.0, upper=self.most), 1.0)]
        # Optional executions count anywhere in the window.
        self.unsure = 0.0
        for v in ops if not draft.problem.places.plain else ():
            if not draft.problem.places.sure[v]:
                executed, columns, ones = draft.get_execution(v)
                unit = draft.problem.convert_to_units(draft.problem.time_s[v])
                self.unsure += unit * executed
                clock += [(column, unit * one) for column, one in zip(columns, ones, strict=True)]
        for parts, seconds in ((draft.stored, self.out), (draft.fetched, self.back)):
            self.add(clock, ops, [(parts[k, t], of_t) for t, of_t in seconds.items() if (k, t) in parts])
        gone = self.add_departures(k)
        self.add(clock, ops[:-1], [(column, self.out[t]) for t, column in gone.items()])
        for v in self.choose_places(ops, late=True):
            first = draft.problem.producer
            made = [t for i in range(v, ops.stop) for t in draft.problem.outputs[i] if (k, t) in draft.stored and first[t] == i]
            self.add(clock, ops[v + 1 - ops.start :], [(draft.stored[k, t], self.out[t]) for t in made])
            self.add(clock, ops[v + 1 - ops.start : -1], [(gone[t], self.out[t]) for t in made if t in gone])
        for v in self.choose_places(ops, late=False):
            sure = [i for i in range(ops.start, v + 1) if draft.problem.places.sure[i]]
            inputs = sorted({t for i in sure for t in draft.problem.inputs[i]})
            read = [t for t in inputs if t in self.back and (k, t) in draft.handed and draft.sum_productions(k, t, v) is NONE]
            terms = [(column, -self.back[t]) for t in read for column in (self.get_valid(k, t), *draft.list_recomputing(k, t))]
            self.add(clock, range(ops.start, v), terms, sum(self.back[t] for t in read))

    def add_departures(self, k: int) -> dict[int, int]:
        """Return for t not in io(e_k) the column of Z[k,t] >= X[k,t] - S[k+1,t], or of X if t is not handed over.

        The result is empty in the last window, and if e_k is so short that the rows gain nothing.
        """
        draft, end = self.draft, self.draft.discretization.ends[k]
        if k + 1 == draft.windows or self.new[end] < _LONG * OBJECTIVE_SCALE:  # 0 where e_k need not be executed
            return {}
        own = {*draft.problem.inputs[end], *draft.problem.outputs[end]}
        columns: dict[int, int] = {}
        for t in self.out:
            if (k, t) not in draft.stored or t in own:
                continue
            columns[t] = draft.stored[k, t]
            if (k + 1, t) in draft.handed:
                columns[t] = draft.add_column()
                draft.add_only_with(draft.stored[k, t], [columns[t], draft.handed[k + 1, t]])
        return columns

    def get_valid(self, k: int, t: int) -> int:
        """Return the column of V[k,t], or of S[k,t] if t cannot have been reloaded before."""
        return self.draft.valid.get((k, t), self.draft.handed[k, t])

    def choose_places(self, ops: range, *, late: bool) -> list[int]:
        """Return ops of the window before the last one: at half of its time from its end (or start), a quarter, and so on."""
        done = list(accumulate(self.new[v] for v in ops[:-1]))
        shares = [2.0**-part for part in range(1, _PARTS)]
        if not done:
            return []
        return sorted({ops.start + bisect_left(done, done[-1] * (1 - share if late else share)) for share in shares})

    def add(self, clock: list[tuple[int, float]], new: range, copied: list[tuple[int, float]], seconds: float = 0.0) -> None:
        """Add the row seconds + sum of `copied` <= c of `new` + the other terms of `clock`, unless it is redundant."""
        room = sum(self.new[v] for v in new) + self.unsure - seconds
        if sum(max(0.0, value) for _, value in copied) > room:
            columns, values = [column for column, _ in copied], [value for _, value in copied]
            spent = [-value for _, value in clock]
            self.draft.add_row([*columns, *(column for column, _ in clock)], [*values, *spent], -np.inf, room)
