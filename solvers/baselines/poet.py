"""POET (Patil et al., ICML 2022): recomputation and paging by one program, in which paging takes energy and no time.

The program is solved by HiGHS. Published to minimise energy: computation costs its time, and transfers their time at another
power, of which a few are tried, without a limit on the time of the step. Its decisions are then timed: reloads of a stage are
issued when the stage has ended, offloads start at the beginning of their stage, and the computation waits for transfers whose
memory or tensor is needed. The fastest schedule is returned.

The program grows with the square of the ops: larger graphs are not tried.

POET's 0-1 program is Checkmate's (``common.checkmate_program``), with a second memory. H[t,x]: x is on the host when stage t
begins; In[t,x], Out[t,x]: it is reloaded and offloaded in stage t.

    S[t+1,x] <= S[t,x] + R[t,p(x)] + In[t,x]
    H[t+1,x] <= H[t,x] + Out[t,x]      In[t,x] <= H[t,x]      Out[t,x] <= S[t,x]
    sum of b_x H[t,x] <= capacity of the host
    minimise sum of c_i R[t,i] + power * (sum of out_x Out[t,x] + sum of in_x In[t,x])

A transfer takes no time and ends in its stage: its cost is energy.
"""

from functools import partial

from planner.graphs.ir import Graph
from planner.graphs.schedule import Schedule
from planner.solvers import highs
from planner.solvers.baselines.common.checkmate_program import MEMORY_RANGE, StageProgram, get_value
from planner.solvers.baselines.common.offloading import Device, Offer, answer_by_offloading, offer_of
from planner.solvers.baselines.common.program_size import ProgramSize
from planner.solvers.baselines.common.verdicts import Candidate, answer, build_failure
from planner.solvers.clock import measure_rest
from planner.solvers.highs.program import Floats, Milp, Outcome, SolveCallbacks
from planner.solvers.request import Request
from planner.solvers.result import Reason, Result

MOST_COLUMNS = 36_000  # of decisions: with those that linearise products they are 60,000
# Seconds to write the program and solve its relaxation once: half of what 900 to 17,700 decisions took.
_LEAST_S, _LEAST_POWER = 3.5e-6, 1.3
_POWERS = (1.0, 0.1)  # of transfers, relative to that of computation; they share the time


class PoetProgram(StageProgram):
    """The program of a graph, a budget and a power of transfers relative to computation.

    Attributes:
        host, fetched, sent: columns by stage and tensor, where they may be 1.
    """

    def __init__(self, offer: Offer, budget_bytes: int, power: float) -> None:
        super().__init__(offer.program, [budget_bytes - offer.program.static_bytes])
        self.offer, self.power = offer, power
        self.host: dict[tuple[int, int], int] = {}
        self.fetched: dict[tuple[int, int], int] = {}
        self.sent: dict[tuple[int, int], int] = {}

    def keeps(self, t: int, x: int, values: Floats) -> bool:
        """Return True if x is handed over to stage t in a solution."""
        return get_value(self.s(0, t, x), values) > 0.5

    @property
    def size(self) -> ProgramSize:
        """Its size, by decisions: R, S, and transfers that can serve a later stage."""
        offered = (x for t in range(self.ops) for x in self.iterate_passing(t) if x in self.offer.by_tensor)
        count = self.count_decisions() + 3 * len(list(offered))
        what = f"POET's program for {self.ops:,} ops has about {count:,} variables"
        return ProgramSize(what, count, MOST_COLUMNS, _LEAST_S * count**_LEAST_POWER)

    def build(self) -> Milp:
        """Build the program."""
        self.add_all((self.add_decisions, self.add_transfers))
        self.add_all((self.add_inputs, self.add_handover, partial(self.add_memory, 0), self.add_paging, self.add_host_memory))
        return self.build_milp()

    def add_transfers(self, t: int) -> None:
        """Add Out, and H and In where they can serve a later stage; a reload arrives at the end of its stage."""
        for x in self.iterate_passing(t):
            if (transfers := self.offer.by_tensor.get(x)) is None:
                continue
            cost = self.power / self.unit_s
            self.sent[t, x] = self.add_variable("Out", 0, t, x, cost=cost * transfers.out.time_s, integer=True)
            if t > self.made_at[x] + 1:
                self.host[t, x] = self.add_variable("H", 0, t, x, integer=True)
                self.fetched[t, x] = self.add_variable("In", 0, t, x, cost=cost * transfers.back.time_s, integer=True)
                self.arriving[0, t, x] = [(self.ops, self.fetched[t, x])]

    def add_paging(self, t: int) -> None:
        """Add H[t+1,x] <= H[t,x] + Out[t,x]; In[t,x] <= H[t,x]; Out[t,x] <= S[t,x]."""
        for x in self.iterate_passing(t):
            if (later := self.host.get((t + 1, x))) is not None:
                self.add_at_most([(later, 1), (self.host.get((t, x)), -1), (self.sent[t, x], -1)], 0)
            if (t, x) in self.fetched:
                self.add_at_most([(self.fetched[t, x], 1), (self.host[t, x], -1)], 0)
            if (t, x) in self.sent:
                self.add_at_most([(self.sent[t, x], 1), (self.s(0, t, x), -1)], 0)

    def add_host_memory(self, t: int) -> None:
        """Add sum of b_x H[t,x] <= capacity of the host, in its 10,000th parts."""
        if (limit := self.offer.host_bytes) is not None:
            unit = max(limit, 1) / MEMORY_RANGE
            there = [(column, self.offer.get_size_bytes(x) / unit) for (stage, x), column in self.host.items() if stage == t]
            self.add_at_most(there, limit / unit)


