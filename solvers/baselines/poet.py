"""POET (Patil et al., ICML 2022): recomputation and paging by one program, in which paging takes energy and no time.

The program is solved by HiGHS. Published to minimise energy: computation costs its time, and transfers their time at another
power, of which a few are tried, without a limit on the time of the step. Its decisions are then timed: reloads of a stage are
issued when the stage has ended, offloads start at the beginning of their stage, and the computation waits for transfers whose
memory or tensor is needed. The fastest schedule is returned.

The program grows with the square of the ops: larger graphs are not tried.

POET's 0-1 program is Checkmate's, with a second memory.

Stage t ends with the first execution of op t. R[t,i]: op i is executed in stage t; S[t,x]: tensor x is on the device when stage t
begins; H[t,x]: on the host; In[t,x], Out[t,x]: reloaded and offloaded in stage t; U[t,k]: memory at the turn of op k.

    R[t,j]   <= R[t,p(x)] + S[t,x]             x read by op j
    S[t+1,x] <= S[t,x] + R[t,p(x)] + In[t,x]
    H[t+1,x] <= H[t,x] + Out[t,x]      In[t,x] <= H[t,x]      Out[t,x] <= S[t,x]
    sum of b_x H[t,x] <= capacity of the host
    minimise sum of c_i R[t,i] + power * (sum of out_x Out[t,x] + sum of in_x In[t,x])

A transfer takes no time and ends in its stage: its cost is energy. Memory is as in Checkmate's program (Jain et al., MLSys 2020),
extended for several outputs of an op, kept tensors and workspaces: F[t,x,k], x is freed in stage t after op k, is below each of
its factors; D[t,x] = R[t,p(x)] S[t,x] subtracts second copies.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from graphs.ir import Graph
from graphs.schedule import Schedule
from solvers import highs
from solvers.baselines.common.offloading import Device, Offer, answer_by_offloading, offer_of
from solvers.baselines.common.program_size import find_refusal
from solvers.baselines.common.recomputation import find_repeatable
from solvers.baselines.common.verdicts import Candidate, answer, build_failure
from solvers.clock import measure_rest
from solvers.highs.builder import ONE, Term, TermProgram
from solvers.highs.program import Floats, Milp, Outcome, SolveCallbacks
from solvers.request import Request
from solvers.result import Reason, Result

MOST_COLUMNS = 36_000  # of decisions: with those that linearise products they are 60,000
# Seconds to write the program and solve its relaxation once: half of what 900 to 17,700 decisions took.
_LEAST_S, _LEAST_POWER = 3.5e-6, 1.3
_MEMORY_RANGE = 1e4  # the budget in the program's unit of memory
_TIME_RANGE = 1e3  # the step without recomputation in its unit of time


@dataclass(frozen=True, slots=True)
class PoetParams:
    """Parameters of the method.

    Attributes:
        powers: of transfers, relative to that of computation; they share the time.
    """

    powers: tuple[float, ...] = (1.0, 0.1)


class PoetProgram(TermProgram):
    """The program of a graph, a budget and a power of transfers relative to computation.

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
        self.may_repeat = find_repeatable(self.graph)
        self.R: dict[tuple[int, int], int] = {}
        self.S: dict[tuple[int, int], int] = {}
        self.host: dict[tuple[int, int], int] = {}
        self.fetched: dict[tuple[int, int], int] = {}
        self.sent: dict[tuple[int, int], int] = {}

    def count(self) -> int:
        """Return the number of decisions: R, S, and transfers that can serve a later stage."""
        again = sum(self.stages - 1 - i for i, fit in enumerate(self.may_repeat) if fit)
        passing = [x for t in range(self.stages) for x in self.iterate_passing(t)]
        return again + len(passing) + sum(3 for x in passing if x in self.offer.by_tensor)

    def find_refusal(self, limit_s: float) -> tuple[str, Reason] | None:
        """Return why the program is not begun; None if it is."""
        count = self.count()
        what = f"POET's program for {self.stages:,} ops has about {count:,} variables"
        return find_refusal(what, count, MOST_COLUMNS, estimate_least_time_s(count), limit_s)

    def build(self) -> Milp:
        """Build the program."""
        for t in range(self.stages):
            self.add_columns(t)
        for t in range(self.stages):
            self.add_inputs(t)
            self.add_hand_over(t)
            self.add_memory(t)
            self.add_host_memory(t)
        return self.build_milp()

    def add_columns(self, t: int) -> None:
        """Add the columns of stage t: S of tensors with later readers, transfers that can serve a later stage."""
        for i in range(t):
            if self.may_repeat[i]:
                self.R[t, i] = self.add_column(cost=self.graph.ops[i].time_s / self.time_unit, integer=True)
        for x in self.iterate_passing(t):
            self.S[t, x] = self.add_column(integer=True)
            if (transfers := self.offer.by_tensor.get(x)) is None:
                continue
            self.sent[t, x] = self.add_column(cost=self.power * transfers.offload_s / self.time_unit, integer=True)
            if t > self.offer.get_producer(x) + 1:
                self.host[t, x] = self.add_column(integer=True)
                self.fetched[t, x] = self.add_column(cost=self.power * transfers.reload_s / self.time_unit, integer=True)

    def add_inputs(self, t: int) -> None:
        """Add R[t,j] <= R[t,p(x)] + S[t,x] for each op j of stage t and each x that it reads."""
        for j in range(t + 1):
            for x in self.graph.ops[j].inputs if self.r(t, j) is not None else ():
                if not self.graph.tensors[x].static:
                    self.add_at_most([(self.r(t, j), 1), (self.r(t, self.offer.get_producer(x)), -1), (self.s(t, x), -1)], 0)

    def add_hand_over(self, t: int) -> None:
        """Add S[t+1,x] <= S + R + In; H[t+1,x] <= H + Out; In <= H; Out <= S."""
        for x in self.iterate_passing(t):
            made = self.offer.get_producer(x)
            if t + 1 < self.stages:
                fetched = self.fetched.get((t, x))
                self.add_at_most([(self.s(t + 1, x), 1), (self.s(t, x), -1), (self.r(t, made), -1), (fetched, -1)], 0)
                self.add_at_most([(self.host.get((t + 1, x)), 1), (self.host.get((t, x)), -1), (self.sent.get((t, x)), -1)], 0)
            if (t, x) in self.fetched:
                self.add_at_most([(self.fetched[t, x], 1), (self.host[t, x], -1)], 0)
            if (t, x) in self.sent:
                self.add_at_most([(self.sent[t, x], 1), (self.s(t, x), -1)], 0)

    def add_host_memory(self, t: int) -> None:
        """Add sum of b_x H[t,x] <= capacity of the host."""
        if (limit := self.offer.host_bytes) is not None:
            there = [(column, self.get_size(x)) for (stage, x), column in self.host.items() if stage == t]
            self.add_at_most(there, limit / self.memory_unit)

    def add_memory(self, t: int) -> None:
        """Add U[t,k+1] = U[t,k] - frees after k + outputs of op k + 1; U[t,k] + its workspace <= M."""
        change = [(self.s(t, x), self.get_size(x)) for k in range(t) for x in self.graph.ops[k].outputs]
        previous: Term = None
        for k in range(t + 1):
            op, executed = self.graph.ops[k], self.r(t, k)
            if executed is None:
                continue
            change.append((executed, sum(map(self.get_size, op.outputs))))
            used = self.add_column(upper=max(self.capacity, 0.0))
            self.add_terms([(used, 1), (previous, -1), *((term, -size) for term, size in change)], 0, 0)
            if op.workspace_bytes:
                self.add_at_most([(used, 1), (executed, op.workspace_bytes / self.memory_unit)], self.capacity)
            previous = used
            change = [(freed, -self.get_size(x)) for x, freed in self.iterate_frees(t, k)]
            change += [(double, -self.get_size(x)) for x, double in self.iterate_doubles(t, k)]

    def iterate_frees(self, t: int, k: int) -> Iterator[tuple[int, int]]:
        """Yield x and F[t,x,k] <= R[t,k], 1 - S[t+1,x], and 1 - R[t,j] for the readers j of x after k."""
        for x in (*self.graph.ops[k].inputs, *self.graph.ops[k].outputs):
            hazards = [self.s(t + 1, x), *(self.r(t, j) for j in self.graph.consumers[x] if k < j <= t)]
            if self.graph.tensors[x].static or x in self.graph.kept or ONE in hazards:
                continue
            freed = self.add_column()
            self.add_at_most([(freed, 1), (self.r(t, k), -1)], 0)
            for hazard in hazards:
                self.add_at_most([(freed, 1), (hazard, 1)], 1)
            yield x, freed

    def iterate_doubles(self, t: int, k: int) -> Iterator[tuple[int, Term]]:
        """Yield x and D[t,x] = R[t,k] S[t,x] for the outputs of op k."""
        for x in self.graph.ops[k].outputs if k < t else ():
            if x in self.graph.kept:
                yield x, self.r(t, k)
            elif len(self.graph.ops[k].outputs) > 1 and (there := self.s(t, x)) is not None:
                double = self.add_column()
                for factor in (self.r(t, k), there):
                    self.add_at_most([(double, 1), (factor, -1)], 0)
                yield x, double

    def r(self, t: int, i: int) -> Term:
        """Return R[t,i]: 1 for the first execution."""
        return ONE if i == t else self.R.get((t, i))

    def s(self, t: int, x: int) -> Term:
        """Return S[t,x]: 1 for kept tensors, 0 before production and after the last reader."""
        if x in self.graph.kept:
            return ONE if self.offer.get_producer(x) < t else None
        return self.S.get((t, x))

    def iterate_passing(self, t: int) -> Iterator[int]:
        """Yield the tensors produced before stage t that have readers and are not kept."""
        for k in range(t):
            yield from (x for x in self.graph.ops[k].outputs if self.graph.consumers[x] and x not in self.graph.kept)

    def get_size(self, x: int) -> float:
        """Return b_x in the program's unit."""
        return self.offer.get_size_bytes(x) / self.memory_unit


