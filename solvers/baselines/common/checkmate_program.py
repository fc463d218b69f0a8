"""Checkmate's 0-1 program (Jain et al., MLSys 2020), which POET extends by paging and XEngine by devices.

Stage t ends with the first execution of op t (frontier-advancing). On device d, of which Checkmate and POET have one:

    R[d,t,i]      op i is executed in stage t
    S[d,t,x]      tensor x is in memory when stage t begins
    A[d,e,t,x,k]  x is copied to device e just before the turn of op k in stage t
    F[d,t,x,k]    x is freed in stage t after the turn of k
    U[d,t,k]      memory at the turn of k

Published for one output per op and one device. Here, to agree with ``planner.graphs.simulate``, tensors have lifetimes of their
own:

- S and F are per tensor, and a recomputed op produces all its outputs. One that is in memory already counts twice during the
execution and once afterwards: D[d,t,x] = R[d,t,p(x)] S[d,t,x] subtracts the copy.
- A kept tensor stays in memory: F = 0. With one device S is 1 from its first computation on, and D = R.
- The workspace of an op counts during its turn only.
- An op that must run once, or has an input that was written in place since, has R = 0.

Columns and rows are written for HiGHS; ``common.pulp_solvers`` writes the same with PuLP, for other solvers and for files.

One builder for Checkmate, POET, XEngine and rounding: before, each wrote its own rows, and PuLP took most of the time to build
them (0.62 s for 81 ops, now 0.22 s). Known weakness: it has about n^2 binaries for n ops, and is refused, with its size, where a
time limit is too short for it to have a solution.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from planner.graphs.ir import Graph
from planner.solvers.highs.builder import ONE, Term, TermProgram, Weighted
from planner.solvers.highs.program import Floats

BEGIN = -1  # the turn before all ops of a stage
MEMORY_RANGE = 1e4  # the capacity of a device in the program's unit of its memory
TIME_RANGE = 1e3  # the step without recomputation in its unit of time


class StageProgram(TermProgram):
    """The columns and rows that the programs share, in units of memory and time that suit solvers.

    Attributes:
        capacity: by device the bytes for produced tensors; None if all of them fit at any multiplicity.
        R, S, F: columns by the letters of the program, where they may be 1.
        arriving, leaving: by device, stage and tensor the copies to and from there: (turn, column). Those at turn `ops`, the end
            of a stage, are in its memory if the stage is in `ends`.
        names: of columns.
        unit_s: seconds, the unit of time.
    """

    def __init__(
        self,
        graph: Graph,
        capacity: Sequence[int | None],
        *,
        split_frees: bool = True,
        whole: bool = True,
        whole_frees: bool = False,
        copies_stay: bool = True,
    ) -> None:
        """Begin a program without columns.

        Args:
            split_frees: False for frees as published; see ``add_free``.
            whole: False for the linear relaxation.
            whole_frees: True if F is binary where frees are split, too.
            copies_stay: True if copies may be handed over to the next stage.
        """
        super().__init__()
        self.graph, self.capacity, self.split_frees = graph, capacity, split_frees
        self.whole, self.whole_frees, self.copies_stay = whole, whole_frees, copies_stay
        self.ops, self.devices = len(graph.ops), range(len(capacity))
        self.unit_s = (graph.time_s or 1.0) / TIME_RANGE
        self.made_at = [t.producers[0] if t.producers else -1 for t in graph.tensors]
        self.last_stage = find_last_stages(graph)
        self.R: dict[tuple[int, int, int], int] = {}
        self.S: dict[tuple[int, int, int], int] = {}
        self.F: dict[tuple[int, int, int, int], int] = {}
        self.arriving: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        self.leaving: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        self.ends: frozenset[int] = frozenset()
        self.names: dict[int, str] = {}

    def add_variable(self, letter: str, *key: int, cost: float = 0.0, upper: float = 1.0, integer: bool = False) -> int:
        """Add a variable that is named by a letter and numbers, without that of the only device."""
        column = self.add_column(cost, integer=integer and self.whole, upper=upper)
        self.names[column] = "_".join((letter, *map(str, key[len(self.devices) == 1 :])))
        return column

    def add_decisions(self, t: int) -> None:
        """Add R[t,i] and S[t,x] of the only device, and the objective: the sum of c_i R[t,i] without first executions."""
        for i in range(t):
            if t <= self.last_stage[i]:
                self.R[0, t, i] = self.add_variable("R", 0, t, i, cost=self.graph.ops[i].time_s / self.unit_s, integer=True)
        for x in self.iterate_passing(t):
            self.S[0, t, x] = self.add_variable("S", 0, t, x, integer=True)

    def count_decisions(self) -> int:
        """Return the number of variables that ``add_decisions`` adds for all stages."""
        passing = sum(self.ops - 1 - self.made_at[x] for x in self.iterate_passing(self.ops))
        return passing + sum(last - i for i, last in enumerate(self.last_stage))

    def add_inputs(self, t: int) -> None:
        """Add R[d,t,j] <= S[d,t,x] + R[d,t,p(x)] + sum of A[e,d,t,x,k] for k <= j, for each x in in(j)."""
        for d in self.devices:
            for j in range(t + 1):
                executed = self.r(d, t, j)
                for x in self.graph.ops[j].inputs if executed is not None else ():
                    if self.s(d, t, x) != ONE:
                        self.add_at_most([(executed, 1), *self.list_sources(d, t, x, j)], 0)

    def add_handover(self, t: int) -> None:
        """Add S[d,t+1,x] <= S[d,t,x] + R[d,t,p(x)], + sum of A[e,d,t,x,k] if copies stay; >= each where nothing is freed."""
        for d in self.devices:
            for x in range(len(self.graph.tensors)):
                after, stays = self.S.get((d, t + 1, x)), self.stays(d, x)
                if after is None:
                    continue
                copied = self.copies_stay or stays
                before = self.list_sources(d, t, x, self.ops) if copied else self.list_sources(d, t, x, self.ops)[:2]
                self.add_at_most([(after, 1), *before], 0)
                for column, _ in before if stays or self.capacity[d] is None else ():
                    if column is not None:
                        self.add_at_most([(column, 1), (after, -1)], 0)

    def list_sources(self, d: int, t: int, x: int, turn: int) -> list[Weighted]:
        """Return -1 for each term by which x may be on d at a turn of stage t: R if before it, S, and copies up to it."""
        made = self.r(d, t, self.made_at[x]) if self.made_at[x] < turn else None
        copies = [(column, -1.0) for k, column in self.arriving.get((d, t, x), ()) if k <= turn]
        return [(made, -1.0), (self.s(d, t, x), -1.0), *copies]

    def add_memory(self, d: int, t: int) -> None:
        """Add U[d,t,k] along the turns of stage t, which begins with sum of b_x S[d,t,x], and U[d,t,k] + w_k R[d,t,k] <= M_d.

        U[d,t,k] = U[d,t,k-1] - sum of b_x F[d,t,x,k-1] - sum over x in out(k-1) of b_x D[d,t,x] + sum of b_x A[e,d,t,x,k]
        + R[d,t,k] b(out(k)).
        """
        if (capacity_bytes := self.capacity[d]) is None:
            return
        unit = max(capacity_bytes, 1) / MEMORY_RANGE
        capacity = capacity_bytes / unit
        size = [0.0 if x.static and d == 0 else x.size_bytes / unit for x in self.graph.tensors]
        arrivals, departures = _sort_by_turn(self.arriving, d, t), _sort_by_turn(self.leaving, d, t)
        change: list[Weighted] = [(self.s(d, t, x), weight) for x, weight in enumerate(size) if weight]
        previous: Term = None
        for k in self.iterate_turns(t):
            arriving, executed = arrivals.get(k, ()), self.r(d, t, k)
            change += [(column, size[x]) for x, column in arriving]
            if executed is not None:
                change.append((executed, sum(size[x] for x in self.graph.ops[k].outputs)))
            if executed is not None or arriving:
                used = self.add_variable("U", d, t, k, upper=max(capacity, 0.0))
                self.add_terms([(used, 1), (previous, -1), *((term, -weight) for term, weight in change)], 0, 0)
                if executed is not None and (workspace_bytes := self.graph.ops[k].workspace_bytes):
                    self.add_at_most([(used, 1), (executed, workspace_bytes / unit)], capacity)
                previous, change = used, []
            change += [(freed, -size[x]) for x, freed in self.iterate_frees(d, t, k, departures.get(k, ()))]
            change += [(double, -size[x]) for x, double in self.iterate_doubles(d, t, k)]

    def iterate_turns(self, t: int) -> Iterator[int]:
        """Yield the turns of stage t: before its ops, each of them, and its end where that counts."""
        yield from range(BEGIN, t + 1)
        if t in self.ends:
            yield self.ops

    def iterate_frees(self, d: int, t: int, k: int, leaving: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Yield x and F[d,t,x,k] for each x that is used at k: in(k) and out(k) if R[d,t,k], and copies that are `leaving`."""
        uses: dict[int, list[int]] = {}
        if (executed := self.r(d, t, k)) is not None:
            op = self.graph.ops[k]
            uses = {x: [executed] for x in (*op.inputs, *op.outputs)}
        for x, column in leaving:
            uses.setdefault(x, []).append(column)
        for x, events in uses.items():
            hazards = [self.s(d, t + 1, x), *(self.r(d, t, j) for j in self.graph.consumers[x] if k < j <= t)]
            hazards += [column for turn, column in self.leaving.get((d, t, x), ()) if turn > k]
            if self.stays(d, x) or (d == 0 and self.graph.tensors[x].static) or ONE in hazards:
                continue
            self.F[d, t, x, k] = self.add_free((d, t, x, k), events, [hazard for hazard in hazards if hazard is not None])
            yield x, self.F[d, t, x, k]

    def add_free(self, key: tuple[int, ...], events: Sequence[int], hazards: Sequence[int]) -> int:
        """Return F, which may be 1 if one of `events` is 1 and every one of `hazards` is 0.

        F[d,t,x,k] is R[d,t,k] (1 - S[d,t+1,x]) times 1 - R[d,t,j] of all later readers j. As published it is binary, with the
        count of factors that are 0: 1 - F <= h and h <= m (1 - F) for h = (1 - R) + sum of the m - 1 hazards. Split, which is
        tighter and was found later, it is below each factor: F <= sum of the events, and F <= 1 - hazard for each.
        """
        if not hazards and len(events) == 1:
            return events[0]
        if self.split_frees:
            freed = self.add_variable("F", *key, integer=self.whole_frees)
            if ONE not in events:
                self.add_at_most([(freed, 1), *((event, -1) for event in events)], 0)
            for hazard in hazards:
                self.add_at_most([(freed, 1), (hazard, 1)], 1)
            return freed
        (executed,) = events
        freed, count = self.add_variable("F", *key, integer=True), [(executed, -1.0), *((hazard, 1.0) for hazard in hazards)]
        self.add_at_most([(freed, -1), *((term, -weight) for term, weight in count)], 0)
        self.add_at_most([(freed, len(count)), *count], len(count) - 1)
        return freed

    def iterate_doubles(self, d: int, t: int, k: int) -> Iterator[tuple[int, int]]:
        """Yield x and D[d,t,x] <= R[d,t,k], S[d,t,x] for x in out(k), which may be in memory when k is recomputed."""
        if (executed := self.r(d, t, k)) is None:
            return
        for x in self.graph.ops[k].outputs:
            there = self.s(d, t, x)
            if there == ONE:
                yield x, executed
            elif there is not None and (len(self.graph.ops[k].outputs) > 1 or self.stays(d, x)):
                double = self.add_variable("D", d, t, x)
                self.add_at_most([(double, 1), (executed, -1)], 0)
                self.add_at_most([(double, 1), (there, -1)], 0)
                yield x, double

    def convert_to_seconds(self, objective: float) -> float | None:
        """Return the time of the step with a value of the objective, which is without first executions; None if infinite."""
        return self.graph.time_s + objective * self.unit_s if math.isfinite(objective) else None

    def r(self, d: int, t: int, i: int) -> Term:
        """Return R[d,t,i]; with one device 1 for the first execution."""
        return ONE if i == t and len(self.devices) == 1 else self.R.get((d, t, i))

    def s(self, d: int, t: int, x: int) -> Term:
        """Return S[d,t,x]: 1 for static tensors on the main device, and for kept ones that only it can have produced."""
        is_kept = len(self.devices) == 1 and x in self.graph.kept and self.made_at[x] < t
        return ONE if d == 0 and (self.graph.tensors[x].static or is_kept) else self.S.get((d, t, x))

    def stays(self, d: int, x: int) -> bool:
        """Return True if x is never freed on d, once it is there."""
        return d == 0 and x in self.graph.kept

    def iterate_passing(self, t: int) -> Iterator[int]:
        """Yield the tensors produced before stage t that have readers and are not kept."""
        for k in range(t):
            yield from (x for x in self.graph.ops[k].outputs if self.graph.consumers[x] and x not in self.graph.kept)

    def add_all(self, families: Sequence[Callable[[int], object]], is_over: Callable[[], bool] = lambda: False) -> bool:
        """Call each of `families` for every stage; return False if `is_over` returned True before the end."""
        for t in range(self.ops):
            for add in families:
                add(t)
            if is_over():
                return False
        return True


def _sort_by_turn(
    copies: Mapping[tuple[int, int, int], Sequence[tuple[int, int]]], d: int, t: int
) -> dict[int, list[tuple[int, int]]]:
    """Return by turn the copies of device d in stage t: (tensor, column)."""
    found: dict[int, list[tuple[int, int]]] = {}
    for device, stage, x in copies:
        if (device, stage) == (d, t):
            for turn, column in copies[device, stage, x]:
                found.setdefault(turn, []).append((x, column))
    return found


def get_value(term: Term, values: Floats) -> float:
    """Return the value of a term in a solution."""
    return 0.0 if term is None else float(values[term])


def find_last_stages(graph: Graph) -> list[int]:
    """Return for each op the last stage in which it may be executed: its own, or up to the next op that writes its inputs."""
    writers = [(t, op.id) for op in graph.ops for t in op.mutates]
    last = len(graph.ops) - 1
    return [
        min((w for t, w in writers if w > op.id and t in (*op.inputs, *op.mutates)), default=last) if op.recomputable else op.id
        for op in graph.ops
    ]
