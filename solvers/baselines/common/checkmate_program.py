"""Checkmate's 0-1 program as published (Jain et al., MLSys 2020), in PuLP.

Stage t ends with the first execution of op t (frontier-advancing). R[t,i]: op i is executed in stage t; S[t,x]: tensor x is in
memory when stage t begins; F[t,x,k]: x is freed in stage t after op k; U[t,k]: memory at the turn of op k in stage t. Published
for one output per op; here, to agree with ``graphs.simulate``, tensors have lifetimes of their own:

- S and F are per tensor, and a recomputed op produces all its outputs. One that is in memory already counts twice during the
execution and once afterwards: D[t,x] = R[t,p(x)] S[t,x] subtracts the copy.
- A kept tensor is in memory from its first computation on: S = 1, F = 0, and D = R.
- The workspace of an op counts during its turn only.
- An op that must run once, or has an input that was written in place since, has R = 0.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pulp

from graphs.ir import Graph
from solvers.baselines.common.program_size import find_refusal
from solvers.bounds import bound_least_budget
from solvers.problem import Problem, build_problem
from solvers.result import Reason

MOST_BINARIES = 500_000  # of R and S: PuLP takes several GB for more
# Seconds to write the program and solve its relaxation once: half of what 1,600 to 12,000 variables R and S took on a busy core.
# The first schedule takes ten times as long and more.
_LEAST_S, _LEAST_POWER = 1e-4, 1.2
_WHOLE = 1e-4  # tolerance on binaries
_MEMORY_RANGE = 1e4  # the budget in the program's unit of memory
_TIME_RANGE = 1e3  # the step without recomputation in its unit of time


class UnusedOutputs(StrEnum):
    """The time at which an output is freed that neither its stage nor the next one needs."""

    AT_ONCE = "at_once"  # as the simulation does
    STAGE_END = "stage_end"  # as in the program that Checkmate's authors released


class Frees(StrEnum):
    """The linearisation of F[t,x,k] = R[t,k] (1 - S[t+1,x]) prod over later readers j of (1 - R[t,j])."""

    HAZARDS = "hazards"  # binary, with the count of factors that are 0: as published
    SPLIT = "split"  # continuous, below each factor: tighter, found later


@dataclass(frozen=True, slots=True)
class CheckmateVariant:
    """A variant of the program."""

    unused_outputs: UnusedOutputs = UnusedOutputs.AT_ONCE
    frees: Frees = Frees.HAZARDS


PUBLISHED = CheckmateVariant()


NEVER, ALWAYS = 0, 1  # constants in place of variables
Term = Any  # a variable of PuLP, NEVER or ALWAYS
Weighted = tuple[Term, float]


def estimate_least_time_s(count: int) -> float:
    """Return about the least seconds after which a program of `count` variables R and S can have a solution."""
    return _LEAST_S * math.pow(count, _LEAST_POWER)


def estimate_program_time_s(graph: Graph, budget_bytes: int) -> float:
    """Return ``estimate_least_time_s`` of the program of a graph; 0 if it is refused in any time."""
    model = CheckmateModel(build_problem(graph, budget_bytes))
    refused = budget_bytes < bound_least_budget(graph).budget_bytes or model.explain_refusal(math.inf)
    return 0.0 if refused else estimate_least_time_s(model.count())


class CheckmateModel:
    """The program of a problem, with memory and time in units that suit solvers."""

    def __init__(self, problem: Problem, variant: CheckmateVariant = PUBLISHED, *, whole: bool = True) -> None:
        self.problem = problem
        self.graph = problem.graph
        self.variant = variant
        self.whole = whole
        self.ops = problem.ops
        self.memory_unit = max(problem.capacity_bytes, 1) / _MEMORY_RANGE
        self.capacity = problem.capacity_bytes / self.memory_unit
        self.time_unit = (problem.base_s or 1.0) / _TIME_RANGE
        self.size = [size / self.memory_unit for size in problem.sizes]
        # An op may be executed up to the stage before the one whose op writes its inputs in place.
        stages = zip(problem.graph.ops, problem.recompute_before, strict=True)
        self.last_stage = [min(last, self.ops - 1) if op.recomputable else op.id for op, last in stages]
        self.program = pulp.LpProblem("checkmate", pulp.LpMinimize)
        self.variable: Callable[..., Any] = self.program.add_variable
        self.R: dict[tuple[int, int], Any] = {}
        self.S: dict[tuple[int, int], Any] = {}
        self.rows = 0

    def build(self, expired: Callable[[], bool] = lambda: False) -> bool:
        """Add variables, objective and rows; return False if `expired` returned True before the end."""
        for t in range(self.ops):
            for i in range(t):
                if t <= self.last_stage[i]:
                    self.R[t, i] = self.add_binary(f"R_{t}_{i}")
            for x in self.iterate_passing(t):
                self.S[t, x] = self.add_binary(f"S_{t}_{x}")
            if expired():
                return False
        self.add_objective()
        for t in range(self.ops):
            self.add_inputs(t)
            self.add_handover(t)
            self.add_memory(t)
            if expired():
                return False
        return True

    def count(self) -> int:
        """Return the number of variables R and S; nothing is built."""
        passing = sum(self.ops - 1 - self.problem.producer[x] for x in self.iterate_passing(self.ops))
        return passing + sum(last - i for i, last in enumerate(self.last_stage))

    def explain_refusal(self, limit_s: float) -> tuple[str, Reason] | None:
        """Return why the program is not begun: too large, or too long for a time limit; None if neither. Nothing is built."""
        count = self.count()
        what = f"Checkmate's program for {self.ops:,} ops has {count:,} variables R and S"
        return find_refusal(what, count, MOST_BINARIES, estimate_least_time_s(count), limit_s)

    @property
    def is_mip(self) -> bool:
        """True if there are binary variables."""
        return self.whole and bool(self.R or self.S)

    def add_objective(self) -> None:
        """Set the objective: sum over t, i of c_i R[t,i], without the first executions, whose R is 1."""
        self.program.setObjective(_sum([(R, self.problem.time_s[i] / self.time_unit) for (_, i), R in self.R.items()]))

    def add_inputs(self, t: int) -> None:
        """Add R[t,j] <= R[t,p(x)] + S[t,x] for each op j of stage t and each x in in(j)."""
        for j in range(t + 1):
            if self.r(t, j) is NEVER:
                continue
            for x in self.problem.inputs[j]:
                self.add_at_most([(self.r(t, j), 1), (self.r(t, self.problem.producer[x]), -1), (self.s(t, x), -1)], 0)

    def add_handover(self, t: int) -> None:
        """Add S[t+1,x] <= S[t,x] + R[t,p(x)] for each x produced before stage t; a new one may always be handed over."""
        for x in self.iterate_passing(t) if t + 1 < self.ops else ():
            self.add_at_most([(self.s(t + 1, x), 1), (self.s(t, x), -1), (self.r(t, self.problem.producer[x]), -1)], 0)

    def add_memory(self, t: int) -> None:
        """Add U[t,1] = sum of b_x S[t,x] + R[t,1] b(out(1)), and along the ops of stage t the following rows.

        U[t,k+1] = U[t,k] - sum over x in io(k) of b_x F[t,x,k] - sum over x in out(k) of b_x D[t,x] + R[t,k+1] b(out(k+1));
        U[t,k] + w_k R[t,k] <= M.
        """
        change = [(self.s(t, x), self.size[x]) for k in range(t) for x in self.graph.ops[k].outputs]
        previous: Term = 0
        for k in range(t + 1):
            op = self.graph.ops[k]
            executed = self.r(t, k)
            if executed is NEVER:
                continue
            change.append((executed, sum(self.size[x] for x in op.outputs)))
            used = self.variable(f"U_{t}_{k}", 0, self.capacity)
            self.add_equal([(used, 1), (previous, -1), *((term, -size) for term, size in change)], 0)
            if op.workspace_bytes:
                self.add_at_most([(used, 1), (executed, op.workspace_bytes / self.memory_unit)], self.capacity)
            previous = used
            change = [(freed, -self.size[x]) for x, freed in self.iterate_frees(t, k)]
            change += [(double, -self.size[x]) for x, double in self.iterate_doubles(t, k)]

    def iterate_frees(self, t: int, k: int) -> Iterator[tuple[int, Term]]:
        """Yield x and F[t,x,k] = R[t,k] (1 - S[t+1,x]) prod over readers j of x, k < j <= t, of (1 - R[t,j]) for x in io(k)."""
        op = self.graph.ops[k]
        own = op.outputs if self.variant.unused_outputs is UnusedOutputs.AT_ONCE else ()
        for x in (*self.problem.inputs[k], *own):
            hazards = [self.s(t + 1, x), *(self.r(t, j) for j in self.graph.consumers[x] if k < j <= t)]
            if self.problem.kept[x] or ALWAYS in [hazard for hazard in hazards if isinstance(hazard, int)]:
                continue
            open_hazards = [hazard for hazard in hazards if not isinstance(hazard, int)]
            yield x, self.free(f"F_{t}_{x}_{k}", self.r(t, k), open_hazards)

    def free(self, name: str, executed: Term, hazards: Sequence[Term]) -> Term:
        """Return F, which is 1 if `executed` is 1 and every one of `hazards` is 0.

        As published: 1 - F <= h and h <= m (1 - F) for h = (1 - executed) + sum of the m - 1 hazards. Split: F <= executed, and F
        <= 1 - hazard for each.
        """
        if not hazards:
            return executed
        if self.variant.frees is Frees.SPLIT:
            freed = self.variable(name, 0, 1)
            for factor in [executed] if executed is not ALWAYS else []:
                self.add_at_most([(freed, 1), (factor, -1)], 0)
            for hazard in hazards:
                self.add_at_most([(freed, 1), (hazard, 1)], 1)
            return freed
        freed, count = self.add_binary(name), [(executed, -1.0), *((hazard, 1.0) for hazard in hazards)]
        self.add_at_most([(freed, -1), *((term, -weight) for term, weight in count)], 0)
        self.add_at_most([(freed, len(count)), *count], len(count) - 1)
        return freed

    def iterate_doubles(self, t: int, k: int) -> Iterator[tuple[int, Term]]:
        """Yield x and D[t,x] = R[t,k] S[t,x] for x in out(k), which may be in memory when k is recomputed."""
        outputs = self.graph.ops[k].outputs
        for x in outputs if k < t else ():
            if self.problem.kept[x]:
                yield x, self.r(t, k)
            elif len(outputs) > 1 and self.s(t, x) is not NEVER:
                double = self.variable(f"D_{t}_{x}", 0, 1)
                self.add_at_most([(double, 1), (self.r(t, k), -1)], 0)
                self.add_at_most([(double, 1), (self.s(t, x), -1)], 0)
                self.add_at_most([(self.r(t, k), 1), (self.s(t, x), 1), (double, -1)], 1)
                yield x, double

    def compute_solution_s(self) -> float:
        """Return the seconds of a solution, including first executions: sum over t, i of c_i R[t,i]."""
        return self.problem.base_s + sum(self.problem.time_s[i] * get_value(R) for (_, i), R in self.R.items())

    def read_executions(self) -> list[int] | None:
        """Return the ops in the order of a solution's schedule; None if a binary is neither 0 nor 1."""
        order: list[int] = []
        for t in range(self.ops):
            for i in range(t):
                value = get_value(self.r(t, i))
                if min(value, 1 - value) > _WHOLE:
                    return None
                if value > 0.5:
                    order.append(i)
            order.append(t)
        return order

    def r(self, t: int, i: int) -> Term:
        """Return R[t,i]: 1 for the first execution, 0 if none is possible."""
        return ALWAYS if i == t else self.R.get((t, i), NEVER)

    def s(self, t: int, x: int) -> Term:
        """Return S[t,x]: 1 for kept tensors, 0 before production, without readers, and after the last stage."""
        if self.problem.kept[x]:
            return ALWAYS if self.problem.producer[x] < t else NEVER
        return self.S.get((t, x), NEVER)

    def iterate_passing(self, t: int) -> Iterator[int]:
        """Yield the tensors produced before stage t that have readers and are not kept."""
        for k in range(t):
            yield from (x for x in self.graph.ops[k].outputs if self.graph.consumers[x] and not self.problem.kept[x])

    def add_binary(self, name: str) -> Any:
        """Add a 0-1 variable and return it; it is continuous in the relaxation."""
        return self.variable(name, 0, 1, "Binary" if self.whole else "Continuous")

    def add_at_most(self, terms: Sequence[Weighted], limit: float) -> None:
        """Add the row: sum of `terms` <= `limit`."""
        self._add(_sum(terms) <= limit)

    def add_equal(self, terms: Sequence[Weighted], value: float) -> None:
        """Add the row: sum of `terms` = `value`."""
        self._add(_sum(terms) == value)

    def _add(self, row: Any) -> None:
        self.program.addConstraint(row, f"c{self.rows}")
        self.rows += 1


def get_value(term: Term) -> float:
    """Return the value of a variable in a solution; 0 if it is in no row."""
    return float(term if isinstance(term, int) else term.varValue or 0.0)


def _sum(terms: Sequence[Weighted]) -> Any:
    total = pulp.lpSum([])  # PuLP 3 and 4 have no constructor in common
    for term, weight in terms:
        if isinstance(term, int):
            total.constant += term * weight
        else:
            total.addterm(term, weight)
    return total