def measure_program(graph: Graph, budget_bytes: int) -> ProgramSize | None:
    """Return the size of the program of a graph; None if it offers no transfers."""
    offer = offer_of(graph)
    return None if offer is None else PoetProgram(offer, budget_bytes, 1.0).size


def solve(request: Request) -> Result:
    """Return the fastest timed solution; LIMIT if the program is too large, infeasible, or has no solution in time."""
    offer = offer_of(request.graph)
    if offer is None:
        return answer_by_offloading(request, "poet", lambda _: (), what="POET")
    trials: list[Candidate] = []
    for place, power in enumerate(_POWERS):
        model = PoetProgram(offer, request.budget_bytes, power)
        if (refusal := model.size.find_refusal(request.clock.limit)) is not None:
            return build_failure(request, "poet", *refusal)
        found = highs.solve_program(
            model.build(),
            clock=request.clock.start_part(measure_rest(request.clock) / (len(_POWERS) - place)),
            absolute_gap=request.tolerance.first * offer.program.time_s / model.unit_s,
            callbacks=SolveCallbacks(should_stop=request.is_interrupted, interrupted=request.is_interrupted),
        )
        if found.values is not None:
            trials.append(Candidate(carry_out(model, found.values, request.budget_bytes), {"power": power}))
        elif found.outcome is Outcome.INFEASIBLE:
            why = "POET's program is infeasible at this budget: raise the budget, or use the solver windows"
            return build_failure(request, "poet", why, Reason.MEMORY)
    if not trials:
        why = f"POET's program found nothing within {request.clock.format_amount(request.clock.limit)}: raise the time limit"
        return build_failure(request, "poet", why, Reason.TIME)
    return answer(request, "poet", trials, what="POET")


def carry_out(model: PoetProgram, values: Floats, budget_bytes: int) -> Schedule:
    """Return the timed schedule of a solution."""
    offer: Offer = model.offer
    graph, device = offer.program, Device(offer, budget_bytes)

    for t in range(model.ops):
        for x in _list_chosen(model.fetched, t - 1, values):
            if model.keeps(t, x, values) and x in device.host and x not in device.live:
                device.make_room(offer.get_size_bytes(x))
                device.fetch(x)
            device.recall(x)
        for x in _list_chosen(model.sent, t, values):
            if device.can_send(x):
                device.send(x)
                device.recall(x)
        executed = [*(i for i in range(t) if get_value(model.r(0, t, i), values) > 0.5), t]
        for place, i in enumerate(executed):
            op = graph.ops[i]
            for x in (*op.inputs, *op.outputs):
                device.recall(x)
            device.make_room(sum(map(offer.get_size_bytes, op.outputs)) + op.workspace_bytes)
            device.compute(i)
            wanted = {x for j in executed[place + 1 :] for x in graph.ops[j].inputs}
            for x in (*op.inputs, *op.outputs):
                over = not graph.tensors[x].static and x not in graph.kept and x not in wanted
                if over and not model.keeps(t + 1, x, values) and x in device.live:
                    device.let_go(x)
        for x in sorted(device.live):
            if device.has(x) and x not in graph.kept and not model.keeps(t + 1, x, values):
                device.let_go(x)
    return device.schedule


def _list_chosen(columns: dict[tuple[int, int], int], t: int, values: Floats) -> list[int]:
    return [x for (stage, x), column in columns.items() if stage == t and values[column] > 0.5]