def estimate_least_time_s(count: int) -> float:
    """Return about the least seconds after which a program of `count` decisions can have a solution."""
    return _LEAST_S * math.pow(count, _LEAST_POWER)


def estimate_program_time_s(graph: Graph, budget_bytes: int) -> float:
    """Return ``estimate_least_time_s`` of the program of a graph; 0 if there is none, or it is refused in any time."""
    offer = offer_of(graph)
    if offer is None:
        return 0.0
    model = PoetProgram(offer, budget_bytes, 1.0)
    return 0.0 if model.find_refusal(math.inf) else estimate_least_time_s(model.count())


def solve(request: Request) -> Result:
    """Return the fastest timed solution; LIMIT if the program is too large, infeasible, or has no solution in time.

    The parameters are ``PoetParams``.
    """
    params = request.get_params(PoetParams())
    offer = offer_of(request.graph)
    if offer is None:
        return answer_by_offloading(request, "poet", lambda _: (), what="POET", settings=asdict(params))
    trials: list[Candidate] = []
    for place, power in enumerate(params.powers):
        model = PoetProgram(offer, request.budget_bytes, power)
        if (refusal := model.find_refusal(request.clock.limit)) is not None:
            return build_failure(request, "poet", *refusal, settings=asdict(params))
        found = highs.solve_program(
            model.build(),
            clock=request.clock.start_part(measure_rest(request.clock) / (len(params.powers) - place)),
            absolute_gap=request.tolerance.first * offer.program.time_s / model.time_unit,
            callbacks=SolveCallbacks(should_stop=request.is_interrupted, interrupted=request.is_interrupted),
        )
        if found.values is not None:
            trials.append(Candidate(carry_out(model, found.values, request.budget_bytes), {"power": power}))
        elif found.outcome is Outcome.INFEASIBLE:
            why = "POET's program is infeasible at this budget: raise the budget, or use the solver windows"
            return build_failure(request, "poet", why, Reason.MEMORY, settings=asdict(params))
    if not trials:
        why = f"POET's program found nothing within {request.clock.format_amount(request.clock.limit)}: raise the time limit"
        return build_failure(request, "poet", why, Reason.TIME, settings=asdict(params))
    return answer(request, "poet", trials, what="POET", settings=asdict(params))


