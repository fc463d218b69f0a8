"""From a schedule to straight-line Python: one function for the forward pass, one for the backward pass.

The functions contain the calls of the schedule in its order and a ``del`` exactly where it frees.
The forward pass ends with the first execution of its last op; what is alive then and not returned,
and the copies that may be under way, are handed to the backward pass in a list, which the backward
pass empties before it begins, so that nothing but its own variables keeps a tensor in memory.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphs.capture.program import Program, load, variable
from graphs.ir import Graph, Phase
from graphs.schedule import Compute, Free, Schedule
from planner.runtime.channels import Channels
from planner.runtime.copying import CopyingWriter

# forward(static) -> (loss, extras, saved); backward(static, saved) -> gradients
Forward = Callable[[Sequence[Any]], tuple[Any, tuple[Any, ...], list[Any]]]
Backward = Callable[[Sequence[Any], list[Any]], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Code:
    """The compiled step.

    Attributes:
        forward, backward: the two passes; `static` are the tensors of ``Program.sources``, in order.
        backward_reads: for each source whether the backward pass reads it.
        saved: ids of the tensors in the list of those that the forward pass saves.
        returned: positions in that list of those that the caller gets too, and may write to.
        source: of both functions, for reading.
    """

    forward: Forward
    backward: Backward
    backward_reads: tuple[bool, ...]
    saved: tuple[int, ...]
    returned: tuple[int, ...]
    source: str


def compile_schedule(graph: Graph, program: Program, schedule: Schedule, channels: Channels | None = None) -> Code:
    """Compile `schedule`, which must be valid on `graph` (``simulate``), and copies by `channels`, if at all."""
    cut = boundary(graph, schedule)
    writer = CopyingWriter(graph, program, repeated=_repeated(graph, program, schedule))
    forward = writer.write(schedule.steps[:cut])

    later = {t for step in schedule.steps[cut:] if isinstance(step, Compute) for t in graph.ops[step.op].inputs}
    alive = [t for t in writer.live if t not in graph.kept or t in later]
    # An output must not hold itself through its own backward pass: it is saved as an alias, if at all.
    returned = tuple(i for i, t in enumerate(alive) if t in graph.kept)
    names = [*map(variable, alive), *writer.copies]
    saved = ", ".join([*(variable(t) + (".detach()" if t in graph.kept else "") for t in alive), *writer.copies])
    extras = "".join(f"{extra}.detach(), " for extra in program.extras)
    forward.append(f"return {program.loss}, ({extras}), [{saved}]")

    restore = [f"{', '.join(names)}, = saved"] if names else []
    gradients = "".join(f"{gradient}, " for _, gradient in program.gradients)
    backward = [*restore, "saved.clear()", *writer.write(schedule.steps[cut:]), f"return ({gradients})"]

    source = "\n\n".join(
        (
            program.define("forward", "static", forward),
            program.define("backward", "static, saved", backward),
        )
    )
    if channels is not None:
        program = replace(program, namespace={**program.namespace, "channels": channels})
    functions = load(program, source, f"schedule of {graph.fingerprint}, {len(schedule.steps)} steps")
    read = {name for line in backward for name in re.findall(r"\bt\d+\b", line)}
    reads = tuple(variable(source.tensor) in read for source in program.sources)
    return Code(functions["forward"], functions["backward"], reads, tuple(alive), returned, source)


def _repeated(graph: Graph, program: Program, schedule: Schedule) -> set[int]:
    """Ops that are executed more than once, or whose random numbers another op draws again."""
    times = Counter(step.op for step in schedule.steps if isinstance(step, Compute))
    drawn = {call.random_state: op for op, call in enumerate(program.calls)}
    redrawn = {drawn[t] for op in times for t in graph.ops[op].inputs if t in drawn and drawn[t] != op}
    return redrawn | {op for op, count in times.items() if count > 1}


def boundary(graph: Graph, schedule: Schedule) -> int:
    """Number of steps of the forward pass: up to the last first execution of a forward op, itself or stood for, and frees."""
    pending = {op.id for op in graph.program if op.phase is Phase.FORWARD}
    steps = schedule.steps
    index = 0
    while pending:
        step = steps[index]
        if isinstance(step, Compute):
            pending.difference_update((step.op, *graph.ops[step.op].stands_for))
        index += 1
    while index < len(steps) and isinstance(steps[index], Free):
        index += 1
    return index
