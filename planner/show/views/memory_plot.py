"""The memory of a plan over its step: as a matplotlib figure, and for notebooks as SVG without scripts, on light and dark."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from planner.graphs.units import format_bytes, format_seconds
from planner.show.facts.baselines import Baseline
from planner.show.facts.columns import compute_memory_columns, list_stretches
from planner.show.facts.timeline import Timeline
from planner.show.views.figures import COLORS, add_legend, choose_size_unit, create_figure, set_title, time_unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_plan(timeline: Timeline, others: Sequence[Baseline]) -> "Figure":
    """Return the figure: memory in use and static memory as areas, the baselines `others` as lines, the budget dashed."""
    plan, graph = timeline.plan, timeline.graph
    largest = max(plan.peak_bytes, *(one.peak_bytes for one in others))
    size, unit = choose_size_unit(largest)
    seconds, second = time_unit(max(timeline.time_s, *(one.time_s for one in others)))
    figure = create_figure()
    axes = figure.add_subplot()
    held = list_stretches(timeline, graph.pools[0])
    xs = [*(one.start_s / seconds for one in held), timeline.time_s / seconds]
    ys = [*(one.size_bytes / size for one in held), held[-1].size_bytes / size]
    axes.fill_between(xs, ys, step="post", color=COLORS["ours"], alpha=0.35, linewidth=0)
    axes.step(xs, ys, where="post", color=COLORS["ours"], linewidth=1.5, label=f"this plan, peak {format_bytes(plan.peak_bytes)}")
    axes.fill_between([0, xs[-1]], graph.static_bytes / size, color="0.6", linewidth=0, label="static memory")
    for one, color in zip(others, (COLORS["whole"], COLORS["blocks"]), strict=False):
        times = [*(t / seconds for t in one.times_s), one.time_s / seconds]
        sizes = [*(b / size for b in one.memory_bytes), one.memory_bytes[-1] / size]
        label = f"{one.name}, peak {format_bytes(one.peak_bytes)}"
        axes.step(times, sizes, where="post", color=color, linewidth=1, label=label)
    if plan.budget_bytes <= 2 * largest:
        budget = format_bytes(plan.budget_bytes)
        axes.axhline(plan.budget_bytes / size, color=COLORS["budget"], linestyle="--", linewidth=1.2, label=f"budget {budget}")
    axes.set(xlabel=f"time in {second}", ylabel=f"memory in {unit}")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    set_title(axes, graph.provenance.model)
    add_legend(figure, axes)
    return figure


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
