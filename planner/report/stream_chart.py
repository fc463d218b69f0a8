"""The rows of the figure for what is beside the computation: where it waits, each other stream, each other memory."""

from markupsafe import escape

from graphs.ir import Op
from graphs.pools import COMPUTE, Pool
from graphs.units import format_bytes, format_seconds
from planner.report.columns import COLUMNS, memory_columns
from planner.report.streams import Stream, Wait, streams, waits
from planner.report.timeline import Execution, Timeline
from planner.visible import visible

_STRIP = 26
_POOL = 64
_LEAST = 0.5  # columns that a bar is wide at least: what is short is seen
_FAR = 4  # times what is in a pool: a capacity that is further off is not drawn


def stream_strips(timeline: Timeline) -> str:
    """Where the computation waits, and what runs on the other streams, as HTML; nothing where all of it is one stream."""
    beside = [stream for stream in streams(timeline)[1:] if stream.executions]
    if not beside:
        return ""
    waiting = "".join(_bar("wait", timeline, w.start_s, w.end_s, _wait_title(w)) for w in waits(timeline, COMPUTE))
    return _strip("waits", "Where the computation waits", waiting) + "".join(_stream(timeline, stream) for stream in beside)


def pool_plots(timeline: Timeline) -> str:
    """What is in each other memory over the step, as HTML; nothing of those that stay empty."""
    others = zip(timeline.graph.pools[1:], timeline.simulation.pool_peaks_bytes[1:], strict=True)
    return "".join(_pool(timeline, pool, peak_bytes) for pool, peak_bytes in others if peak_bytes)


def spaced(name: str) -> str:
    """The name of a stream or a pool, for people."""
    return visible(name).replace("_", " ")


def followed_by(wait: Wait) -> str:
    """What a wait is over for."""
    match wait.following:
        case None:
            return "the end of the step"
        case Op(name=name):
            return name
        case tensor:
            return f"memory of {tensor.name} goes"


def capacity_text(pool: Pool) -> str:
    """What a pool holds at most, for people."""
    return "without a limit" if pool.capacity_bytes is None else f"of {format_bytes(pool.capacity_bytes)}"


def _stream(timeline: Timeline, stream: Stream) -> str:
    bars = (_bar("beside", timeline, e.start_s, e.end_s, _bar_title(timeline, e)) for e in stream.executions)
    title = spaced(stream.name)
    return _strip(title, f"When the stream {title} is busy", "".join(bars))


def _strip(name: str, said: str, bars: str) -> str:
    return (
        f'<div class="plot strip"><div class="ys"><span class="whole">{escape(name)}</span></div>'
        f'<svg viewBox="0 0 {COLUMNS} {_STRIP}" preserveAspectRatio="none" role="img" aria-label="{escape(said)}">'
        f"{bars}</svg></div>"
    )


def _bar(kind: str, timeline: Timeline, start_s: float, end_s: float, title: str) -> str:
    scale = COLUMNS / timeline.time_s if timeline.time_s else 0.0
    width = max(_LEAST, (end_s - start_s) * scale)
    x = min(start_s * scale, COLUMNS - width)
    return (
        f'<rect class="{kind}" x="{x:.2f}" y="0" width="{width:.2f}" height="{_STRIP}">'
        f"<title>{escape(visible(title))}</title></rect>"
    )


def _bar_title(timeline: Timeline, execution: Execution) -> str:
    op = execution.op
    made_bytes = sum(timeline.graph.tensors[t].size_bytes for t in op.outputs)
    return f"{op.name}: {format_bytes(made_bytes)} in {format_seconds(op.time_s)}, from {format_seconds(execution.start_s)} on"


def _wait_title(wait: Wait) -> str:
    times = f"{format_seconds(wait.time_s)}, from {format_seconds(wait.start_s)} on"
    return f"{times}: waits for {wait.awaited.op.name} before {followed_by(wait)}"


def _pool(timeline: Timeline, pool: Pool, peak_bytes: int) -> str:
    """Its memory over the step, with the line of its capacity where that is near."""
    capacity = pool.capacity_bytes
    near = capacity is not None and capacity <= _FAR * peak_bytes
    top = 1.08 * (capacity if capacity is not None and near else peak_bytes)

    def y(size_bytes: float) -> float:
        return round(_POOL * (1 - size_bytes / top), 2)

    points = "".join(f"V{y(size_bytes)}H{i + 1}" for i, size_bytes in enumerate(memory_columns(timeline, pool)))
    static_bytes = timeline.graph.static_bytes_by_pool[pool.name]
    static = (
        f'<rect class="static" x="0" y="{y(static_bytes)}" width="{COLUMNS}" height="{round(_POOL * static_bytes / top, 2)}"/>'
    )
    line = f'<line class="budget" x1="0" x2="{COLUMNS}" y1="{y(capacity)}" y2="{y(capacity)}"/>' if near and capacity else ""
    title = f"{spaced(pool.name)}: at most {format_bytes(peak_bytes)}, {capacity_text(pool)}"
    return (
        f'<div class="plot pool"><div class="ys"><span class="whole">{escape(spaced(pool.name))}<br>'
        f'{format_bytes(peak_bytes)}<small class="wide"><br>{capacity_text(pool)}</small></span></div>'
        f'<svg viewBox="0 0 {COLUMNS} {_POOL}" preserveAspectRatio="none" role="img" aria-label="{escape(title)}">'
        f'<path class="elsewhere" d="M0 {_POOL}{points}V{_POOL}Z"><title>{escape(title)}</title></path>'
        f"{static if static_bytes else ''}{line}</svg></div>"
    )
