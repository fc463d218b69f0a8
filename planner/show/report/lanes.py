"""Bars on lanes for all that a plan does in addition to executing each op once: recomputations, transfers and waits."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from planner.graphs.ir import Op
from planner.graphs.pools import COMPUTE
from planner.graphs.units import format_bytes, format_seconds
from planner.show.facts.streams import list_waits
from planner.show.facts.timeline import Execution, Timeline, get_module
from planner.show.report.describe import format_name, name_end_of_wait

RECOMPUTED, WAITS = "recompute", "wait"


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar on a lane.

    Attributes:
        start_s, end_s: seconds since the step began.
        title, said: the op, and its facts.
        purpose: the op that it serves; "" if there is none.
        step: position in the schedule of an execution; None for a wait.
        reader_s: time at which the op that it serves begins.
    """

    lane: str
    start_s: float
    end_s: float
    title: str
    said: str
    purpose: str
    step: int | None
    reader_s: float | None


def list_bars(timeline: Timeline) -> tuple[Bar, ...]:
    """Return the bars of all lanes: recomputed ops, waits, and a lane for each other stream."""
    purposes = _find_purposes(timeline)
    found = [_build_execution_bar(timeline, execution, purposes) for execution in timeline.executions if _is_shown(execution)]
    return (*found, *_wait_bars(timeline))


def list_lanes(timeline: Timeline, found: Iterable[Bar]) -> tuple[str, ...]:
    """Return the names of the lanes that contain any of the bars `found`, from top to bottom."""
    busy = {bar.lane for bar in found}
    return tuple(lane for lane in (RECOMPUTED, WAITS, *map(format_name, timeline.graph.streams[1:])) if lane in busy)


def _is_shown(execution: Execution) -> bool:
    return execution.again or execution.op.stream != COMPUTE


def _find_purposes(timeline: Timeline) -> dict[int, Execution]:
    """Return the purpose of each execution on a lane, by step: the first execution on no lane that needs its outputs.

    The outputs may pass through other executions on lanes: the purpose of an offload is the op that reads the reloaded tensor.
    """
    found: dict[int, Execution] = {}
    readers: dict[int, Execution] = {}  # by tensor, its next reader
    for execution in reversed(timeline.executions):
        following = [readers.pop(t) for t in execution.op.outputs if t in readers]
        if following and _is_shown(execution):
            first = min(following, key=lambda reader: reader.step)
            found[execution.step] = found.get(first.step, first)
        for t in execution.op.inputs:
            readers[t] = execution
    return found


def _build_execution_bar(timeline: Timeline, execution: Execution, purposes: dict[int, Execution]) -> Bar:
    op, reader = execution.op, purposes.get(execution.step)
    made_bytes = sum(timeline.graph.tensors[t].size_bytes for t in op.outputs)
    facts = f"{format_bytes(made_bytes)} in {format_seconds(op.time_s)}"
    return Bar(
        lane=RECOMPUTED if op.stream == COMPUTE else format_name(op.stream),
        start_s=execution.start_s,
        end_s=execution.end_s,
        title=op.name,
        said=f"{facts}, {_format_module(op)}" if op.stream == COMPUTE else facts,
        purpose=""
        if reader is None
        else f"for {reader.op.name}, {_format_module(reader.op)}, at {format_seconds(reader.start_s)}",
        step=execution.step,
        reader_s=None if reader is None else reader.start_s,
    )


def _wait_bars(timeline: Timeline) -> Iterator[Bar]:
    for wait in list_waits(timeline, COMPUTE):
        title = f"waits for {wait.awaited.op.name}"
        before = f"before {name_end_of_wait(wait)}"
        yield Bar(WAITS, wait.start_s, wait.end_s, title, format_seconds(wait.time_s), before, None, None)


def _format_module(op: Op) -> str:
    return f"module {get_module(op)}" if op.module else op.target
