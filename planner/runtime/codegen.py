"""From a schedule to straight-line Python: one function for the forward pass, one for the backward pass.

The functions contain the calls of the schedule in its order and a ``del`` exactly where it frees.
The forward pass ends with the first execution of its last op; what is alive then and not returned,
and the copies that may be under way, are handed to the backward pass in a list, which the backward
pass empties before it begins, so that nothing but its own variables keeps a tensor in memory.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from graphs.ir import Graph
from graphs.schedule import Compute, Schedule, Step, boundary
from planner.capture.lowering.program import Program, file_of, load, variable
from planner.runtime.channels import Channels
from planner.runtime.copying import CopyingWriter
from planner.runtime.step_lines import StepLines, number_lines

# forward(static) -> (loss, extras, saved); backward(static, saved) -> gradients
Forward = Callable[[Sequence[Any]], tuple[Any, tuple[Any, ...], list[Any]]]
Backward = Callable[[Sequence[Any], list[Any]], tuple[Any, ...]]


_TICK = "tick"  # in the namespace of passes that are timed


@dataclass(frozen=True, slots=True)
class Code:
    """The compiled step.

    Attributes:
        forward, backward: the two passes; `static` are the tensors of ``Program.sources``, in order.
        backward_reads: for each source whether the backward pass reads it.
        saved: ids of the tensors in the list of those that the forward pass saves.
        returned: positions in that list of those that the caller gets too, and may write to.
        source: of both functions, for reading.
        lines: the steps of the lines of `source`.
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
    tick: Callable[[int], None] | None = None,
) -> Code:
    """Compile `schedule`, which must be valid on `graph` (``simulate``), and copies by `channels`, if at all.

    Args:
        tick: called behind each execution of an op, with its id.
    """
    cut = boundary(graph, schedule)
    writer = CopyingWriter(graph, program, repeated=repeated(graph, program, schedule))
    if channels is not None:
        program = replace(program, namespace={**program.namespace, "channels": channels})
    if tick is not None:
        program = replace(program, namespace={**program.namespace, _TICK: tick})
    return assemble(graph, program, writer, (schedule.steps[:cut], schedule.steps[cut:]), ticks=tick is not None)


def repeated(graph: Graph, program: Program, schedule: Schedule) -> set[int]:
    """Ops that are executed more than once, or whose random numbers another op draws again."""
    times = Counter(step.op for step in schedule.steps if isinstance(step, Compute))
    drawn = {call.random_state: op for op, call in enumerate(program.calls)}
    redrawn = {drawn[t] for op in times for t in graph.ops[op].inputs if t in drawn and drawn[t] != op}
    return redrawn | {op for op, count in times.items() if count > 1}


class PassWriter(Protocol):
    """Writes one pass after the other.

    Attributes:
        live: ids of the tensors in memory after the steps written so far.
        origins: as ``Writer.origins``.
        copies: variables of what else is handed to the next pass.
    """

    live: dict[int, None]
    origins: list[int | None]

    @property
    def copies(self) -> tuple[str, ...]: ...  # noqa: D102  # said above

    def write(self, steps: Iterable[Step]) -> list[str]:
        """The lines that do `steps`."""
        ...


def assemble(
    graph: Graph,
    program: Program,
    writer: PassWriter,
    halves: tuple[Sequence[Step], Sequence[Step]],
    *more: str,
    ticks: bool = False,
) -> Code:
    """Both passes, whose steps are `halves`, as `writer` writes them; `more` are names of their further parameters.

    Args:
        ticks: call the namespace's ``tick`` behind each execution of an op.
    """
    forward = writer.write(halves[0])
    forward_origins = writer.origins
    if ticks:
        forward, forward_origins = _with_ticks(forward, forward_origins, halves[0])
    later = {t for step in halves[1] if isinstance(step, Compute) for t in graph.ops[step.op].inputs}
    alive = [t for t in writer.live if t not in graph.kept or t in later]
    # An output must not hold itself through its own backward pass: it is saved as an alias, if at all.
    returned = tuple(i for i, t in enumerate(alive) if t in graph.kept)
    names = [*map(variable, alive), *writer.copies]
    saved = ", ".join([*(variable(t) + (".detach()" if t in graph.kept else "") for t in alive), *writer.copies])
    extras = "".join(f"{extra}.detach(), " for extra in program.extras)
    returns = f"return {program.loss}, ({extras}), [{saved}]"

    restore = [f"{', '.join(names)}, = saved"] if names else []
    gradients = "".join(f"{gradient}, " for _, gradient in program.gradients)
    begin = [*restore, "saved.clear()"]
    backward, backward_origins = writer.write(halves[1]), writer.origins
    if ticks:
        backward, backward_origins = _with_ticks(backward, backward_origins, halves[1])
    delivers = f"return ({gradients})"

    first = program.define("forward", ", ".join(("static", *more)), [*forward, returns])
    second = program.define("backward", ", ".join(("static", "saved", *more)), [*begin, *backward, delivers])
    steps = sum(map(len, halves))
    functions = load(program, f"{first}\n{second}", f"schedule of {graph.fingerprint}, {steps} steps")
    file, header = file_of(functions["forward"]), program.define("", "", []).count("\n")
    lines = number_lines(file, header + 1, forward, forward_origins, 0)
    backward_line = first.count("\n") + 1 + header + len(begin) + 1
    lines |= number_lines(file, backward_line, backward, backward_origins, len(halves[0]))
    read = {name for line in (*begin, *backward, delivers) for name in re.findall(r"\bt\d+\b", line)}
    reads = tuple(variable(source.tensor) in read for source in program.sources)
    executed = StepLines(Schedule((*halves[0], *halves[1])), lines)
    return Code(functions["forward"], functions["backward"], reads, tuple(alive), returned, f"{first}\n{second}", executed)


def _with_ticks(lines: Sequence[str], origins: Sequence[int | None], steps: Sequence[Step]) -> tuple[list[str], list[int | None]]:
    """Return the lines of a pass, and the steps that they are of, with a tick behind the last line of each execution."""
    ticked: list[tuple[str, int | None]] = []
    for i, (line, origin) in enumerate(zip(lines, origins, strict=True)):
        ticked.append((line, origin))
        if origin is not None and (i + 1 == len(lines) or origins[i + 1] != origin):
            step = steps[origin]
            ticked += [(f"{_TICK}({step.op})", origin)] if isinstance(step, Compute) else []
    return [line for line, _ in ticked], [origin for _, origin in ticked]
