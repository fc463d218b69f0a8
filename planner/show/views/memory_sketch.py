"""Memory over the step as a small drawing for notebooks: SVG without scripts, in colours that suit light and dark."""

from functools import partial

from graphs.units import format_bytes, format_seconds
from planner.show.facts.columns import compute_memory_columns
from planner.show.facts.timeline import Timeline

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 180, 74, 20
_COLUMNS = 320
_HEADROOM = 1.1


def draw_sketch(timeline: Timeline) -> str:
    """Return the drawing: memory in use, static memory below it, and the budget."""
    plan = timeline.plan
    peak_bytes = max(timeline.peak.memory_bytes, 1)
    near = plan.budget_bytes <= 2 * peak_bytes
    top = _HEADROOM * (plan.budget_bytes if near else peak_bytes)
    compute_y = partial(_compute_y, top)
    step = _WIDTH / _COLUMNS
    columns = compute_memory_columns(timeline, timeline.graph.pools[0], _COLUMNS)
    points = "".join(f"V{compute_y(size_bytes)}H{_LEFT + (i + 1) * step:.1f}" for i, size_bytes in enumerate(columns))
    static_y, right = compute_y(timeline.graph.static_bytes), _LEFT + _WIDTH
    marks = [
        f'<path d="M{_LEFT} {_HEIGHT}{points}V{_HEIGHT}Z" fill="#3b78c3" fill-opacity=".8"/>',
        f'<rect x="{_LEFT}" y="{static_y}" width="{_WIDTH}" height="{_HEIGHT - static_y:.1f}" fill="#8a94a3"/>',
        _draw_label(_LEFT - 6, compute_y(peak_bytes) + 4, f"{format_bytes(peak_bytes)}", "end"),
        _draw_label(_LEFT - 6, _HEIGHT, "0", "end"),
        _draw_label(_LEFT, _HEIGHT + 15, "0 s", "start"),
        _draw_label(right, _HEIGHT + 15, format_seconds(timeline.time_s), "end"),
    ]
    if near:
        line = compute_y(plan.budget_bytes)
        marks.append(
            f'<path d="M{_LEFT} {line}H{right}" stroke="#c2372e" stroke-width="1.5" stroke-dasharray="6 4">'
            f"<title>budget {format_bytes(plan.budget_bytes)}</title></path>"
        )
    said = f"Memory over the step: at most {format_bytes(peak_bytes)}, budget {format_bytes(plan.budget_bytes)}"
    return (
        f'<svg viewBox="0 0 {right + 4} {_HEIGHT + _BOTTOM}" role="img" aria-label="{said}" '
        f'style="display:block;width:100%;max-width:{right + 4}px">{"".join(marks)}</svg>'
    )


def _compute_y(top: float, size_bytes: float) -> float:
    return round(_HEIGHT * (1 - size_bytes / top), 1)


def _draw_label(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="12" font-family="sans-serif" fill="currentColor">{text}</text>'
    )
