"""Makespan in place of the sum: the clocks of the judge (``graphs.clocks``) as rows of XEngine's program.

Devices work side by side, and so do the channels between them. In the program's order of issue, T_d is the clock of device d,
K_de that of the channel from d to e, W[d,t,x] when x is ready on d in stage t, Z[d,t,x] when the last copy of x away from d has
ended, H a time in which some schedule is known to end. ">= z if b" is written ">= z - H (1 - b)".

    an op on d            T_d >= T_d + c R;  T_d >= W[d,t,x] + c if R, x read;  W[d,t,x] >= T_d if R and not S[d,t,x], x made
    a copy of x, d to e   K_de >= K_de + c A;  K_de >= W[d,t,x] + c and >= T_e + c if A;  W[e,t,x] and Z[d,t,x] >= K_de if A
    what is handed on     W[d,t+1,x] >= W[d,t,x] and Z[d,t+1,x] >= Z[d,t,x] if S[d,t+1,x]
    what leaves d         T_d >= Z[d,t,x] if F[d,t,x,k];  as the stage ends, T_d >= Z[d,t,x] if not S[d,t+1,x]

The makespan is at least each clock. So that its bound is not just that of the busiest device, the earliest end e_t of op t:

    e_t >= e_p + sum of c R[d,t,t] + copy (R[e,t,t] + R[d,p,p] - 1) - (their further executions) (what this may have added)

for an op p that makes what t reads: where p and t are executed once, on d and e, there is a copy between them.
"""

from graphs.options.placement import Placement
from solvers.highs.columns import Term, Weighted
from solvers.xengine.program import XEngineProgram


def add_clocks(program: XEngineProgram, horizon_s: float) -> None:
    """Give `program`, built with ``whole_frees``, the makespan as its objective; no schedule over `horizon_s` is looked for."""
    clocks = _Clocks(program, horizon_s / program.unit_s)
    for t in range(program.ops):
        clocks.hand_on(t)
        for turn in program.turns(t):
            clocks.copy(t, turn)
            clocks.compute(t, turn)
            clocks.free(t, turn)
        clocks.end_stage(t)
    clocks.end()


