"""POET's 0-1 program (Patil et al., ICML 2022): Checkmate's, with a second memory.

Stage t ends with the first execution of op t. R[t,i]: op i is executed in stage t; S[t,x]: tensor x is on the device when stage
t begins; H[t,x]: on the host; In[t,x], Out[t,x]: copied there and back in stage t; U[t,k]: memory while op k has its turn.

    R[t,j]   <= R[t,p(x)] + S[t,x]             x read by op j
    S[t+1,x] <= S[t,x] + R[t,p(x)] + In[t,x]
    H[t+1,x] <= H[t,x] + Out[t,x]      In[t,x] <= H[t,x]      Out[t,x] <= S[t,x]
    sum of b_x H[t,x] <= capacity of the host
    minimise sum of c_i R[t,i] + power * (sum of out_x Out[t,x] + sum of in_x In[t,x])

A copy takes no time, and not more than one stage: what it costs is energy. Memory as in Checkmate's program (Jain et al., MLSys
2020), with what several outputs of an op, kept tensors and workspaces need: F[t,x,k], x is freed in stage t after op k, is
below each of its factors; D[t,x] = R[t,p(x)] S[t,x] takes off what is made a second time.
"""

from collections.abc import Iterator

from solvers.highs.columns import ONE, Columns, Term
from solvers.highs.program import Milp
from solvers.policies.offload.moves import Offer
from solvers.policies.replay import repeatable

MOST_COLUMNS = 60_000
_MEMORY_RANGE = 1e4  # the budget in the program's unit of memory
_TIME_RANGE = 1e3  # the step without recomputation in its unit of time


