"""MONeT's program (Shah et al., *Memory Optimization for Deep Networks*, ICLR 2021), with HiGHS.

It chooses three things at once: the tensors of the forward pass that are stored and recomputed, the implementation of each op,
with its own workspace and inputs, and thereby the tensors that a backward op reads. Implementations are the optional ops of a
graph that replace one op of the program by themselves (option ``kernels``); without any the program chooses recomputations only.
Stage 0 is the forward pass; stage k = 1..m recomputes forward ops, in program order, each at most once, and ends with the k-th op
after the forward pass, which is executed once.

V[k,i,a]: op i is executed by a in stage k; S[k,t]: t of the forward pass is in memory when stage k begins; W[k,t,c]: t is in
memory at the turn of c in stage k, for c or for later ops.

    sum over a of V[k,i,a] = 1  (first executions), <= 1  (others)
    V[k,i,a]  <= S[k,t] + sum over b of V[k,p(t),b]            t read by a
    S[k+1,t]  <= S[k,t] + sum over b of V[k,p(t),b]
    W[k,t,c]  >= sum over the a of c that read t of V[k,c,a],  W[k,t,c'] of the next reader c', S[k+1,t] after the last
    sum over a of (w_a + b(out(a))) V[k,i,a] + sum over t of b_t (W of t at i; S[k,t] if t is produced at i or later) <= M

In the paper, local and stored tensors have letters of their own (P and S), memory is written with products of binaries that are
linearised, and implementations and recomputations too (RF and R): V is their product. In-place implementations are ops with the
option ``in_place`` here, which replace several ops and are left out.
"""

from collections.abc import Iterator
from dataclasses import replace

from planner.graphs.checks import check_plain
from planner.graphs.ir import Graph, Phase
from planner.graphs.options.selection import remove_computed
from planner.graphs.schedule import Schedule, schedule_of
from planner.graphs.units import format_bytes
from planner.solvers import highs
from planner.solvers.baselines.common.program_size import ProgramSize
from planner.solvers.baselines.common.recomputation import find_repeatable
from planner.solvers.baselines.common.verdicts import Verdict, build_result, judge
from planner.solvers.highs.builder import TermProgram, Weighted
from planner.solvers.highs.program import Floats, Outcome, SolveCallbacks
from planner.solvers.request import Request
from planner.solvers.result import Reason, Result, Status, describe_class

CLASS = "ops of the forward pass again at most once before each later op, in program order"
MOST_ENTRIES = 2_000_000  # of the rows of memory: HiGHS takes an hour for less
_ENTRY_S = 5e-6  # seconds for each of them to write the program and solve its relaxation once: half of what 1,100 to 518,400 took
_MEMORY_RANGE = 1e4  # the budget in the program's unit of memory
_TIME_RANGE = 1e3  # the step without recomputation in its unit of time


