"""Compilation of a schedule to the two passes that run it.

The passes contain the calls and the frees of the schedule in its order. The forward pass ends with the first execution of its
last op. Tensors that are alive then and not returned, and copies under way, are passed to the backward pass in a list. The
backward pass empties the list first, so that only its own variables keep tensors in memory.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from graphs.ir import Graph
from graphs.schedule import Compute, Schedule, Step, boundary
from planner.passes.builder import PassBuilder
from planner.passes.program import Call, Program, Ref
from planner.runtime.channels import Channels
from planner.runtime.copying import CopyingWriter
from planner.runtime.step_lines import StepLines

# forward(static) -> (loss, extras, saved); backward(static, saved) -> gradients
Forward = Callable[[Sequence[Any]], tuple[Any, tuple[Any, ...], list[Any]]]
Backward = Callable[[Sequence[Any], list[Any]], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Code:
    """The compiled step.

    Attributes:
        forward, backward: the two passes; `static` are the tensors of ``Program.sources``, in order.
        backward_reads: for each source, True if the backward pass reads it.
        saved: ids of the tensors in the list that the forward pass saves.
        returned: positions in that list of tensors that the caller gets too, and may overwrite.
        source: source of both passes, for display.
        lines: steps of the lines of the passes.
    """

    forward: Forward
    backward: Backward
    backward_reads: tuple[bool, ...]
    saved: tuple[int, ...]
    returned: tuple[int, ...]
    source: str
    lines: StepLines


def compile_schedule(
    graph: Graph,
    program: Program,
    schedule: Schedule,
    channels: Channels | None = None,
    *,
    tick: Callable[[int], None] | None = None,
    static_given_up: bool = False,
) -> Code:
    """Compile `schedule`, which must be valid on `graph` (``simulate``), with transfers by `channels` if it has any.

    Args:
        tick: called with the id of each op after its execution.
        static_given_up: the passes empty the lists of static tensors too, and free these after they are read for the last time.
    """
    cut = boundary(graph, schedule)
    writer = CopyingWriter(graph, program, repeated=repeated(graph, program, schedule), tick=tick)
    halves = schedule.steps[:cut], schedule.steps[cut:]
    return assemble(writer, halves, names={"channels": channels}, static_given_up=static_given_up)


def repeated(graph: Graph, program: Program, schedule: Schedule) -> set[int]:
    """Return the ops that are executed more than once, or whose random numbers are drawn again by another op."""
    times = Counter(step.op for step in schedule.steps if isinstance(step, Compute))
    drawn = {calls.random_state: op for op, calls in enumerate(program.calls)}
    redrawn = {drawn[t] for op in times for t in graph.ops[op].inputs if t in drawn and drawn[t] != op}
    return redrawn | {op for op, count in times.items() if count > 1}


def assemble(
    writer: CopyingWriter,
    halves: tuple[Sequence[Step], Sequence[Step]],
    *,
    names: Mapping[str, object] = MappingProxyType({}),
    static_given_up: bool = False,
) -> Code:
    """Return both passes as `writer` writes them; `halves` are their steps.

    Args:
        names: names of objects in the source.
        static_given_up: as in ``compile_schedule``.
    """
    graph, program = writer.graph, writer.program
    static = [source.tensor for source in program.sources]
    title = f"schedule of {graph.fingerprint}, {sum(map(len, halves))} steps"

    first = PassBuilder(program, names)
    first.tensor_list("static", static, emptied=static_given_up)
    writer.write(first, halves[0])
    later = {t for step in halves[1] if isinstance(step, Compute) for t in graph.ops[step.op].inputs}
    alive = [t for t in writer.live if t not in graph.kept or t in later]
    # A saved output would keep itself alive through its own backward pass: an alias is saved, if any.
    saved = [Call(torch.ops.aten.detach.default, (Ref(t),)) if t in graph.kept else Ref(t) for t in alive]
    copies = writer.copies
    returned = (program.loss, tuple(program.extras), [*saved, *copies])
    if static_given_up:
        first.free_read(static, returned)
    forward = first.finish(returned, title)

    second = PassBuilder(program, names)
    second.tensor_list("static", static, emptied=static_given_up)
    writer.end_forward()
    writer.take_over(second.tensor_list("saved", alive, [copy.name for copy in copies], emptied=True))
    writer.write(second, halves[1])
    gradients = tuple(gradient for _, gradient in program.gradients)
    if static_given_up:
        second.free_read(static, gradients)
    backward, read = second.finish(gradients, title), second.read

    return Code(
        forward.run,
        backward.run,
        backward_reads=tuple(f"t{tensor}" in read for tensor in static),
        saved=tuple(alive),
        returned=tuple(i for i, t in enumerate(alive) if t in graph.kept),
        source=f"{forward.module.code}\n{backward.module.code}",
        lines=StepLines(Schedule((*halves[0], *halves[1])), {**forward.lines, **backward.lines}),
    )
