"""XEngine's 0-1 program (Schuler, Membarth, Slusallek, ACM TACO 2022): Checkmate's, on several devices.

Stage t ends with the first execution of op t, on one of the devices. R[d,t,i]: op i is executed on device d in stage t;
S[d,t,x]: tensor x is in the memory of d when stage t begins; A[d,e,t,x,v]: x is copied from d to e in stage t, just before op v
has its turn there; F[d,t,x,k]: x leaves d in stage t after the turn of k; U[d,t,k]: memory of d at the turn of k.

    sum over d of R[d,t,t] = 1
    R[e,t,v]      <= R[e,t,p(x)] + S[e,t,x] + sum over d and w <= v of A[d,e,t,x,w]        x read by op v
    A[d,e,t,x,v]  <= R[e,t,v]       A[d,e,t,x,v] <= R[d,t,p(x)] + S[d,t,x]
    S[d,t+1,x]    <= S[d,t,x] + R[d,t,p(x)]
    minimise sum of c_di R[d,t,i] + sum of copy_dex A[d,e,t,x,v]

Published, a copy is the product R[e,t,v] Z[d,t,x] with Z = R or S, left quadratic; A makes it linear, once for each tensor and
device. What is otherwise than published is out for a defect, or there to agree with ``graphs.simulate``:

- a tensor that is on a device already is not copied there again; of several sources one is chosen;
- a copy takes memory where it arrives, from the turn of its first reader to that of the last, and its source stays until then;
- rows of memory and of what is freed are written for each device by itself;
- kept tensors end on the main device, where they stay from when they first are there (copied as their pass ends, if need be);
- several outputs of an op, workspaces, ops that must not run again: as in ``solvers.checkmate.model``.

With `stay` a copy may be handed on to the next stage as well, and with `ahead` be made as a stage begins.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from graphs.options.passes import due
from graphs.options.placement import Placement
from solvers.highs.columns import ONE, Columns, Term, Weighted

MOST_COLUMNS = 40_000
BEGIN = -1  # the turn before all ops of a stage
_MEMORY_RANGE = 1e4  # the capacity of a pool in the program's unit of its memory
_TIME_RANGE = 1e3  # the step on the main device in its unit of time


@dataclass(frozen=True, slots=True)
class Class:
    """Which schedules are looked for.

    Attributes:
        stay: a copy may be handed on to the next stage; published: it goes with the stage.
        ahead: copies may be made when a stage begins, for later ones.
        again: ops may be executed more than once.
    """

    stay: bool = False
    ahead: bool = False
    again: bool = True


PUBLISHED = Class()


class XEngineProgram(Columns):
    """The program of a graph with placement.

    Attributes:
        R, S, A, F: columns by the letters of the program, where they may be 1. The turn of a copy at the end is `ops`.
        capacity: bytes by device that produced tensors may take; None: all of them fit, as often as they may be there.
        unit_s: seconds, the unit of time.
    """

    def __init__(
        self, placement: Placement, budget_bytes: int, schedules: Class = PUBLISHED, *, whole_frees: bool = False
    ) -> None:
        super().__init__()
        self.placement, self.graph, self.schedules = placement, placement.program, schedules
        self.whole_frees = whole_frees
        self.ops, self.devices = len(self.graph.ops), range(len(placement.pools))
        capacities = [budget_bytes - self.graph.static_bytes, *(pool.capacity_bytes for pool in placement.pools[1:])]
        total = sum(2 * t.size_bytes for t in self.graph.tensors) + max(op.workspace_bytes for op in self.graph.ops)
        self.capacity = [None if c is None or c >= total else c for c in capacities]
        self.unit_s = (self.graph.time_s or 1.0) / _TIME_RANGE
        self.made_at = [t.producers[0] if t.producers else -1 for t in self.graph.tensors]
        (self.last_run, self.last_use), self.due = _last_stages(placement), due(self.graph)
        self.R: dict[tuple[int, int, int], int] = {}
        self.S: dict[tuple[int, int, int], int] = {}
        self.A: dict[tuple[int, int, int, int, int], int] = {}
        self.F: dict[tuple[int, int, int, int], int] = {}
        self.arriving: dict[tuple[int, int, int], list[tuple[int, int]]] = {}  # by device, stage, turn: tensors, columns
        self.leaving: dict[tuple[int, int, int], list[tuple[int, int]]] = {}  # by device, stage, tensor: turns, columns
        self.seconds: dict[int, float] = {}  # of columns R and A

    def build(self) -> bool:
        """Make columns and rows; False if that would be too large."""
        for t in range(self.ops):
            self.add_columns(t)
            if len(self.cost) > MOST_COLUMNS:
                return False
        for t in range(self.ops):
            self.add_first(t)
            self.add_inputs(t)
            self.add_sources(t)
            self.add_hand_over(t)
            for d in self.devices:
                self.add_memory(d, t)
            if len(self.cost) > MOST_COLUMNS:
                return False
        for x in self.graph.kept:
            self.add_end(x)
        return True

    def count_seconds(self) -> None:
        """The objective of the paper: the sum of all that is executed and copied."""
        for column, seconds in self.seconds.items():
            self.cost[column] = seconds / self.unit_s

    def add_columns(self, t: int) -> None:
        """R and S of stage t where they can serve it or a later one, then A."""
        ops = self.placement.program.ops
        for d in self.devices:
            for i in range(t + 1):
                run = self.placement.runs[d][i]
                if run is not None and (i == t or (self.schedules.again and t <= self.last_run[i])):
                    self.R[d, t, i] = self._timed(run)
            for x, place in enumerate(self.placement.places[d]):
                if place is not None and max(self.made_at[x], 0) < t <= self._until(d, x) and self._can_stay(d, x):
                    # Where all fits everything is handed on (``add_hand_over``), so that S is whole by itself.
                    self.S[d, t, x] = self.column(integer=self.capacity[d] is not None)
        if self.schedules.ahead:
            for x in range(len(self.graph.tensors)):
                if self.last_use[x] >= t:
                    self._add_copies(t, BEGIN, x, self.devices)
        alone = all(i == t for _, stage, i in self.R if stage == t)
        for v in range(t + 1):
            readers = [e for e in self.devices if (e, t, v) in self.R]
            if self.schedules.ahead and alone:
                readers = []  # as the stage begins is just before its only op
            for x in ops[v].inputs:
                self._add_copies(t, v, x, readers)
        for x in (x for x, stage in self.due.items() if stage == t):
            self._add_copies(t, self.ops, x, [0])

    def _add_copies(self, t: int, turn: int, x: int, targets: Iterable[int]) -> None:
        for e in targets:
            for d in self.devices:
                run = self.placement.copies.get((d, e, x))
                made = None if turn == BEGIN else self.r(d, t, self.made_at[x])
                if run is not None and (made is not None or self.s(d, t, x) is not None):
                    column = self._timed(run)
                    self.A[d, e, t, x, turn] = column
                    self.arriving.setdefault((e, t, turn), []).append((x, column))
                    self.leaving.setdefault((d, t, x), []).append((turn, column))

    def _timed(self, op: int) -> int:
        column = self.column(integer=True)
        self.seconds[column] = self.placement.whole.ops[op].time_s
        return column

    def _until(self, d: int, x: int) -> int:
        """The last stage before which x may be handed on to d: with copies ahead it may wait for one, where memory counts."""
        waits = self.schedules.ahead and self.capacity[d] is not None
        return self.ops - 1 if waits or self.stays(d, x) else self.last_use[x]

    def _can_stay(self, d: int, x: int) -> bool:
        """Whether x may be handed on: on main what is static is always there, elsewhere it comes by a copy."""
        return not self.graph.tensors[x].static or (d > 0 and self.schedules.stay)

    def stays(self, d: int, x: int) -> bool:
        """Whether x is never freed on d, once it is there."""
        return d == 0 and x in self.graph.kept

    def add_first(self, t: int) -> None:
        """Exactly one first execution over all devices: sum of R[d,t,t] = 1."""
        self.row([(self.r(d, t, t), 1) for d in self.devices], 1, 1)

    def add_inputs(self, t: int) -> None:
        """R[e,t,v] <= R[e,t,p(x)] + S[e,t,x] + sum of A[d,e,t,x,w] for w <= v."""
        for (e, stage, v), executed in self.R.items():
            for x in self.graph.ops[v].inputs if stage == t else ():
                if self.s(e, t, x) != ONE:
                    self.at_most([(executed, 1), *self._there(e, t, x, v)], 0)

    def _there(self, e: int, t: int, x: int, turn: int) -> list[Weighted]:
        """-1 for each way in which x may be on e by a turn of stage t."""
        copies = [(column, -1.0) for w in range(BEGIN, turn + 1) for y, column in self.arriving.get((e, t, w), ()) if y == x]
        made = self.r(e, t, self.made_at[x]) if self.made_at[x] < turn else None
        return [(made, -1.0), (self.s(e, t, x), -1.0), *copies]

    def add_sources(self, t: int) -> None:
        """A[d,e,t,x,v] <= R[e,t,v], and <= R[d,t,p(x)] + S[d,t,x]; as a stage begins, <= S[d,t,x]."""
        for (d, e, stage, x, turn), column in self.A.items():
            if stage != t:
                continue
            if 0 <= turn < self.ops:
                self.at_most([(column, 1), (self.r(e, t, turn), -1)], 0)
            if self.s(d, t, x) != ONE:
                made = None if turn == BEGIN else self.r(d, t, self.made_at[x])
                self.at_most([(column, 1), (made, -1), (self.s(d, t, x), -1)], 0)

    def add_hand_over(self, t: int) -> None:
        """S[d,t+1,x] <= S[d,t,x] + R[d,t,p(x)], with copies where they stay; at least each of them where nothing is freed."""
        for d in self.devices:
            for x in range(len(self.graph.tensors)):
                after, stays = self.S.get((d, t + 1, x)), self.stays(d, x)
                if after is None:
                    continue
                before = [(self.s(d, t, x), -1.0), (self.r(d, t, self.made_at[x]), -1.0)]
                if self.schedules.stay or stays:
                    before = self._there(d, t, x, self.ops)
                self.at_most([(after, 1), *before], 0)
                for column, _ in before if stays or self.capacity[d] is None else ():
                    if column is not None:
                        self.at_most([(column, 1), (after, -1)], 0)

    def add_end(self, x: int) -> None:
        """A kept tensor is on the main device when the last stage ends, or the last of the forward pass, if it is made there."""
        self.at_most(self._there(0, self.due[x], x, self.ops), -1)

    def add_memory(self, d: int, t: int) -> None:
        """U[d,t,k] = U[d,t,k-1] - what left after k - 1 + what arrives before k and what it makes; U + workspace <= M_d."""
        if (capacity := self.capacity[d]) is None:
            return
        unit = max(capacity, 1) / _MEMORY_RANGE
        size = [0.0 if t.static and d == 0 else t.size_bytes / unit for t in self.graph.tensors]
        change: list[Weighted] = [(self.S.get((d, t, x)), size[x]) for x in range(len(size))]
        previous: Term = None
        for k in self.turns(t):
            arriving, executed = self.arriving.get((d, t, k), ()), self.r(d, t, k)
            change += [(column, size[x]) for x, column in arriving]
            if executed is not None:
                change.append((executed, sum(size[x] for x in self.graph.ops[k].outputs)))
            if executed is not None or arriving:
                used = self.column(upper=max(capacity / unit, 0.0))
                self.row([(used, 1), (previous, -1), *((term, -weight) for term, weight in change)], 0, 0)
                if executed is not None and (workspace_bytes := self.graph.ops[k].workspace_bytes):
                    self.at_most([(used, 1), (executed, workspace_bytes / unit)], capacity / unit)
                previous, change = used, []
            change += [(freed, -size[x]) for x, freed in self.frees(d, t, k)]
            change += [(double, -size[x]) for x, double in self.doubles(d, t, k)]

    def turns(self, t: int) -> Iterator[int]:
        """Of stage t: before its ops, each of them, and, where a kept tensor is due, the end."""
        yield from range(BEGIN, t + 1)
        if t in self.due.values() or t == self.ops - 1:
            yield self.ops

    def frees(self, d: int, t: int, k: int) -> Iterator[tuple[int, int]]:
        """F[d,t,x,k] <= what uses x at k: R[d,t,k] + sum of A[d,e,t,x,k]; and <= 1 - each later use, and 1 - S[d,t+1,x]."""
        uses: dict[int, list[int]] = {}
        if (executed := self.r(d, t, k)) is not None:
            for x in dict.fromkeys((*self.graph.ops[k].inputs, *self.graph.ops[k].outputs)):
                uses[x] = [executed]
        for (source, stage, x), copies in self.leaving.items():
            if (source, stage) == (d, t):
                for turn, column in copies:
                    if turn == k:
                        uses.setdefault(x, []).append(column)
        for x, events in uses.items():
            if self.stays(d, x) or (d == 0 and self.graph.tensors[x].static):
                continue
            later = [self.r(d, t, j) for j in self.graph.consumers[x] if k < j <= t]
            later += [column for turn, column in self.leaving.get((d, t, x), ()) if turn > k]
            freed = self.column(integer=self.whole_frees)
            self.at_most([(freed, 1), *((event, -1.0) for event in events)], 0)
            for hazard in (self.S.get((d, t + 1, x)), *later):
                if hazard is not None:
                    self.at_most([(freed, 1), (hazard, 1)], 1)
            self.F[d, t, x, k] = freed
            yield x, freed

    def doubles(self, d: int, t: int, k: int) -> Iterator[tuple[int, int]]:
        """R[d,t,k] S[d,t,x] for what op k makes again: it is there twice until its turn is over."""
        if (executed := self.r(d, t, k)) is None:
            return
        for x in self.graph.ops[k].outputs:
            if (there := self.S.get((d, t, x))) is not None and (len(self.graph.ops[k].outputs) > 1 or self.stays(d, x)):
                double = self.column()
                self.at_most([(double, 1), (executed, -1)], 0)
                self.at_most([(double, 1), (there, -1)], 0)
                yield x, double

    def r(self, d: int, t: int, i: int) -> Term:
        """R[d,t,i]."""
        return self.R.get((d, t, i))

    def s(self, d: int, t: int, x: int) -> Term:
        """S[d,t,x]: 1 for what is static on the main device."""
        return ONE if d == 0 and self.graph.tensors[x].static else self.S.get((d, t, x))


def _last_stages(placement: Placement) -> tuple[list[int], list[int]]:
    """For each op the last stage that it may run in for any use, and for each tensor the last in which it may be used.

    An op that must not run again, or whose inputs have been written, runs no later; what is kept is used to the end.
    """
    graph = placement.program
    last = len(graph.ops) - 1
    writers = [(t, op.id) for op in graph.ops for t in op.mutates]
    last_use = [last if t in graph.kept else -1 for t in range(len(graph.tensors))]
    last_run = [0] * len(graph.ops)
    for op in reversed(graph.ops):
        allowed = min((w for t, w in writers if w > op.id and t in (*op.inputs, *op.mutates)), default=last)
        worth = max((last_use[t] for t in op.outputs), default=op.id)
        last_run[op.id] = max(op.id, min(allowed, worth)) if op.recomputable else op.id
        for t in op.inputs:
            last_use[t] = max(last_use[t], last_run[op.id])
    return last_run, last_use