def carry_out(model: PoetProgram, values: Floats, budget_bytes: int) -> Schedule:
    """Return the timed schedule of a solution."""
    offer: Offer = model.offer
    graph, device = offer.program, Device(offer, budget_bytes)

    def stays(t: int, x: int) -> bool:
        column = model.s(t, x)
        return column is not None and values[column] > 0.5

    def list_chosen(columns: dict[tuple[int, int], int], t: int) -> list[int]:
        return [x for (stage, x), column in columns.items() if stage == t and values[column] > 0.5]

    def let_go(x: int) -> None:
        if x in device.host:
            device.send(x)
        else:
            device.free(x)

    for t in range(model.stages):
        for x in list_chosen(model.fetched, t - 1):
            if stays(t, x) and x in device.host and x not in device.live:
                device.make_room(offer.get_size_bytes(x))
                device.fetch(x)
            device.recall(x)
        for x in list_chosen(model.sent, t):
            if device.can_send(x):
                device.send(x)
                device.recall(x)
        executed = [*sorted(list_chosen(model.R, t)), t]
        for place, i in enumerate(executed):
            op = graph.ops[i]
            for x in (*op.inputs, *op.outputs):
                device.recall(x)
            device.make_room(sum(map(offer.get_size_bytes, op.outputs)) + op.workspace_bytes)
            device.compute(i)
            wanted = {x for j in executed[place + 1 :] for x in graph.ops[j].inputs}
            for x in (*op.inputs, *op.outputs):
                over = not graph.tensors[x].static and x not in graph.kept and x not in wanted and not stays(t + 1, x)
                if over and x in device.live:
                    let_go(x)
        for x in sorted(device.live):
            if device.has(x) and x not in graph.kept and not stays(t + 1, x):
                let_go(x)
    return device.schedule