class _Clocks:
    """The columns of the clocks as they are after the steps so far; None for 0."""

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

    def after(self, *terms: Term) -> int:
        """A time that is at least each of `terms`."""
        column = self.program.column(upper=self.horizon)
        for term in terms:
            if term is not None:
                self.program.at_most([(term, 1), (column, -1)], 0)
        return column

    def at_least(self, column: int, term: Term, seconds: float, given: Term, *others: Term) -> None:
        """Column >= term + seconds if `given` is 1 and `others` are 0."""
        most = self.horizon + seconds
        terms: list[Weighted] = [(term, 1), (column, -1), (given, most), *((other, -most) for other in others)]
        self.program.at_most(terms, self.horizon)

    def hand_on(self, t: int) -> None:
        """Times of stage t - 1 for what is there as stage t begins, and columns for all that may be there in it."""
        program, ready, sent = self.program, self.ready, self.sent
        self.ready, self.sent = {}, {}
        for d in program.devices:
            for x, place in enumerate(program.placement.places[d]):
                handed_on = program.S.get((d, t, x))
                made = program.R.get((d, t, program.made_at[x])) is not None
                arrives = any(e == d and y == x for turn in program.turns(t) for _, e, y, _ in self.copies.get((t, turn), ()))
                if place is None or not (made or arrives or handed_on is not None):
                    continue
                self.ready[d, x] = self.after()
                leaves = (d, t, x) in program.leaving
                if leaves or (handed_on is not None and (d, x) in sent):
                    self.sent[d, x] = self.after()
                if handed_on is not None:
                    for now, before in ((self.ready, ready), (self.sent, sent)):
                        column = now.get((d, x))
                        if column is not None and (d, x) in before:
                            self.at_least(column, before[d, x], 0.0, handed_on)

    def copy(self, t: int, turn: int) -> None:
        """The copies of a turn, in the order of their columns."""
        for d, e, x, column in self.copies.get((t, turn), ()):
            seconds = self.program.seconds[column] / self.program.unit_s
            before = self.channel.get((d, e))
            done = self.after(before)
            self.program.at_most([(before, 1), (column, seconds), (done, -1)], 0)
            for term in (self.ready.get((d, x)), self.device[e]):
                self.at_least(done, term, seconds, column)
            for later in (self.ready.get((e, x)), self.sent.get((d, x))):
                if later is not None:
                    self.at_least(later, done, 0.0, column)
            self.channel[d, e] = done

    def compute(self, t: int, turn: int) -> None:
        """An op on each device where it is executed."""
        for d, column in self.executed.get((t, turn), ()):
            seconds, op = self.program.seconds[column] / self.program.unit_s, self.program.graph.ops[turn]
            before = self.device[d]
            done = self.after()
            self.program.at_most([(before, 1), (column, seconds), (done, -1)], 0)
            for x in op.inputs:
                if (ready := self.ready.get((d, x))) is not None:
                    self.at_least(done, ready, seconds, column)
            for x in op.outputs:
                later = self.ready[d, x]
                assert later is not None
                self.at_least(later, done, 0.0, column, self.program.S.get((d, t, x)))
            self.device[d] = done

    def free(self, t: int, turn: int) -> None:
        """Who frees what has been copied away waits for the copies."""
        for d in self.program.devices:
            waits = [
                (sent, freed)
                for (e, x), sent in self.sent.items()
                if e == d and (freed := self.program.F.get((d, t, x, turn))) is not None
            ]
            if waits:
                done = self.device[d] = self.after(self.device[d])
                for sent, freed in waits:
                    self.at_least(done, sent, 0.0, freed)

    def end_stage(self, t: int) -> None:
        """What is not handed on goes, where memory counts."""
        program = self.program
        if t + 1 == program.ops:
            return
        for (d, x), sent in self.sent.items():
            if program.capacity[d] is None or program.stays(d, x) or (d == 0 and program.graph.tensors[x].static):
                continue
            self.device[d] = self.after(self.device[d])
            handed_on = program.S.get((d, t + 1, x))
            if handed_on is None:
                program.at_most([(sent, 1), (self.device[d], -1)], 0)
            else:
                program.at_most([(sent, 1), (self.device[d], -1), (handed_on, -self.horizon)], 0)

    def end(self) -> None:
        """The makespan, and its bound by the paths of the graph."""
        last = self.after(*self.device, *self.channel.values(), *self.paths())
        self.program.cost[last] = 1.0

    def paths(self) -> list[int]:
        """e_t for each op."""
        program, placement = self.program, self.program.placement
        again: list[list[int]] = [[] for _ in range(program.ops)]
        for (_, t, i), column in program.R.items():
            if t > i:
                again[i].append(column)
        earliest: list[int] = []
        for op in program.graph.ops:
            runs = [(program.R[d, op.id, op.id], d) for d in program.devices if (d, op.id, op.id) in program.R]
            times: list[Weighted] = [(column, program.seconds[column] / program.unit_s) for column, _ in runs]
            slowest = max(seconds for _, seconds in times)
            end = self.after()
            program.at_most([*times, (end, -1), *((column, -slowest) for column in again[op.id])], 0)
            for p in sorted({program.made_at[x] for x in op.inputs} - {-1}):
                begin = earliest[p]
                program.at_most([(begin, 1), (end, -1)], -min(seconds for _, seconds in times))
                program.at_most([(begin, 1), *times, (end, -1), *((column, -slowest) for column in again[op.id])], 0)
                for x in (x for x in op.inputs if program.made_at[x] == p):
                    for there, e in runs:
                        for d in program.devices:
                            made = program.R.get((d, p, p))
                            copied_s = _copied_s(placement, d, e, x)
                            if made is None or copied_s is None:
                                continue
                            copied = copied_s / program.unit_s
                            repeats = [(column, -slowest - copied) for column in {*again[op.id], *again[p]}]
                            both: list[Weighted] = [(there, copied), (made, copied)]
                            program.at_most([(begin, 1), *_sum([*times, *both]), (end, -1), *repeats], copied)
            earliest.append(end)
        return earliest


def _copied_s(placement: Placement, d: int, e: int, x: int) -> float | None:
    """Seconds that x takes at least from d to e, over whatever devices; None where it is the same or there is no way."""
    if d == e:
        return None
    times = [placement.whole.ops[op].time_s for (_, target, y), op in placement.copies.items() if target == e and y == x]
    return min(times, default=None)


def _sum(terms: list[Weighted]) -> list[Weighted]:
    weights: dict[Term, float] = {}
    for term, weight in terms:
        weights[term] = weights.get(term, 0.0) + weight
    return list(weights.items())
