"""The memory of a plan over its step, as a matplotlib figure."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from graphs.units import format_bytes
from planner.show.facts.baselines import Baseline
from planner.show.facts.columns import list_stretches
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
    set_title(axes, str(graph.provenance.get("model", "")))
    add_legend(figure, axes)
    return figure
