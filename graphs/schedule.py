"""What to do, step by step: the one form in which every method's answer ends."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from graphs.checks import check_plain
from graphs.errors import ScheduleError
from graphs.ir import Graph, Phase


@dataclass(frozen=True, slots=True)
class Compute:
    """Execute op `op`. Outputs that are in memory already are made a second time and dropped."""

    op: int


@dataclass(frozen=True, slots=True)
class Free:
    """Release tensor `tensor`."""

    tensor: int


Step = Compute | Free


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps in order of execution."""

    steps: tuple[Step, ...]

    @property
    def computed(self) -> tuple[int, ...]:
        """Op ids in order of execution, recomputations included."""
        return tuple(step.op for step in self.steps if isinstance(step, Compute))


def schedule_of(graph: Graph, computed: Sequence[int], held: Mapping[int, Collection[int]] | None = None) -> Schedule:
    """The schedule that executes `computed` in this order and holds every tensor as briefly as possible.

    A tensor is freed after its last use before its next computation (or the end); kept tensors never.

    Args:
        computed: op ids in order of execution, recomputations included.
        held: by position in `computed` tensors that are there and stay until the op there is done, as if it read
            them.

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
        GraphError: the graph has choices: what keeping everything is depends on them.
    """
    check_plain(graph)
    return schedule_of(graph, range(len(graph.ops)))


def boundary(graph: Graph, schedule: Schedule) -> int:
    """Number of steps of the forward pass: up to the last first execution of a forward op, itself or stood for, and frees."""
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
    """Return the tensors that the first `steps` of a schedule leave in memory, each with the index of the step that made it."""
    live: dict[int, int] = {}
    for index, step in enumerate(steps):
        if isinstance(step, Compute):
            for t in graph.ops[step.op].outputs:
                live.setdefault(t, index)
        else:
            live.pop(step.tensor, None)
    return live
