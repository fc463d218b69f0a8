"""The plain graph of an order of executions in a graph with optional ops: the graph in which all options are decided.

Each executed op takes the position of its first execution, and each reader reads the output of the last producer before it: a
tensor of several producers becomes several tensors. A schedule of the plain graph is a schedule of the graph with options, where
these are one tensor, at no more memory. A tensor with several producers is not offloaded.

Ops on other devices, and transfers between them, are ops of the plain graph too, at their position in the order, without time and
memory: the remaining question is how the main device meets its budget.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.graphs.ir import Graph, Op, Phase, Tensor
from planner.graphs.pools import COMPUTE, DEVICE, HOST
from planner.graphs.schedule import Compute, Free, Schedule, Step
from planner.solvers.problem import Problem
from planner.solvers.streams import get_workspace_bytes


@dataclass(frozen=True, slots=True)
class PlainGraph:
    """A graph without optional ops other than transfers to the host.

    Attributes:
        ops: for each op of its program, the op of the problem.
        order: the original executions, as its ops.
        copies_of: for each tensor of the problem, the tensors of the graph that represent it.
        ids: for each of its ops, the op of the problem's graph.
        tensors: for each of its tensors, the tensor of the problem's graph.
    """

    graph: Graph
    ops: tuple[int, ...]
    order: tuple[int, ...]
    copies_of: Mapping[int, Sequence[int]]
    ids: tuple[int, ...]
    tensors: tuple[int, ...]

    def find_only(self, t: int) -> int | None:
        """Return the tensor that represents t of the problem, None if there are several or none."""
        found = self.copies_of.get(t, ())
        return found[0] if len(found) == 1 else None

    def schedule_of_whole(self, problem: Problem, schedule: Schedule) -> Schedule:
        """Return a schedule of this graph as one of the problem's graph: a tensor is freed with its last representative."""
        live: dict[int, set[int]] = {}
        steps: list[Step] = []
        for step in schedule.steps:
            if isinstance(step, Compute):
                for t in self.graph.ops[step.op].outputs:
                    live.setdefault(self.tensors[t], set()).add(t)
                steps.append(Compute(self.ids[step.op]))
                continue
            of_whole = self.tensors[step.tensor]
            live[of_whole].discard(step.tensor)
            if not live[of_whole] and of_whole not in problem.graph.kept:
                steps.append(Free(of_whole))
        return Schedule(tuple(steps))


def build_plain_graph(problem: Problem, computed: Sequence[int]) -> PlainGraph:
    """Return the plain graph of a valid order of executions."""
    draft = _PlainGraphBuilder(problem)
    number: dict[int, int] = {}
    for op in computed:
        if op in number:
            draft.add_recomputation(number[op])
        else:
            number[op] = draft.add(op)
    ops = tuple(number)
    graph = draft.build_graph()
    order = tuple(number[op] for op in computed)
    return PlainGraph(graph, ops, order, draft.copies_of, tuple(draft.ids), tuple(draft.whole))


@dataclass(slots=True)
class _PlainGraphBuilder:
    """A builder of a plain graph.

    Attributes:
        now: for each tensor of the problem the one that currently represents it.
        made: for each op its outputs, as tensors of the problem and of this graph.
        whole, ids: for each tensor and op its id in the problem's graph.
    """

    problem: Problem
    ops: list[Op] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)
    now: dict[int, int] = field(default_factory=dict)
    made: list[tuple[tuple[int, int], ...]] = field(default_factory=list)
    copies_of: dict[int, list[int]] = field(default_factory=dict)
    whole: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for t in self.problem.graph.tensors:
            if t.static:
                self.now[t.id] = self.add_tensor(t, ())

    def add_tensor(self, tensor: Tensor, producers: tuple[int, ...]) -> int:
        """Add a tensor that represents `tensor` of the problem's graph and return its id."""
        number = len(self.tensors)
        name = f"{tensor.name}#{number}"
        if tensor.pool not in {DEVICE, HOST}:
            tensor = replace(tensor, pool=DEVICE, size_bytes=0)
        self.tensors.append(replace(tensor, id=number, name=name, producers=producers, view_of=None, held_for=None))
        self.whole.append(tensor.id)
        return number

    def put(self, op: Op, inputs: tuple[int, ...], outputs: tuple[int, ...], **changes: object) -> None:
        """Add an op that represents `op` of the problem's graph."""
        number = len(self.ops)
        name = f"{op.name}#{number}"
        self.ops.append(replace(op, id=number, name=name, inputs=inputs, outputs=outputs, **changes))  # type: ignore[arg-type]
        self.ids.append(op.id)

    def add(self, i: int) -> int:
        """Add op i of the problem as an op of the program and return its id."""
        graph, number = self.problem.graph, len(self.ops)
        op = graph.ops[self.problem.places.ids[i]]
        inputs, mutates = tuple(self.now[t] for t in op.inputs), tuple(self.now[t] for t in op.mutates)
        outputs = tuple((t, self.add_tensor(graph.tensors[t], (number,))) for t in op.outputs)
        recomputable = all(graph.ops[p].recomputable for p in (*op.replaces, op.id))
        before = self.ops[-1].phase if self.ops else Phase.FORWARD
        phase = max(before, op.phase, key=lambda phase: phase.place)
        choice = {"optional": False, "replaces": (), "differs": "", "uses": ()}  # executed ops are part of the program
        over = tuple((dict(outputs)[o], self.now[t]) for o, t in op.overwrites)
        changes = {"mutates": mutates, "recomputable": recomputable, "phase": phase, "overwrites": over, **choice}
        if op.stream != COMPUTE:
            lent_bytes = get_workspace_bytes(self.problem.whole.pools[0], op)
            changes |= {"stream": COMPUTE, "time_s": 0.0, "workspace_bytes": lent_bytes}
        self.put(op, inputs, tuple(t for _, t in outputs), **changes)
        self.made.append(outputs)
        for t, of_op in outputs:
            self.copies_of.setdefault(t, []).append(of_op)
            if t in graph.kept and t not in self.now:
                self.kept.add(of_op)
                self.now[t] = of_op
        self.add_recomputation(number)
        return number

    def add_recomputation(self, number: int) -> None:
        """Record a recomputation; kept tensors stay as first produced."""
        self.now.update((t, of_op) for t, of_op in self.made[number] if t not in self.problem.graph.kept)

    def build_graph(self) -> Graph:
        """Return the graph, with transfers to the host of tensors that have one representative."""
        whole = self.problem.whole
        for t, transfers in self.problem.round_trips.items():
            if len(self.copies_of.get(t, ())) == 1:
                (here,) = self.copies_of[t]
                out = len(self.ops)
                on_host = self.add_tensor(whole.tensors[transfers.host_tensor], (out,))
                self.put(whole.ops[transfers.out.op], (here,), (on_host,))
                self.put(whole.ops[transfers.back.op], (on_host,), (here,))
                self.tensors[here] = replace(self.tensors[here], producers=(*self.tensors[here].producers, out + 1))
        pools = tuple(pool for pool in whole.pools if pool.name in {DEVICE, HOST})
        return Graph(tuple(self.ops), tuple(self.tensors), frozenset(self.kept), whole.provenance, pools)
