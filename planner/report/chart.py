"""The figure of a report: memory over the step under the budget line, and below it when ops are computed again.

Where there are other streams, what runs on them follows, and what is in other memories. The drawing is stretched to the width
of the page; what is to be read (ticks, names) is HTML beside it, which is not.
"""

from graphs.units import format_bytes, format_seconds
from planner.report.columns import COLUMNS, again_columns, memory_columns
from planner.report.stream_chart import pool_plots, stream_strips
from planner.report.timeline import Timeline

_HEIGHT = 240
_STRIP = 26
_TICKS = 5


def figure(timeline: Timeline) -> str:
    """The whole figure as HTML."""
    top = _top(timeline)
    ticks = [tick for tick in _ticks(top) if tick <= top]
    labels = "".join(f'<span style="bottom:{100 * tick / top:.2f}%">{_short(tick)}</span>' for tick in ticks)
    times = "".join(
        f'<span style="left:{100 * part:.0f}%">{format_seconds(part * timeline.time_s)}</span>'
        for part in (0, 0.25, 0.5, 0.75, 1)
    )
    return (
        f'<figure><div class="plot"><div class="ys">{labels}</div>{_memory(timeline, top, ticks)}</div>'
        f'<div class="plot strip"><div class="ys"><span class="whole">again</span></div>{_again(timeline)}</div>'
        f"{stream_strips(timeline)}{pool_plots(timeline)}"
        f'<div class="xs">{times}</div></figure>'
    )


def _memory(timeline: Timeline, top: float, ticks: list[int]) -> str:
    def y(size: float) -> float:
        return round(_HEIGHT * (1 - size / top), 2)

    points = "".join(f"V{y(size)}H{i + 1}" for i, size in enumerate(memory_columns(timeline, timeline.graph.pools[0])))
    grid = "".join(f'<line class="grid" x1="0" x2="{COLUMNS}" y1="{y(tick)}" y2="{y(tick)}"/>' for tick in ticks)
    backward = round(COLUMNS * timeline.backward_s / timeline.time_s, 2) if timeline.time_s else COLUMNS
    budget = y(timeline.plan.budget_bytes)
    said = (
        f"Memory over the step: at most {format_bytes(timeline.peak.memory_bytes)}, "
        f"under the budget of {format_bytes(timeline.plan.budget_bytes)}"
    )
    return (
        f'<svg viewBox="0 0 {COLUMNS} {_HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{said}">'
        f'<rect class="backward" x="{backward}" y="0" width="{COLUMNS - backward}" height="{_HEIGHT}"/>{grid}'
        f'<path class="memory" d="M0 {_HEIGHT}{points}V{_HEIGHT}Z"/>'
        f'<rect class="static" x="0" y="{y(timeline.graph.static_bytes)}" width="{COLUMNS}" '
        f'height="{round(_HEIGHT * timeline.graph.static_bytes / top, 2)}"/>'
        f'<line class="budget" x1="0" x2="{COLUMNS}" y1="{budget}" y2="{budget}"/></svg>'
    )


def _again(timeline: Timeline) -> str:
    bars = "".join(
        f"M{i} {_STRIP}v{-round(max(1.0, share * _STRIP), 1)}h1v{round(max(1.0, share * _STRIP), 1)}z"
        for i, share in enumerate(again_columns(timeline))
        if share > 0
    )
    return (
        f'<svg viewBox="0 0 {COLUMNS} {_STRIP}" preserveAspectRatio="none" role="img" '
        f'aria-label="When ops are computed again"><path class="again" d="{bars}"/></svg>'
    )


def _top(timeline: Timeline) -> float:
    return 1.08 * max(timeline.plan.budget_bytes, timeline.peak.memory_bytes, 1)


def _ticks(top: float) -> list[int]:
    """Round numbers from 0, at most _TICKS of them below `top`."""
    unit = 1
    while True:
        for factor in (1, 2, 5):
            if top / (factor * unit) < _TICKS:
                return [factor * unit * i for i in range(_TICKS)]
        unit *= 10


def _short(size_bytes: int) -> str:
    return format_bytes(size_bytes).replace(".00", "")