class PoetProgram(Columns):
    """The program of a graph, a budget and what copying takes of the power of computing.

    Attributes:
        R, S, host, fetched, sent: columns by (stage, op) or (stage, tensor), where they may be 1.
    """

    def __init__(self, offer: Offer, budget_bytes: int, power: float) -> None:
        super().__init__()
        self.offer, self.graph = offer, offer.program
        self.stages = len(self.graph.ops)
        capacity_bytes = budget_bytes - self.graph.static_bytes
        self.memory_unit = max(capacity_bytes, 1) / _MEMORY_RANGE
        self.capacity = capacity_bytes / self.memory_unit
        self.time_unit = (self.graph.time_s or 1.0) / _TIME_RANGE
        self.power = power
        again = repeatable(self.graph)
        self.may_repeat = [again[op.id] for op in self.graph.ops]
        self.R: dict[tuple[int, int], int] = {}
        self.S: dict[tuple[int, int], int] = {}
        self.host: dict[tuple[int, int], int] = {}
        self.fetched: dict[tuple[int, int], int] = {}
        self.sent: dict[tuple[int, int], int] = {}

    def build(self) -> Milp | None:
        """All of it; None if that would be too large."""
        for t in range(self.stages):
            self.add_columns(t)
            if len(self.cost) > MOST_COLUMNS:
                return None
        for t in range(self.stages):
            self.add_inputs(t)
            self.add_hand_over(t)
            self.add_memory(t)
            self.add_host_memory(t)
            if len(self.cost) > MOST_COLUMNS:
                return None
        return self.milp()

    def add_columns(self, t: int) -> None:
        """Those of stage t: S where somebody reads on, copies where they can serve a later stage."""
        for i in range(t):
            if self.may_repeat[i]:
                self.R[t, i] = self.column(cost=self.graph.ops[i].time_s / self.time_unit, integer=True)
        for x in self.passing_before(t):
            self.S[t, x] = self.column(integer=True)
            if (trip := self.offer.trips.get(x)) is None:
                continue
            self.sent[t, x] = self.column(cost=self.power * trip.out_s / self.time_unit, integer=True)
            if t > self.offer.made_at(x) + 1:
                self.host[t, x] = self.column(integer=True)
                self.fetched[t, x] = self.column(cost=self.power * trip.in_s / self.time_unit, integer=True)

    def add_inputs(self, t: int) -> None:
        """R[t,j] <= R[t,p(x)] + S[t,x] for each op j of stage t and each x that it reads."""
        for j in range(t + 1):
            for x in self.graph.ops[j].inputs if self.r(t, j) is not None else ():
                if not self.graph.tensors[x].static:
                    self.at_most([(self.r(t, j), 1), (self.r(t, self.offer.made_at(x)), -1), (self.s(t, x), -1)], 0)

    def add_hand_over(self, t: int) -> None:
        """S[t+1,x] <= S + R + In; H[t+1,x] <= H + Out; In <= H; Out <= S."""
        for x in self.passing_before(t):
            made = self.offer.made_at(x)
            if t + 1 < self.stages:
                fetched = self.fetched.get((t, x))
                self.at_most([(self.s(t + 1, x), 1), (self.s(t, x), -1), (self.r(t, made), -1), (fetched, -1)], 0)
                self.at_most([(self.host.get((t + 1, x)), 1), (self.host.get((t, x)), -1), (self.sent.get((t, x)), -1)], 0)
            if (t, x) in self.fetched:
                self.at_most([(self.fetched[t, x], 1), (self.host[t, x], -1)], 0)
            if (t, x) in self.sent:
                self.at_most([(self.sent[t, x], 1), (self.s(t, x), -1)], 0)

    def add_host_memory(self, t: int) -> None:
        """Sum of b_x H[t,x] <= capacity of the host."""
        if (limit := self.offer.host_bytes) is not None:
            there = [(column, self.size(x)) for (stage, x), column in self.host.items() if stage == t]
            self.at_most(there, limit / self.memory_unit)

    def add_memory(self, t: int) -> None:
        """U[t,k+1] = U[t,k] - what is freed after k + what op k + 1 makes; U[t,k] + its workspace <= M."""
        change = [(self.s(t, x), self.size(x)) for k in range(t) for x in self.graph.ops[k].outputs]
        previous: Term = None
        for k in range(t + 1):
            op, executed = self.graph.ops[k], self.r(t, k)
            if executed is None:
                continue
            change.append((executed, sum(map(self.size, op.outputs))))
            used = self.column(upper=max(self.capacity, 0.0))
            self.row([(used, 1), (previous, -1), *((term, -size) for term, size in change)], 0, 0)
            if op.workspace_bytes:
                self.at_most([(used, 1), (executed, op.workspace_bytes / self.memory_unit)], self.capacity)
            previous = used
            change = [(freed, -self.size(x)) for x, freed in self.frees(t, k)]
            change += [(double, -self.size(x)) for x, double in self.doubles(t, k)]

    def frees(self, t: int, k: int) -> Iterator[tuple[int, int]]:
        """F[t,x,k] <= R[t,k], 1 - S[t+1,x], and 1 - R[t,j] for the readers j of x after k."""
        for x in (*self.graph.ops[k].inputs, *self.graph.ops[k].outputs):
            hazards = [self.s(t + 1, x), *(self.r(t, j) for j in self.graph.consumers[x] if k < j <= t)]
            if self.graph.tensors[x].static or x in self.graph.kept or ONE in hazards:
                continue
            freed = self.column(upper=1.0)
            self.at_most([(freed, 1), (self.r(t, k), -1)], 0)
            for hazard in hazards:
                self.at_most([(freed, 1), (hazard, 1)], 1)
            yield x, freed

    def doubles(self, t: int, k: int) -> Iterator[tuple[int, Term]]:
        """D[t,x] = R[t,k] S[t,x] for what op k makes again."""
        for x in self.graph.ops[k].outputs if k < t else ():
            if x in self.graph.kept:
                yield x, self.r(t, k)
            elif len(self.graph.ops[k].outputs) > 1 and (there := self.s(t, x)) is not None:
                double = self.column(upper=1.0)
                for factor in (self.r(t, k), there):
                    self.at_most([(double, 1), (factor, -1)], 0)
                yield x, double

    def r(self, t: int, i: int) -> Term:
        """R[t,i]: 1 for the first execution."""
        return ONE if i == t else self.R.get((t, i))

    def s(self, t: int, x: int) -> Term:
        """S[t,x]: 1 for what is kept, 0 before it is made and after its last reader."""
        if x in self.graph.kept:
            return ONE if self.offer.made_at(x) < t else None
        return self.S.get((t, x))

    def passing_before(self, t: int) -> Iterator[int]:
        """The tensors made before stage t that somebody reads, and that are not kept."""
        for k in range(t):
            yield from (x for x in self.graph.ops[k].outputs if self.graph.consumers[x] and x not in self.graph.kept)

    def size(self, x: int) -> float:
        """b_x."""
        return self.offer.size_bytes(x) / self.memory_unit
