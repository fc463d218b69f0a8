"""A plan as a trace that chrome://tracing and Perfetto open: when each op runs, and the memory at that moment."""

import json

from graphs.ir import Phase
from planner.report.timeline import Execution, Timeline

_PROCESS = 1
_ROWS = {Phase.FORWARD: 1, Phase.BACKWARD: 2, Phase.OPTIMIZER: 3}
_AGAIN_ROW = 4


def chrome_trace(timeline: Timeline) -> str:
    """The trace as JSON, in the Trace Event Format: complete events (X), counters (C) and names (M); microseconds."""
    rows = {**{row: str(phase) for phase, row in _ROWS.items()}, _AGAIN_ROW: "computed again"}
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": _PROCESS, "name": "process_name", "args": {"name": "planned step"}},
        *({"ph": "M", "pid": _PROCESS, "tid": row, "name": "thread_name", "args": {"name": name}} for row, name in rows.items()),
    ]
    for execution in timeline.executions:
        events += [_run(execution), _memory(execution.start_s, execution.memory_bytes)]
    events.append(_memory(timeline.time_s, timeline.simulation.memory_bytes[-1]))
    budget = {"budget_bytes": timeline.plan.budget_bytes, "peak_bytes": timeline.peak.memory_bytes}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": budget})


def _run(execution: Execution) -> dict[str, object]:
    op = execution.op
    return {
        "ph": "X",
        "pid": _PROCESS,
        "tid": _AGAIN_ROW if execution.again else _ROWS[op.phase],
        "name": op.name,
        "cat": str(op.phase),
        "ts": execution.start_s * 1e6,
        "dur": op.time_s * 1e6,
        "args": {"target": op.target, "module": op.module, "memory_bytes": execution.memory_bytes},
    }


def _memory(time_s: float, memory_bytes: int) -> dict[str, object]:
    return {"ph": "C", "pid": _PROCESS, "name": "memory", "ts": time_s * 1e6, "args": {"bytes": memory_bytes}}