class MonetProgram(TermProgram):
    """The program of a graph for a budget.

    Attributes:
        V, S: columns by the letters of the program, where they may be 1.
    """

    def __init__(self, graph: Graph, budget_bytes: int) -> None:
        super().__init__()
        program = graph.program
        self.graph, self.unit_s = graph, (graph.time_s or 1.0) / _TIME_RANGE
        self.capacity_bytes = budget_bytes - graph.static_bytes
        self.forward = [op.id for op in program if op.phase is Phase.FORWARD]
        self.later = [op.id for op in program if op.phase is not Phase.FORWARD]
        self.stages = range(len(self.later) + 1)
        self.alternatives = {op.id: [op.id] for op in program}
        for op in graph.ops[len(program) :]:
            if len(op.replaces) == 1:
                self.alternatives[op.replaces[0]].append(op.id)
        fit = find_repeatable(graph)
        self.again = [i for i in self.forward if fit[i]]
        self.made_at = [t.producers[0] if t.producers and t.producers[0] < len(program) else -1 for t in graph.tensors]
        self.passing = [t for i in self.forward for t in graph.ops[i].outputs if t not in graph.kept]
        self.passes = frozenset(self.passing)
        self.last_read = {t.id: max(self._list_readers(t.id), default=-1) for t in graph.tensors}
        self.V: dict[tuple[int, int, int], int] = {}
        self.S: dict[tuple[int, int], int] = {}

    @property
    def size(self) -> ProgramSize:
        """Its size: about the number of entries in the memory rows."""
        entries = len(self.stages) * len(self.again) * len(self.passing)
        what = f"MONeT's program for {len(self.graph.program):,} ops has about {entries:,} entries"
        return ProgramSize(what, entries, MOST_ENTRIES, _ENTRY_S * entries)

    def build(self) -> None:
        """Add all columns and rows."""
        for k in self.stages:
            for i in self._list_ops(k):
                for a in self._iterate_alternatives(i):
                    cost = self.graph.ops[a].time_s / self.unit_s
                    self.V[k, i, a] = self.add_column(cost=cost, integer=True)
            for t in self.passing if k else ():
                self.S[k, t] = self.add_column(integer=True)
        for k in self.stages:
            for i in self._list_ops(k):
                first = k == 0 or i == self.later[k - 1]
                self.add_terms([(v, 1.0) for v in self._list_execution_columns(k, i)], float(first), 1.0)
            self._add_inputs(k)
            self._add_memory(k)

    def _list_ops(self, k: int) -> list[int]:
        """Return the ops that have a turn in stage k, in order."""
        return self.forward if k == 0 else [*self.again, self.later[k - 1]]

    def _iterate_alternatives(self, i: int) -> Iterator[int]:
        """Yield the ops that may execute op i: those that produce all its outputs that are kept or have readers."""
        wanted = {t for t in self.graph.ops[i].outputs if t in self.graph.kept or self._list_readers(t)}
        for a in self.alternatives[i]:
            op = self.graph.ops[a]
            known = all(self.made_at[t] >= 0 or self.graph.tensors[t].static for t in (*op.inputs, *op.outputs))
            if known and wanted <= set(op.outputs):
                yield a

    def _list_readers(self, t: int) -> list[int]:
        """Return the ops of the program that read t in some implementation."""
        return sorted({i for i, ways in self.alternatives.items() if any(t in self.graph.ops[a].inputs for a in ways)})

    def _list_execution_columns(self, k: int, i: int, reading: int | None = None) -> list[int]:
        """Return the columns V[k,i,a]; with `reading` those of the a that read it."""
        ways = (a for a in self.alternatives[i] if reading is None or reading in self.graph.ops[a].inputs)
        return [self.V[k, i, a] for a in ways if (k, i, a) in self.V]

    def _add_inputs(self, k: int) -> None:
        for t in self.passing:
            producer = self._list_execution_columns(k, self.made_at[t])
            there: list[Weighted] = [(self.S.get((k, t)), -1.0), *((v, -1.0) for v in producer)]
            if k:
                for i in self._list_ops(k):
                    for v in self._list_execution_columns(k, i, reading=t):
                        self.add_at_most([(v, 1.0), *there], 0.0)
            if k + 1 < len(self.stages):
                self.add_at_most([(self.S[k + 1, t], 1.0), *there], 0.0)

    def _add_memory(self, k: int) -> None:
        unit = max(1, self.capacity_bytes) / _MEMORY_RANGE
        size = [t.size_bytes / unit for t in self.graph.tensors]
        order = self._list_ops(k)
        wanted = {t: self.S.get((k + 1, t)) for t in self.passing}  # after the current turn
        rows = []
        for i in reversed(order):
            present: list[Weighted] = []
            for t in self.passing:
                if self.made_at[t] >= i:
                    present.append((self.S.get((k, t)), size[t]))
                    continue
                if reading := self._list_execution_columns(k, i, reading=t):
                    here = self.add_column()
                    self.add_at_most([*((v, 1.0) for v in reading), (here, -1.0)], 0.0)
                    if wanted[t] is not None:
                        self.add_at_most([(wanted[t], 1.0), (here, -1.0)], 0.0)
                    wanted[t] = here
                present.append((wanted[t], size[t]))
            for a in self.alternatives[i]:
                if (k, i, a) in self.V:
                    op = self.graph.ops[a]
                    made = op.workspace_bytes / unit + sum(size[t] for t in op.outputs)
                    present.append((self.V[k, i, a], made))
            rows.append((present, _MEMORY_RANGE - sum(size[t] for t in self._iterate_certain(k, i))))
        for present, limit in rows:
            self.add_at_most(present, limit)

    def _iterate_certain(self, k: int, i: int) -> Iterator[int]:
        """Yield the tensors that are in memory at the turn of i in stage k anyway: kept ones, and those between later ops."""
        now = i if k == 0 else self.later[k - 1]
        for t in self.graph.tensors:
            made = self.made_at[t.id]
            if t.static or made < 0 or made >= now or t.id in self.passes:
                continue
            if t.id in self.graph.kept or self.last_read[t.id] >= now:
                yield t.id

    def schedule(self, values: Floats) -> Schedule:
        """Return the schedule of a solution."""
        chosen = {(k, i): a for (k, i, a), column in self.V.items() if values[column] > 0.5}
        return schedule_of(self.graph, [chosen[k, i] for k in self.stages for i in self._list_ops(k) if (k, i) in chosen])


def solve(request: Request) -> Result:
    """Return the optimal schedule of the program; its bound, and status OPTIMAL, refer to the program's schedules only.

    An infeasible program gives LIMIT, since other schedules may fit; so does one that is too large.

    Raises:
        GraphError: the graph has options other than ops on the compute stream.
    """
    graph = request.graph
    check_plain(remove_computed(graph))
    settings = replace(request.settings, schedules=describe_class(graph, CLASS))
    return build_result(request, "monet", _reach_verdict(request), settings=settings, versions={"highs": highs.read_version()})


def measure_program(graph: Graph, budget_bytes: int) -> ProgramSize:
    """Return the size of the program of a graph."""
    return MonetProgram(graph, budget_bytes).size


def _reach_verdict(request: Request) -> Verdict:
    graph = request.graph
    program = MonetProgram(graph, request.budget_bytes)
    if (refusal := program.size.find_refusal(request.clock.limit)) is not None:
        return Verdict(Status.LIMIT, None, None, *refusal)
    program.build()
    request.tell("solving MONeT's program", None, None)
    callbacks = SolveCallbacks(should_stop=request.is_interrupted, interrupted=request.is_interrupted)
    gap = request.tolerance.first * graph.time_s / program.unit_s
    answer = highs.solve_program(program.build_milp(), clock=request.clock, absolute_gap=gap, callbacks=callbacks)
    if answer.values is None:
        memory = answer.outcome is Outcome.INFEASIBLE
        budget = format_bytes(request.budget_bytes)
        none = f"no schedule that executes {describe_class(graph, CLASS)}, fits {budget}"
        why = none if memory else "MONeT's program found nothing in time"
        why += f" ({answer.detail}): raise the budget{'' if memory else ' or the time limit'}, or use the solver windows"
        return Verdict(Status.LIMIT, message=why, reason=Reason.MEMORY if memory else Reason.TIME)
    return judge(request, program.schedule(answer.values), answer.bound * program.unit_s)
