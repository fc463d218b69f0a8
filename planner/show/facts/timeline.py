"""A plan followed on its graph step by step: memory over time, and recomputations.

Time, memory and recomputations are taken from the judge, not computed anew: what is shown is what was judged.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise

from planner.graphs.clocks import Clocks, find_passages, run_clocks
from planner.graphs.ir import Graph, Op, Phase, Tensor
from planner.graphs.options import extract_eager_program
from planner.graphs.pools import COMPUTE, DEVICE
from planner.graphs.schedule import Compute, keep_everything, live_after
from planner.graphs.simulate import Simulation, simulate
from planner.plans.plan_check import check_plan
from planner.plans.record import PlanRecord


@dataclass(frozen=True, slots=True)
class Execution:
    """One execution of an op.

    Attributes:
        step: index in the schedule.
        start_s, end_s: seconds since the step began.
        memory_bytes: bytes in use on the device during it, static memory included.
        again: True if the op, or one that it replaces, was executed before.
    """

    op: Op
    step: int
    start_s: float
    end_s: float
    memory_bytes: int
    again: bool


@dataclass(frozen=True, slots=True)
class Burst:
    """A run of consecutive recomputations.

    Attributes:
        start_s: seconds since the step began.
        time_s, ops: total seconds, and number of ops.
        modules: blocks they belong to, in order of appearance.
        reader: the op that is executed for the first time after them; None at the end of the step.
    """

    start_s: float
    time_s: float
    ops: int
    modules: tuple[str, ...]
    reader: Op | None


@dataclass(frozen=True, slots=True)
class ModuleCost:
    """The recomputations of one block.

    Attributes:
        ops, time_s: number of recomputed ops, and their total seconds.
        saved_bytes: of the tensors that they recompute, the size of those that are in memory at the peak of keeping everything,
            and not when the plan executes the op of that peak.
        targets: targets of the ops, the most frequent first.
    """

    module: str
    ops: int
    time_s: float
    saved_bytes: int
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PeakTensor:
    """A tensor in memory at the peak, the op of the program that makes it, and since when it is there."""

    tensor: Tensor
    op: Op
    since_s: float


@dataclass(frozen=True)
class Timeline:
    """The timeline of `plan` on `graph`, which has the options that the plan was solved with.

    Attributes:
        simulation: the judge's simulation of the schedule.

    Raises:
        MismatchError: the plan is for another graph, or disagrees with its schedule.
    """

    graph: Graph
    plan: PlanRecord
    simulation: Simulation = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "simulation", check_plan(self.graph, self.plan))

    @cached_property
    def clocks(self) -> Clocks:
        """The start and end of each step."""
        return run_clocks(self.graph, self.plan.schedule)

    @cached_property
    def executions(self) -> tuple[Execution, ...]:
        """Every execution, in the order of issue."""
        done: set[int] = set()
        found = []
        for index, (step, memory) in enumerate(zip(self.plan.schedule.steps, self.simulation.memory_bytes, strict=True)):
            if isinstance(step, Compute):
                op = self.graph.ops[step.op]
                places = op.replaces if op.optional else (op.id,)
                again = bool(places) and done.issuperset(places)
                done.update(places)
                found.append(Execution(op, index, self.clocks.starts_s[index], self.clocks.ends_s[index], memory, again))
        return tuple(found)

    @cached_property
    def computed(self) -> tuple[Execution, ...]:
        """The executions on the computation stream."""
        return tuple(execution for execution in self.executions if execution.op.stream == COMPUTE)

    @cached_property
    def time_s(self) -> float:
        """The duration of the step in seconds."""
        return self.simulation.time_s

    @cached_property
    def reached_s(self) -> tuple[float, ...]:
        """For each step, the time at which the computation reaches it; device memory is allocated in this order."""
        return tuple(start_s for start_s, _ in find_passages(self.graph, self.plan.schedule, self.clocks, COMPUTE))

    @cached_property
    def backward_s(self) -> float:
        """Seconds until the first op of the backward pass is executed."""
        return next((e.start_s for e in self.executions if e.op.phase is not Phase.FORWARD), self.time_s)

    @cached_property
    def peak(self) -> Execution:
        """The first execution at which memory is at its peak."""
        return max(self.executions, key=lambda execution: execution.memory_bytes)

    @cached_property
    def held(self) -> tuple[PeakTensor, ...]:
        """The tensors of the step in memory at the peak, outputs included, largest first."""
        live = live_after(self.graph, self.plan.schedule.steps[: self.simulation.peak_step + 1])
        made = ((self.graph.tensors[t], step) for t, step in live.items())
        held = [PeakTensor(t, self.graph.ops[t.producers[0]], self.reached_s[step]) for t, step in made if t.pool == DEVICE]
        return tuple(sorted(held, key=lambda one: -one.tensor.size_bytes))

    @cached_property
    def bursts(self) -> tuple[Burst, ...]:
        """The recomputations, in order of time."""
        return tuple(self._iterate_bursts())

    def _iterate_bursts(self) -> Iterator[Burst]:
        groups = [(again, list(group)) for again, group in groupby(self.computed, key=lambda execution: execution.again)]
        for (again, group), (_, following) in pairwise([*groups, (False, [])]):
            if again:
                yield Burst(
                    start_s=group[0].start_s,
                    time_s=sum(execution.op.time_s for execution in group),
                    ops=len(group),
                    modules=tuple(dict.fromkeys(block(execution.op.module) for execution in group)),
                    reader=following[0].op if following else None,
                )

    @cached_property
    def module_costs(self) -> tuple[ModuleCost, ...]:
        """The cost of recomputation by block, the most expensive first."""
        again: dict[str, list[Op]] = {}
        for execution in self.computed:
            if execution.again:
                again.setdefault(block(execution.op.module), []).append(execution.op)
        saved = {name: {t for op in ops for t in op.outputs} & self.dropped for name, ops in again.items()}
        sizes = {name: sum(self.graph.tensors[t].size_bytes for t in tensors) for name, tensors in saved.items()}
        costs = (
            ModuleCost(name, len(ops), sum(op.time_s for op in ops), sizes[name], _list_targets(ops))
            for name, ops in again.items()
        )
        return tuple(sorted(costs, key=lambda cost: -cost.time_s))

    @cached_property
    def dropped(self) -> frozenset[int]:
        """The tensors in memory at the peak of keeping everything, and not when the plan first executes the op of that peak."""
        program = extract_eager_program(self.graph)
        kept = keep_everything(program)
        until = kept.steps[: simulate(program, kept).peak_step + 1]
        peak_op = next(step.op for step in reversed(until) if isinstance(step, Compute))
        same = next(e for e in self.executions if peak_op in (e.op.replaces if e.op.optional else (e.op.id,)))
        held = live_after(self.graph, self.plan.schedule.steps[: same.step + 1])
        return frozenset(live_after(program, until).keys() - held.keys())


def block(module: str) -> str:
    """Return the block that a module belongs to: its path up to the first number, ``h.3`` for ``h.3.attn.out``."""
    parts = module.removeprefix("model.").split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else parts[0]


def get_module(op: Op) -> str:
    """Return the module that an op was called in; its target if the module is unknown."""
    return op.module.removeprefix("model.") or op.target


def _list_targets(ops: Iterable[Op]) -> tuple[str, ...]:
    """Return the names of the ops' targets, the most frequent first."""
    return tuple(name for name, _ in Counter(op.target.removeprefix("aten.").split(".")[0] for op in ops).most_common())
