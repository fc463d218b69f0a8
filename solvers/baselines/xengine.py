"""XEngine's program (Schuler et al., ACM TACO 2022), the reference for placement, and the same with clocks, by HiGHS.

The objective of XEngine's program is a serial sum: devices and transfers never work in parallel. ``xengine-overlapped`` replaces
it by the makespan with the clocks of the simulation, for schedules that may also hold a copy for later stages and transfer it
ahead of time; that search starts at the best serial schedule.

Both programs grow with the square of the ops, for each device: they are for small graphs.

XEngine's 0-1 program is Checkmate's (``common.checkmate_program``) on several devices, with copies A[d,e,t,x,v] between them:

    sum over d of R[d,t,t] = 1
    A[d,e,t,x,v]  <= R[e,t,v]       A[d,e,t,x,v] <= R[d,t,p(x)] + S[d,t,x]
    minimise sum of c_di R[d,t,i] + sum of copy_dex A[d,e,t,x,v]

In the paper, a copy is the product R[e,t,v] Z[d,t,x] with Z = R or S, which stays quadratic; A linearises it, once for each
tensor and device. Other changes mend a defect, or are needed to agree with ``planner.graphs.simulate``:

- a tensor that is on a device already is not copied there again; of several sources one is chosen;
- a copy takes memory where it arrives, from the turn of its first reader to that of the last, and its source stays until then;
- rows of memory and frees are written for each device by itself;
- kept tensors end on the main device, where they stay once they are there (copied at the end of their pass, if need be).

With `stay` a copy may be handed over to the next stage as well, and with `ahead` be made at the beginning of a stage.

For the makespan in place of the sum the clocks of the simulation (``planner.graphs.clocks``) are rows of the program.

Devices work in parallel, and so do the channels between them. In the program's order of issue, T_d is the clock of device d, K_de
that of the channel from d to e, W[d,t,x] the time at which x is ready on d in stage t, Z[d,t,x] the end of the last copy of x
away from d, H a time within which some schedule is known to end. ">= z if b" is written ">= z - H (1 - b)".

    an op on d            T_d >= T_d + c R;  T_d >= W[d,t,x] + c if R, x read;  W[d,t,x] >= T_d if R and not S[d,t,x], x an output
    a copy of x, d to e   K_de >= K_de + c A;  K_de >= W[d,t,x] + c and >= T_e + c if A;  W[e,t,x] and Z[d,t,x] >= K_de if A
    hand-over             W[d,t+1,x] >= W[d,t,x] and Z[d,t+1,x] >= Z[d,t,x] if S[d,t+1,x]
    a free on d           T_d >= Z[d,t,x] if F[d,t,x,k];  as the stage ends, T_d >= Z[d,t,x] if not S[d,t+1,x]

The makespan is at least each clock. So that its bound is not just that of the busiest device, e_t is the earliest end of op t:

    e_t >= e_p + sum of c R[d,t,t] + copy (R[e,t,t] + R[d,p,p] - 1) - (their recomputations) (what these may have added)

for an op p that produces an input of t: if p and t are executed once, on d and e, there is a copy between them.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

import numpy as np

from planner.graphs.ir import Graph
from planner.graphs.options.passes import find_due
from planner.graphs.options.placement import Placement, get_placement
from planner.graphs.schedule import Compute, Free, Schedule, Step, schedule_of
from planner.graphs.simulate import simulate
from planner.graphs.units import format_bytes
from planner.solvers import highs
from planner.solvers.baselines.common.checkmate_program import BEGIN, StageProgram
from planner.solvers.baselines.common.program_size import ProgramSize
from planner.solvers.baselines.common.verdicts import Verdict, build_result, judge
from planner.solvers.clock import Clock, measure_rest
from planner.solvers.highs.builder import ONE, Term, Weighted
from planner.solvers.highs.program import Answer, Floats, Milp, Outcome, SolveCallbacks
from planner.solvers.request import Request
from planner.solvers.result import Reason, Result, SolveSettings, Status

MOST_COLUMNS = 40_000
MOST_DECISIONS = 24_000  # of R and S: with A they are 40,000
# Seconds to write the program and solve its relaxation once: half of what 800 to 3,600 variables R and S took on a core.
_LEAST_S, _LEAST_POWER = 5e-7, 1.75
_ONE_HALF = 0.5
_ROUNDING = 1e-6  # of the makespan of a known schedule, in floating point
_SERIAL_SHARE = 0.3  # of the time left, for the serial program when the makespan is requested
_ONCE_SHARE = 0.5  # of the rest, for schedules without recomputation


@dataclass(frozen=True, slots=True)
class XEngineParams:
    """Parameters of the class of schedules.

    Attributes:
        stay: True if copies may be handed over to the next stage; published: they are freed with the stage. Always for the
            makespan.
        again: True if ops may be recomputed, as published; otherwise only their devices are chosen.
    """

    stay: bool = False
    again: bool = True


@dataclass(frozen=True, slots=True)
class ScheduleClass(XEngineParams):
    """The class of schedules of a program; with `ahead`, copies may be made at the beginning of a stage, for later ones."""

    ahead: bool = False


PUBLISHED = ScheduleClass()


class XEngineProgram(StageProgram):
    """The program of a graph with placement.

    Attributes:
        A: columns of copies, where they may be 1. The turn of a copy at the end is `ops`.
        seconds_of: of columns R and A.
    """

    def __init__(
        self, placement: Placement, budget_bytes: int, schedules: ScheduleClass = PUBLISHED, *, whole_frees: bool = False
    ) -> None:
        graph = placement.program
        capacities = [budget_bytes - graph.static_bytes, *(pool.capacity_bytes for pool in placement.pools[1:])]
        total = sum(2 * t.size_bytes for t in graph.tensors) + max(op.workspace_bytes for op in graph.ops)
        capacity = [None if c is None or c >= total else c for c in capacities]
        super().__init__(graph, capacity, whole_frees=whole_frees, copies_stay=schedules.stay)
        self.placement, self.schedules = placement, schedules
        self.due = find_due(graph)
        self.ends = frozenset((*self.due.values(), self.ops - 1))
        self.last_run, self.last_use = self._find_last_uses()
        self.A: dict[tuple[int, int, int, int, int], int] = {}
        self.seconds_of: dict[int, float] = {}

    @property
    def size(self) -> ProgramSize:
        """Its size, by variables R and S; nothing is built."""
        latest = self.last_run if self.schedules.again else range(self.ops)
        executed = sum(1 + max(0, latest[i] - i) for runs in self.placement.runs for i in range(self.ops) if runs[i] is not None)
        handed = sum(
            max(0, self._find_last_stage(d, x) - max(self.made_at[x], 0))
            for d in self.devices
            for x, place in enumerate(self.placement.places[d])
            if place is not None and self._can_stay(d, x)
        )
        count = executed + handed
        what = f"XEngine's program for {self.ops:,} ops on {len(self.devices)} devices has {count:,} variables R and S"
        return ProgramSize(what, count, MOST_DECISIONS, _LEAST_S * count**_LEAST_POWER)

    def _is_large(self) -> bool:
        return len(self.cost) > MOST_COLUMNS

    def build(self) -> bool:
        """Add columns and rows; return False if the program would be too large."""
        families = (self.add_first, self.add_inputs, self.add_sources, self.add_handover)
        memory = tuple(partial(self.add_memory, d) for d in self.devices)
        if not (self.add_all((self.add_columns,), self._is_large) and self.add_all((*families, *memory), self._is_large)):
            return False
        for x in self.graph.kept:
            self.add_at_most(self.list_sources(0, self.due[x], x, self.ops), -1)
        return True

    def add_columns(self, t: int) -> None:
        """Add R and S of stage t if they can serve it or a later one, then A."""
        for d in self.devices:
            for i in range(t + 1):
                run = self.placement.runs[d][i]
                if run is not None and (i == t or (self.schedules.again and t <= self.last_run[i])):
                    self.R[d, t, i] = self._add_timed(run, "R", d, t, i)
            for x, place in enumerate(self.placement.places[d]):
                if place is not None and max(self.made_at[x], 0) < t <= self._find_last_stage(d, x) and self._can_stay(d, x):
                    # If all tensors fit, everything is handed over (``add_handover``), so that S is integer by itself.
                    self.S[d, t, x] = self.add_variable("S", d, t, x, integer=self.capacity[d] is not None)
        if self.schedules.ahead:
            for x in range(len(self.graph.tensors)):
                if self.last_use[x] >= t:
                    self._add_copies(t, BEGIN, x, self.devices)
        alone = all(i == t for _, stage, i in self.R if stage == t)
        for v in range(t + 1):
            readers = [e for e in self.devices if (e, t, v) in self.R]
            if self.schedules.ahead and alone:
                readers = []  # the beginning of the stage is just before its only op
            for x in self.graph.ops[v].inputs:
                self._add_copies(t, v, x, readers)
        for x in (x for x, stage in self.due.items() if stage == t):
            self._add_copies(t, self.ops, x, [0])

    def _add_copies(self, t: int, turn: int, x: int, targets: Iterable[int]) -> None:
        for e in targets:
            for d in self.devices:
                run = self.placement.copies.get((d, e, x))
                made = None if turn == BEGIN else self.r(d, t, self.made_at[x])
                if run is not None and (made is not None or self.s(d, t, x) is not None):
                    column = self.A[d, e, t, x, turn] = self._add_timed(run, "A", d, e, t, x, turn + 1)
                    self.arriving.setdefault((e, t, x), []).append((turn, column))
                    self.leaving.setdefault((d, t, x), []).append((turn, column))

    def _add_timed(self, op: int, letter: str, *key: int) -> int:
        column = self.add_variable(letter, *key, integer=True)
        self.seconds_of[column] = self.placement.whole.ops[op].time_s
        return column

    def _find_last_stage(self, d: int, x: int) -> int:
        """Return the last stage into which x may be handed over on d; with copies ahead it may wait for one."""
        waits = self.schedules.ahead and self.capacity[d] is not None
        return self.ops - 1 if waits or self.stays(d, x) else self.last_use[x]

    def _can_stay(self, d: int, x: int) -> bool:
        """Return True if x may be handed over on d; static tensors are always on the main device, elsewhere they are copies."""
        return not self.graph.tensors[x].static or (d > 0 and self.schedules.stay)

    def add_first(self, t: int) -> None:
        """Add sum of R[d,t,t] = 1: exactly one first execution over all devices."""
        self.add_terms([(self.r(d, t, t), 1) for d in self.devices], 1, 1)

    def add_sources(self, t: int) -> None:
        """Add A[d,e,t,x,v] <= R[e,t,v], and <= R[d,t,p(x)] + S[d,t,x]; at the beginning of a stage, <= S[d,t,x]."""
        for (d, e, stage, x, turn), column in self.A.items():
            if stage != t:
                continue
            if 0 <= turn < self.ops:
                self.add_at_most([(column, 1), (self.r(e, t, turn), -1)], 0)
            if self.s(d, t, x) != ONE:
                made = None if turn == BEGIN else self.r(d, t, self.made_at[x])
                self.add_at_most([(column, 1), (made, -1), (self.s(d, t, x), -1)], 0)

    def _find_last_uses(self) -> tuple[list[int], list[int]]:
        """Return for each op the last stage in which it may be useful, and for each tensor the last in which it may be used.

        Kept tensors are used to the end.
        """
        last_use = [self.ops - 1 if t in self.graph.kept else -1 for t in range(len(self.graph.tensors))]
        last_run = [0] * self.ops
        for op in reversed(self.graph.ops):
            worth = max((last_use[t] for t in op.outputs), default=op.id)
            last_run[op.id] = max(op.id, min(self.last_stage[op.id], worth))
            for t in op.inputs:
                last_use[t] = max(last_use[t], last_run[op.id])
        return last_run, last_use


def add_clocks(program: XEngineProgram, horizon_s: float) -> None:
    """Give `program`, built with ``whole_frees``, the makespan as its objective, at most `horizon_s`."""
    clocks = _Clocks(program, horizon_s / program.unit_s)
    for t in range(program.ops):
        clocks.hand_on(t)
        for turn in program.iterate_turns(t):
            clocks.copy(t, turn)
            clocks.compute(t, turn)
            clocks.free(t, turn)
        clocks.end_stage(t)
    clocks.end()


class _Clocks:
    """The columns of the clocks after the steps so far; None for 0."""

    def __init__(self, program: XEngineProgram, horizon: float) -> None:
        self.program, self.horizon = program, horizon
        self.device: list[Term] = [None for _ in program.devices]
        self.channel: dict[tuple[int, int], Term] = {}
        self.ready: dict[tuple[int, int], Term] = {}  # by device and tensor, of the stage
        self.sent: dict[tuple[int, int], Term] = {}
        self.copies: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
        for (d, e, t, x, turn), column in program.A.items():
            self.copies.setdefault((t, turn), []).append((d, e, x, column))
        self.executed: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for (d, t, i), column in program.R.items():
            self.executed.setdefault((t, i), []).append((d, column))

    def add_time_after(self, *terms: Term) -> int:
        """Add a time that is at least each of `terms` and return its column."""
        column = self.program.add_column(upper=self.horizon)
        for term in terms:
            if term is not None:
                self.program.add_at_most([(term, 1), (column, -1)], 0)
        return column

    def add_at_least(self, column: int, term: Term, seconds: float, given: Term, *others: Term) -> None:
        """Add column >= term + seconds if `given` is 1 and `others` are 0."""
        most = self.horizon + seconds
        terms: list[Weighted] = [(term, 1), (column, -1), (given, most), *((other, -most) for other in others)]
        self.program.add_at_most(terms, self.horizon)

    def hand_on(self, t: int) -> None:
        """Add the times at the beginning of stage t for tensors that are handed over or may appear in it."""
        program, ready, sent = self.program, self.ready, self.sent
        self.ready, self.sent = {}, {}
        for d in program.devices:
            for x, place in enumerate(program.placement.places[d]):
                handed_on = program.S.get((d, t, x))
                made = program.R.get((d, t, program.made_at[x])) is not None
                arrives = any(
                    e == d and y == x for turn in program.iterate_turns(t) for _, e, y, _ in self.copies.get((t, turn), ())
                )
                if place is None or not (made or arrives or handed_on is not None):
                    continue
                self.ready[d, x] = self.add_time_after()
                leaves = (d, t, x) in program.leaving
                if leaves or (handed_on is not None and (d, x) in sent):
                    self.sent[d, x] = self.add_time_after()
                if handed_on is not None:
                    for now, before in ((self.ready, ready), (self.sent, sent)):
                        column = now.get((d, x))
                        if column is not None and (d, x) in before:
                            self.add_at_least(column, before[d, x], 0.0, handed_on)

    def copy(self, t: int, turn: int) -> None:
        """Add the rows of the copies of a turn, in the order of their columns."""
        for d, e, x, column in self.copies.get((t, turn), ()):
            seconds = self.program.seconds_of[column] / self.program.unit_s
            before = self.channel.get((d, e))
            done = self.add_time_after(before)
            self.program.add_at_most([(before, 1), (column, seconds), (done, -1)], 0)
            for term in (self.ready.get((d, x)), self.device[e]):
                self.add_at_least(done, term, seconds, column)
            for later in (self.ready.get((e, x)), self.sent.get((d, x))):
                if later is not None:
                    self.add_at_least(later, done, 0.0, column)
            self.channel[d, e] = done

    def compute(self, t: int, turn: int) -> None:
        """Add the rows of the op of a turn on each device that may execute it."""
        for d, column in self.executed.get((t, turn), ()):
            seconds, op = self.program.seconds_of[column] / self.program.unit_s, self.program.graph.ops[turn]
            before = self.device[d]
            done = self.add_time_after()
            self.program.add_at_most([(before, 1), (column, seconds), (done, -1)], 0)
            for x in op.inputs:
                if (ready := self.ready.get((d, x))) is not None:
                    self.add_at_least(done, ready, seconds, column)
            for x in op.outputs:
                later = self.ready[d, x]
                assert later is not None
                self.add_at_least(later, done, 0.0, column, self.program.S.get((d, t, x)))
            self.device[d] = done

    def free(self, t: int, turn: int) -> None:
        """Add the waits for copies of the tensors that are freed at a turn."""
        for d in self.program.devices:
            waits = [
                (sent, freed)
                for (e, x), sent in self.sent.items()
                if e == d and (freed := self.program.F.get((d, t, x, turn))) is not None
            ]
            if waits:
                done = self.device[d] = self.add_time_after(self.device[d])
                for sent, freed in waits:
                    self.add_at_least(done, sent, 0.0, freed)

    def end_stage(self, t: int) -> None:
        """Add the waits for copies of the tensors that are not handed over, on devices with a capacity."""
        program = self.program
        if t + 1 == program.ops:
            return
        for (d, x), sent in self.sent.items():
            if program.capacity[d] is None or program.stays(d, x) or (d == 0 and program.graph.tensors[x].static):
                continue
            self.device[d] = self.add_time_after(self.device[d])
            handed_on = program.S.get((d, t + 1, x))
            if handed_on is None:
                program.add_at_most([(sent, 1), (self.device[d], -1)], 0)
            else:
                program.add_at_most([(sent, 1), (self.device[d], -1), (handed_on, -self.horizon)], 0)

    def end(self) -> None:
        """Set the objective to the makespan, with its bound by the paths of the graph."""
        last = self.add_time_after(*self.device, *self.channel.values(), *self.add_path_times())
        self.program.cost[last] = 1.0

    def add_path_times(self) -> list[int]:
        """Return e_t for each op."""
        program, placement = self.program, self.program.placement
        again: list[list[int]] = [[] for _ in range(program.ops)]
        for (_, t, i), column in program.R.items():
            if t > i:
                again[i].append(column)
        earliest: list[int] = []
        for op in program.graph.ops:
            runs = [(program.R[d, op.id, op.id], d) for d in program.devices if (d, op.id, op.id) in program.R]
            times: list[Weighted] = [(column, program.seconds_of[column] / program.unit_s) for column, _ in runs]
            slowest = max(seconds for _, seconds in times)
            end = self.add_time_after()
            program.add_at_most([*times, (end, -1), *((column, -slowest) for column in again[op.id])], 0)
            for p in sorted({program.made_at[x] for x in op.inputs} - {-1}):
                begin = earliest[p]
                program.add_at_most([(begin, 1), (end, -1)], -min(seconds for _, seconds in times))
                program.add_at_most([(begin, 1), *times, (end, -1), *((column, -slowest) for column in again[op.id])], 0)
                for x in (x for x in op.inputs if program.made_at[x] == p):
                    for there, e in runs:
                        for d in program.devices:
                            made = program.R.get((d, p, p))
                            copied_s = _find_copy_s(placement, d, e, x)
                            if made is None or copied_s is None:
                                continue
                            copied = copied_s / program.unit_s
                            repeats = [(column, -slowest - copied) for column in {*again[op.id], *again[p]}]
                            both: list[Weighted] = [(there, copied), (made, copied)]
                            program.add_at_most([(begin, 1), *times, *both, (end, -1), *repeats], copied)
            earliest.append(end)
        return earliest


def _find_copy_s(placement: Placement, d: int, e: int, x: int) -> float | None:
    """Return the least seconds of a transfer of x from d to e by any devices; None if it is the same or there is no way."""
    if d == e:
        return None
    times = [placement.whole.ops[op].time_s for (_, target, y), op in placement.copies.items() if target == e and y == x]
    return min(times, default=None)


def build_lazy_schedule(program: XEngineProgram, values: Floats) -> Schedule:
    """Return the schedule of a solution with each tensor held until the solution frees it: its owner waits for copies.

    If all tensors fit, nothing is freed. Unread copies do not affect the makespan, and are left out.
    """
    graph = program.placement.whole
    base = {t: (d, x) for d, place in enumerate(program.placement.places) for x, t in enumerate(place) if t is not None}
    there = {t.id for t in graph.tensors if t.static}
    steps: list[Step] = []
    executed, copies = list(_iterate_executed(program, values)), set(program.placement.copies.values())
    for stage in range(program.ops):
        for turn in program.iterate_turns(stage):
            for where, when, op in executed:
                if (where, when) == (stage, turn) and not (op in copies and there.issuperset(graph.ops[op].outputs)):
                    steps.append(Compute(op))
                    there.update(graph.ops[op].outputs)
            freed = {t: program.F.get((d, stage, x, turn)) for t in there for d, x in [base[t]]}
            gone = [t for t, column in sorted(freed.items()) if column is not None and values[column] > 0.5]
            steps += map(Free, gone)
            there.difference_update(gone)
        gone = []
        for t in sorted(there) if stage + 1 < program.ops else ():
            d, x = base[t]
            handed_on = program.S.get((d, stage + 1, x))
            stays = graph.tensors[t].static or t in graph.kept or program.capacity[d] is None
            if not stays and (handed_on is None or values[handed_on] < 0.5):
                gone.append(t)
        steps += map(Free, gone)
        there.difference_update(gone)
    return Schedule(_remove_unread(graph, steps, copies))


def _remove_unread(graph: Graph, steps: Sequence[Step], copies: Collection[int]) -> tuple[Step, ...]:
    """Return `steps` without `copies` that are never read, and without their frees."""
    wanted = set(graph.kept)
    found: list[Step | None] = []
    freed: dict[int, int] = {}  # positions in `found` of the frees of copies
    for step in reversed(steps):
        if isinstance(step, Free):
            freed[step.tensor] = len(found)
            wanted.discard(step.tensor)
            found.append(step)
            continue
        op = graph.ops[step.op]
        places = [freed.pop(t) for t in op.outputs if t in freed]
        if step.op in copies and wanted.isdisjoint(op.outputs):
            for place in places:
                found[place] = None
            continue
        wanted.difference_update(op.outputs)
        wanted.update(op.inputs)
        found.append(step)
    return tuple(step for step in reversed(found) if step is not None)


def _iterate_executed(program: XEngineProgram, values: Floats) -> Iterator[tuple[int, int, int]]:
    """Yield stage, turn and op of the executions and copies of a solution; copies come before the op of their turn."""
    places = ((t, turn) for t in range(program.ops) for turn in program.iterate_turns(t))
    copies: dict[tuple[int, int], list[int]] = {place: [] for place in places}
    for (d, e, t, x, turn), column in program.A.items():
        if values[column] > 0.5:
            copies[t, turn].append(program.placement.copies[d, e, x])
    for (t, turn), issued in copies.items():
        for copy in issued:
            yield t, turn, copy
        for d in program.devices:
            column_of = program.R.get((d, t, turn))
            run = program.placement.runs[d][turn] if 0 <= turn < program.ops else None
            if column_of is not None and run is not None and values[column_of] > 0.5:
                yield t, turn, run


class XEngineRule(StrEnum):
    """The objective, by the name in the registry."""

    SERIAL = "xengine"
    MAKESPAN = "xengine-overlapped"


def measure_program(graph: Graph, budget_bytes: int, *, rule: str = XEngineRule.SERIAL) -> ProgramSize | None:
    """Return the size of the program of a graph; None on one device. A search for the makespan has a share of its time for it."""
    placement = get_placement(graph)
    if len(placement.pools) == 1:
        return None
    size = XEngineProgram(placement, budget_bytes).size
    return size if rule == XEngineRule.SERIAL else replace(size, least_s=size.least_s / _SERIAL_SHARE)


@dataclass(frozen=True, slots=True)
class _Found:
    """A schedule, its serial sum with a bound, and a bound on its makespan, if known."""

    schedule: Schedule
    serial_s: float
    serial_bound_s: float
    bound_s: float | None = None


def solve(request: Request, *, rule: str = XEngineRule.SERIAL) -> Result:
    """Return the best schedule of a graph with placement; LIMIT for other graphs, and if the program is too large.

    The time of the result is the simulated makespan. The serial objective implies no bound on it: then the result has none, and
    the settings have the sum (``serial_s``) with its bound. An infeasible program gives LIMIT, since other schedules may fit.

    Args:
        request: its parameters are ``XEngineParams``.
        rule: the objective; see ``XEngineRule``. The search for the makespan starts at the best serial schedule with copies that
            stay; the bound then refers to schedules that execute each op at most once per stage and device, in program order
            (just once, without ``again``).

    Raises:
        GraphError: the graph has options other than placement.
    """
    finish = partial(_build_result, request, str(rule))
    overlapped = XEngineRule(rule) is XEngineRule.MAKESPAN
    params = request.get_params(XEngineParams())
    params = replace(params, stay=params.stay or overlapped)
    placement = get_placement(request.graph)
    if len(placement.pools) == 1:
        why = "the graph has one device: give it the option placement, or use the solver checkmate"
        return finish(Verdict(Status.LIMIT, message=why, reason=Reason.INAPPLICABLE))
    program = XEngineProgram(placement, request.budget_bytes, ScheduleClass(stay=params.stay, again=params.again))
    found = _solve_program(request, program, overlapped=overlapped)
    if isinstance(found, Verdict):
        return finish(found)
    method = {
        "objective": "makespan" if overlapped else "serial sum",
        "copies": "stay, and are made ahead" if overlapped else "stay" if params.stay else "for a stage",
        "executed": "again where it helps" if params.again else "once",
    }
    settings = replace(request.settings, method=method, serial_s=found.serial_s, serial_bound_s=found.serial_bound_s)
    if found.bound_s is not None:
        return finish(judge(request, found.schedule, found.bound_s), settings)
    return finish(Verdict(Status.FEASIBLE, found.schedule), settings)


def _solve_program(request: Request, program: XEngineProgram, *, overlapped: bool) -> _Found | Verdict:
    """Return the schedule of least serial sum, or of least makespan if `overlapped`; or the verdict that there is none."""
    clock = request.clock.start_part(_SERIAL_SHARE * measure_rest(request.clock)) if overlapped else request.clock
    if (refusal := program.size.find_refusal(clock.limit)) is not None:
        return Verdict(Status.LIMIT, None, None, *refusal)
    if not program.build():
        return _report_too_large(program.placement)
    for column, seconds in program.seconds_of.items():
        program.cost[column] = seconds / program.unit_s
    request.tell("solving XEngine's program", None, None)
    answer = _solve_milp(program.build_milp(), request, clock, program.unit_s, request.tolerance.first)
    if answer.values is None:
        return _report_nothing(request, answer)
    executed = schedule_of(program.placement.whole, [op for _, _, op in _iterate_executed(program, answer.values)])
    serial_s = sum(request.graph.ops[op].time_s for op in executed.computed)
    found = _Found(executed, serial_s, min(serial_s, answer.bound * program.unit_s))
    if not overlapped:
        return found
    return _solve_overlapped(request, program, answer.values, found) or _report_too_large(program.placement)


def _build_result(request: Request, rule: str, verdict: Verdict, settings: SolveSettings | None = None) -> Result:
    settings = settings or request.settings
    return build_result(request, rule, verdict, settings=settings, versions={"highs": highs.read_version()})


def _solve_overlapped(request: Request, serial: XEngineProgram, values: Floats, found: _Found) -> _Found | None:
    """Return the best makespan, from the solution `values` of the serial program; None if the program with clocks is too large.

    If each op is executed once, that class is searched first: its program is far smaller.
    """
    wanted = serial.schedules.again
    once = not any(t > i and values[column] > _ONE_HALF for (_, t, i), column in serial.R.items())
    known = serial
    for again in (False, True) if once and wanted else (wanted,):
        horizon_s = simulate(request.graph, found.schedule).time_s
        program = XEngineProgram(
            serial.placement, request.budget_bytes, ScheduleClass(stay=True, ahead=True, again=again), whole_frees=True
        )
        if not program.build():
            return None
        add_clocks(program, horizon_s * (1 + _ROUNDING))
        if len(program.cost) > MOST_COLUMNS:
            return None
        request.tell("solving XEngine's program with clocks", horizon_s, None)
        clock = request.clock.start_part(_ONCE_SHARE * measure_rest(request.clock)) if again is not wanted else request.clock
        milp = program.build_milp()
        started = _solve_milp(_fix_to_solution(known, values, program, milp), request, clock, program.unit_s, 1.0)
        answer = _solve_milp(milp, request, clock, program.unit_s, request.tolerance.first, started.values)
        if answer.values is not None:
            known, values = program, answer.values
            schedule = build_lazy_schedule(program, values)
            if simulate(request.graph, schedule).time_s < horizon_s:
                found = replace(found, schedule=schedule)
        if again is wanted:
            found = replace(found, bound_s=max(0.0, answer.bound * program.unit_s))
    return found


def _fix_to_solution(known: XEngineProgram, values: Floats, program: XEngineProgram, milp: Milp) -> Milp:
    """Return `milp` of `program` with executions, copies and hand-overs fixed to a solution of a smaller program."""
    chosen = dict.fromkeys((*program.R.values(), *program.A.values(), *program.S.values()), 0.0)
    for theirs, ours in ((known.R, program.R), (known.S, program.S)):
        chosen |= {ours[key]: values[column] for key, column in theirs.items() if key in ours}
    for (d, e, t, x, turn), column in known.A.items():
        key = (d, e, t, x, turn)
        # A stage with one op only begins just before it.
        target = program.A.get(key, program.A.get((d, e, t, x, BEGIN)))
        if target is not None and values[column] > _ONE_HALF:
            chosen[target] = 1.0
    lower, upper = milp.lower.copy(), milp.upper.copy()
    columns = list(chosen)
    lower[columns] = upper[columns] = np.round(list(chosen.values()))
    return replace(milp, lower=lower, upper=upper)


def _solve_milp(
    milp: Milp, request: Request, clock: Clock, unit_s: float, tolerance: float, start: Floats | None = None
) -> Answer:
    tell = partial(_tell, request, unit_s)
    callbacks = SolveCallbacks(should_stop=request.is_interrupted, on_bound=tell, interrupted=request.is_interrupted)
    gap = tolerance * request.graph.time_s / unit_s
    return highs.solve_program(milp, clock=clock, absolute_gap=gap, start=start, callbacks=callbacks)


def _tell(request: Request, unit_s: float, bound: float) -> None:
    request.tell("solving XEngine's program", None, bound * unit_s)


def _report_too_large(placement: Placement) -> Verdict:
    ops, devices = len(placement.program.ops), len(placement.pools)
    why = (
        f"XEngine's program for {ops:,} ops on {devices} devices has more than {MOST_COLUMNS:,} variables, which this solver "
        "supports: use the solver windows"
    )
    return Verdict(Status.LIMIT, message=why, reason=Reason.SIZE)


def _report_nothing(request: Request, answer: Answer) -> Verdict:
    budget = format_bytes(request.budget_bytes)
    if answer.outcome is Outcome.INFEASIBLE:
        why = f"no schedule of XEngine's class fits {budget} and the other memories ({answer.detail}): raise the budget"
        return Verdict(Status.LIMIT, message=why, reason=Reason.MEMORY)
    limit = request.clock.format_amount(request.clock.limit)
    why = f"XEngine's program found nothing within {limit} ({answer.detail}): raise the time limit or the budget"
    return Verdict(Status.LIMIT, message=why, reason=Reason.TIME)
