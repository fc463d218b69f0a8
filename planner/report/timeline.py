"""A plan followed on its graph step by step: what is in memory when, and what is computed again."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

from graphs.ir import Graph, Op, Phase, Tensor
from graphs.plan import Plan
from graphs.schedule import Compute, Free
from graphs.simulate import Simulation
from planner.plan_check import check_plan, refuse_choices


@dataclass(frozen=True, slots=True)
class Execution:
    """One execution of an op.

    Attributes:
        op: what is executed.
        start_s: seconds since the step began.
        memory_bytes: in use during it, static bytes included.
        again: it was executed before.
    """

    op: Op
    start_s: float
    memory_bytes: int
    again: bool


@dataclass(frozen=True, slots=True)
class Burst:
    """Recomputations that follow each other.

    Attributes:
        start_s: seconds since the step began.
        time_s, ops: of all of them.
        modules: blocks they belong to, in order of appearance.
        reader: the op that is executed for the first time behind them; None at the end of the step.
    """

    start_s: float
    time_s: float
    ops: int
    modules: tuple[str, ...]
    reader: Op | None


@dataclass(frozen=True, slots=True)
class ModuleCost:
    """What is computed again in one block: how often which targets, and how long it takes."""

    module: str
    ops: int
    time_s: float
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor that is in memory at the peak, the op that made it, and when."""

    tensor: Tensor
    op: Op
    since_s: float


@dataclass(frozen=True)
class Timeline:
    """`plan` on `graph`.

    Attributes:
        simulation: what the judge says of the schedule.

    Raises:
        MismatchError: the plan is for another graph, or says what its schedule does not do.
        ScheduleError: the plan's schedule does not run on the graph.
    """

    graph: Graph
    plan: Plan
    simulation: Simulation = field(init=False)

    def __post_init__(self) -> None:
        refuse_choices(self.plan, "shown")
        object.__setattr__(self, "simulation", check_plan(self.graph, self.plan))

    @cached_property
    def executions(self) -> tuple[Execution, ...]:
        """Every execution, in order."""
        done: set[int] = set()
        now, found = 0.0, []
        for step, memory in zip(self.plan.schedule.steps, self.simulation.memory_bytes, strict=True):
            if isinstance(step, Compute):
                op = self.graph.ops[step.op]
                found.append(Execution(op, now, memory, op.id in done))
                done.add(op.id)
                now += op.time_s
        return tuple(found)

    @cached_property
    def time_s(self) -> float:
        """Seconds of the whole step."""
        return self.simulation.time_s

    @cached_property
    def backward_s(self) -> float:
        """Seconds until the first op of the backward pass is executed."""
        return next((e.start_s for e in self.executions if e.op.phase is not Phase.FORWARD), self.time_s)

    @cached_property
    def peak(self) -> Execution:
        """The first execution at which memory is at its peak."""
        return max(self.executions, key=lambda execution: execution.memory_bytes)

    @cached_property
    def held(self) -> tuple[Held, ...]:
        """What the step itself has in memory at the peak, outputs included, largest first."""
        live: dict[int, float] = {}
        executions = iter(self.executions)
        for step in self.plan.schedule.steps[: self.simulation.peak_step + 1]:
            match step:
                case Compute():
                    execution = next(executions)
                    for t in execution.op.outputs:
                        live.setdefault(t, execution.start_s)
                case Free(tensor):
                    del live[tensor]
        tensors = [(self.graph.tensors[t], since_s) for t, since_s in live.items()]
        held = [Held(t, self.graph.ops[t.producers[0]], since_s) for t, since_s in tensors if not t.static]
        return tuple(sorted(held, key=lambda one: -one.tensor.size_bytes))

    @cached_property
    def bursts(self) -> tuple[Burst, ...]:
        """What is computed again, in order of time."""
        return tuple(self._bursts())

    def _bursts(self) -> Iterator[Burst]:
        groups = [(again, list(group)) for again, group in groupby(self.executions, key=lambda execution: execution.again)]
        for (again, group), following in zip(groups, [*groups[1:], (False, [])], strict=True):
            if again:
                yield Burst(
                    start_s=group[0].start_s,
                    time_s=sum(execution.op.time_s for execution in group),
                    ops=len(group),
                    modules=tuple(dict.fromkeys(block(execution.op.module) for execution in group)),
                    reader=following[1][0].op if following[1] else None,
                )

    @cached_property
    def module_costs(self) -> tuple[ModuleCost, ...]:
        """What recomputation costs, by block, the dearest first."""
        again: dict[str, list[Op]] = {}
        for execution in self.executions:
            if execution.again:
                again.setdefault(block(execution.op.module), []).append(execution.op)
        costs = (ModuleCost(name, len(ops), sum(op.time_s for op in ops), _targets(ops)) for name, ops in again.items())
        return tuple(sorted(costs, key=lambda cost: -cost.time_s))


def block(module: str) -> str:
    """The part of a model that a module belongs to: its path up to the first number, ``h.3`` of ``h.3.attn.out``."""
    parts = module.removeprefix("model.").split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else parts[0]


def _targets(ops: Iterable[Op]) -> tuple[str, ...]:
    """The names of what is called, the most frequent first."""
    return tuple(name for name, _ in Counter(op.target.removeprefix("aten.").split(".")[0] for op in ops).most_common())
