"""A plan as a trace that chrome://tracing and Perfetto open: when each op runs, and the memory at that moment."""

import json
from collections.abc import Iterator

from planner.graphs.ir import Graph, Phase
from planner.graphs.pools import COMPUTE, DEVICE, Pool
from planner.show.facts.addresses import StepAddresses
from planner.show.facts.columns import count_left_bytes, list_stretches
from planner.show.facts.streams import IdleTime, list_waits
from planner.show.facts.timeline import Execution, Timeline
from planner.show.report.describe import name_end_of_wait

_PROCESS = 1
_ROWS = {Phase.FORWARD: 1, Phase.BACKWARD: 2, Phase.OPTIMIZER: 3}
_AGAIN_ROW = 4
_WAITING_ROW = 5


def build_chrome_trace(timeline: Timeline, reserved: StepAddresses | None) -> str:
    """Return the trace as JSON in the Trace Event Format: complete events (X), counters (C), buffers (b, e) and names (M), in
    microseconds.

    The computation has a row for each phase, one for recomputed ops and one for waits; each other stream has a row, and each pool
    a counter. `reserved` addresses (``planner.show.facts.addresses``) are shown on CUDA.
    """
    graph = timeline.graph
    rows = _name_rows(graph)
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": _PROCESS, "name": "process_name", "args": {"name": "planned step"}},
        *({"ph": "M", "pid": _PROCESS, "tid": row, "name": "thread_name", "args": {"name": name}} for row, name in rows.items()),
        *(_run(execution, graph) for execution in timeline.executions),
        *(_wait(wait) for wait in list_waits(timeline, COMPUTE)),
    ]
    for pool in graph.pools:
        events += _iterate_memory_events(timeline, pool)
    if reserved is not None:
        events += _iterate_reserved_events(timeline, reserved)
    plan = timeline.plan
    budget = {
        "budget_bytes": plan.budget_bytes,
        "memory": str(plan.memory),
        "peak_bytes": timeline.peak.memory_bytes,
        "reserved_bytes": plan.reserved_bytes,
    }
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": budget})


def _name_rows(graph: Graph) -> dict[int, str]:
    computed = {**{row: str(phase) for phase, row in _ROWS.items()}, _AGAIN_ROW: "recomputed"}
    if len(graph.streams) == 1:
        return computed
    computed[_WAITING_ROW] = "waiting"
    return {
        **{row: f"{COMPUTE}: {name}" for row, name in computed.items()},
        **dict(enumerate(graph.streams[1:], start=_WAITING_ROW + 1)),
    }


def _run(execution: Execution, graph: Graph) -> dict[str, object]:
    op = execution.op
    said: dict[str, object] = {"target": op.target, "module": op.module, "memory_bytes": execution.memory_bytes}
    if op.stream == COMPUTE:
        row = _AGAIN_ROW if execution.again else _ROWS[op.phase]
    else:
        row = _WAITING_ROW + graph.streams.index(op.stream)
        said["made_bytes"] = sum(graph.tensors[t].size_bytes for t in op.outputs)
    return _build_event(row, op.name, str(op.phase), execution.start_s, op.time_s, said)


def _wait(wait: IdleTime) -> dict[str, object]:
    said: dict[str, object] = {"before": name_end_of_wait(wait)}
    return _build_event(_WAITING_ROW, f"waits for {wait.awaited.op.name}", "wait", wait.start_s, wait.time_s, said)


def _build_event(row: int, name: str, category: str, start_s: float, time_s: float, said: dict[str, object]) -> dict[str, object]:
    place = {"ph": "X", "pid": _PROCESS, "tid": row, "name": name, "cat": category}
    return {**place, "ts": start_s * 1e6, "dur": time_s * 1e6, "args": said}


def _iterate_reserved_events(timeline: Timeline, addresses: StepAddresses) -> Iterator[dict[str, object]]:
    """Yield the bytes that PyTorch reserves, and each buffer as an asynchronous event with its address."""
    times_s = (*timeline.reached_s, timeline.time_s)
    for time_s, size_bytes in zip(times_s, addresses.by_step, strict=False):
        yield {"ph": "C", "pid": _PROCESS, "name": "reserved", "ts": time_s * 1e6, "args": {"bytes": size_bytes}}
    for number, stay in enumerate(addresses.stays):
        one = {"pid": _PROCESS, "cat": "addresses", "name": stay.tensor or "workspace", "id": number}
        said = {"address": stay.address, "bytes": stay.size_bytes}
        yield {"ph": "b", **one, "ts": times_s[stay.first_step] * 1e6, "args": said}
        yield {"ph": "e", **one, "ts": times_s[stay.end_step] * 1e6}


def _iterate_memory_events(timeline: Timeline, pool: Pool) -> Iterator[dict[str, object]]:
    """Yield counter events: the bytes in `pool` over time, and at the end of the step."""
    held = ((stretch.start_s, stretch.size_bytes) for stretch in list_stretches(timeline, pool))
    counts = (*held, (timeline.time_s, count_left_bytes(timeline, pool)))
    name = "memory" if pool.name == DEVICE else f"memory of {pool.name}"
    for time_s, size_bytes in counts:
        yield {"ph": "C", "pid": _PROCESS, "name": name, "ts": time_s * 1e6, "args": {"bytes": size_bytes}}
