"""Schedules: the executions and frees of a step in order, the common result of all methods."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.graphs.checks import check_plain
from planner.graphs.errors import ScheduleError
from planner.graphs.ir import Graph, Phase
from planner.graphs.pools import DEVICE

_SHOWN_STEPS = 20  # in the representation of a schedule


@dataclass(frozen=True, slots=True)
class Compute:
    """Execution of op `op`. Outputs that are already in memory are produced a second time and dropped."""

    op: int


@dataclass(frozen=True, slots=True)
class Free:
    """Release of tensor `tensor`."""

    tensor: int


Step = Compute | Free


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps in order of execution."""

    steps: tuple[Step, ...]

    def __repr__(self) -> str:
        steps = repr(self.steps) if len(self.steps) <= _SHOWN_STEPS else f"{len(self.steps):,} steps"
        return f"Schedule({steps})"

    @property
    def computed(self) -> tuple[int, ...]:
        """Op ids in order of execution, including recomputations."""
        return tuple(step.op for step in self.steps if isinstance(step, Compute))


def schedule_of(graph: Graph, computed: Sequence[int], held: Mapping[int, Collection[int]] | None = None) -> Schedule:
    """Return the schedule that executes `computed` in this order and keeps every tensor in memory as briefly as possible.

    A tensor is freed after its last use before its next computation or the end; kept tensors are never freed.

    Args:
        computed: op ids in order of execution, including recomputations.
        held: by position in `computed`, tensors in memory that stay until the op there is done, as if it read them.

    Raises:
        ScheduleError: an op id that is not in the graph.
    """
    for op in computed:
        if not 0 <= op < len(graph.ops):
            raise ScheduleError(f"the schedule names op {op}, but the graph has {len(graph.ops)} ops")
    steps: list[Step] = []
    # Walking backwards, a tensor is wanted between a reader and the computation before it.
    wanted = set(graph.kept)
    first = {t: position for position in range(len(computed) - 1, -1, -1) for t in graph.ops[computed[position]].outputs}
    for position in range(len(computed) - 1, -1, -1):
        node = graph.ops[computed[position]]
        stays = held.get(position, ()) if held else ()
        used = dict.fromkeys((*node.inputs, *node.outputs, *stays)) if stays else (*node.inputs, *node.outputs)
        dies = [t for t in used if not graph.tensors[t].static and t not in wanted]
        steps.extend(Free(t) for t in reversed(dies))
        steps.append(Compute(node.id))
        wanted.difference_update(t for t in node.outputs if t not in graph.kept or first[t] == position)
        wanted.update(node.inputs)
        wanted.update(stays)
    return Schedule(tuple(reversed(steps)))


def keep_everything(graph: Graph) -> Schedule:
    """Return the schedule without recomputation: every op once in program order, every tensor freed after its last use.

    Raises:
        GraphError: the graph is not plain.
    """
    check_plain(graph)
    return schedule_of(graph, range(len(graph.ops)))


def find_boundary(graph: Graph, schedule: Schedule) -> int:
    """Return the number of steps of the forward pass: until each forward op is executed or replaced, and the frees after it."""
    pending = {op.id for op in graph.program if op.phase is Phase.FORWARD}
    steps = schedule.steps
    index = 0
    while pending:
        step = steps[index]
        if isinstance(step, Compute):
            pending.difference_update((step.op, *graph.ops[step.op].replaces))
        index += 1
    while index < len(steps) and isinstance(steps[index], Free):
        index += 1
    return index


def live_after(graph: Graph, steps: Iterable[Step]) -> dict[int, int]:
    """Return the tensors in memory after the first `steps` of a schedule, each with the index of the step that produced it."""
    live: dict[int, int] = {}
    for index, step in enumerate(steps):
        if isinstance(step, Compute):
            for t in graph.ops[step.op].outputs:
                live.setdefault(t, index)
        else:
            live.pop(step.tensor, None)
    return live


def count_kept_bytes(graph: Graph, schedule: Schedule, pool: str = DEVICE) -> int:
    """Return the bytes in `pool` between the forward and the backward pass, without static memory."""
    live = live_after(graph, schedule.steps[: find_boundary(graph, schedule)])
    return sum(graph.tensors[t].size_bytes for t in live if graph.tensors[t].pool == pool)
