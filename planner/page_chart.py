"""The figure of a report: memory over the step under the budget line, and below it when ops are computed again.

The drawing is stretched to the width of the page; what is to be read (ticks, names) is HTML beside it, which is not.
"""

from graphs.units import format_bytes, format_seconds
from planner.playback import Playback

COLUMNS = 720
_HEIGHT = 240
_STRIP = 26
_TICKS = 5


def figure(playback: Playback) -> str:
    """The whole figure as HTML."""
    top = _top(playback)
    ticks = [tick for tick in _ticks(top) if tick <= top]
    labels = "".join(f'<span style="bottom:{100 * tick / top:.2f}%">{_short(tick)}</span>' for tick in ticks)
    times = "".join(
        f'<span style="left:{100 * part:.0f}%">{format_seconds(part * playback.time_s)}</span>'
        for part in (0, 0.25, 0.5, 0.75, 1)
    )
    return (
        f'<figure><div class="plot"><div class="ys">{labels}</div>{_memory(playback, top, ticks)}</div>'
        f'<div class="plot strip"><div class="ys"><span class="whole">again</span></div>{_again(playback)}</div>'
        f'<div class="xs">{times}</div></figure>'
    )


def memory_columns(playback: Playback, count: int = COLUMNS) -> list[int]:
    """The most memory in use in each of `count` equal parts of the step."""
    columns = [0] * count
    for execution, (first, last) in zip(playback.executions, _spans(playback, count), strict=True):
        for i in range(int(first), min(int(last), count - 1) + 1):
            columns[i] = max(columns[i], execution.memory_bytes)
    return columns


def again_columns(playback: Playback, count: int = COLUMNS) -> list[float]:
    """The share of each of `count` equal parts of the step that is spent on computing again."""
    columns = [0.0] * count
    for execution, (first, last) in zip(playback.executions, _spans(playback, count), strict=True):
        if execution.again:
            for i in range(int(first), min(int(last), count - 1) + 1):
                columns[i] += min(last, i + 1) - max(first, i)
    return columns


def _spans(playback: Playback, count: int) -> list[tuple[float, float]]:
    """Where each execution begins and ends, in columns; evenly where no op has a time."""
    if not playback.time_s:
        each = count / len(playback.executions)
        return [(i * each, (i + 1) * each) for i in range(len(playback.executions))]
    scale = count / playback.time_s
    return [(e.start_s * scale, (e.start_s + e.op.time_s) * scale) for e in playback.executions]


def _memory(playback: Playback, top: float, ticks: list[int]) -> str:
    def y(size: float) -> float:
        return round(_HEIGHT * (1 - size / top), 2)

    points = "".join(f"V{y(size)}H{i + 1}" for i, size in enumerate(memory_columns(playback)))
    grid = "".join(f'<line class="grid" x1="0" x2="{COLUMNS}" y1="{y(tick)}" y2="{y(tick)}"/>' for tick in ticks)
    backward = round(COLUMNS * playback.backward_s / playback.time_s, 2) if playback.time_s else COLUMNS
    budget = y(playback.plan.budget_bytes)
    said = (
        f"Memory over the step: at most {format_bytes(playback.peak.memory_bytes)}, "
        f"under the budget of {format_bytes(playback.plan.budget_bytes)}"
    )
    return (
        f'<svg viewBox="0 0 {COLUMNS} {_HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{said}">'
        f'<rect class="backward" x="{backward}" y="0" width="{COLUMNS - backward}" height="{_HEIGHT}"/>{grid}'
        f'<path class="memory" d="M0 {_HEIGHT}{points}V{_HEIGHT}Z"/>'
        f'<rect class="static" x="0" y="{y(playback.graph.static_bytes)}" width="{COLUMNS}" '
        f'height="{round(_HEIGHT * playback.graph.static_bytes / top, 2)}"/>'
        f'<line class="budget" x1="0" x2="{COLUMNS}" y1="{budget}" y2="{budget}"/></svg>'
    )


def _again(playback: Playback) -> str:
    bars = "".join(
        f"M{i} {_STRIP}v{-round(max(1.0, share * _STRIP), 1)}h1v{round(max(1.0, share * _STRIP), 1)}z"
        for i, share in enumerate(again_columns(playback))
        if share > 0
    )
    return (
        f'<svg viewBox="0 0 {COLUMNS} {_STRIP}" preserveAspectRatio="none" role="img" '
        f'aria-label="When ops are computed again"><path class="again" d="{bars}"/></svg>'
    )


def _top(playback: Playback) -> float:
    return 1.08 * max(playback.plan.budget_bytes, playback.peak.memory_bytes, 1)


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
