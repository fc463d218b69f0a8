"""The figures of a comparison, made from its rows alone."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from planner.graphs.units import format_bytes
from planner.settings.counted_memory import CountedMemory
from planner.show.views.figures import choose_size_unit, draw_figure, pick_shades
from planner.studies.best_rows import get_kind
from planner.studies.comparison_rows import ComparisonRow, RunBy, bound_of, list_methods, select_simulated

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OURS = "windows"
# Highlighted methods, their labels and their styles, in colours for colour-blind readers (Okabe and Ito).
_KNOWN = {
    _OURS: ("remat-planner", "#0072B2", "o"),
    "checkpoint-blocks": ("checkpoint blocks", "#D55E00", "s"),
    "sac": ("selective checkpointing", "#CC79A7", "X"),
    "memory-budget": ("Memory Budget API", "#E69F00", "D"),
    "dtr": ("DTR", "#009E73", "^"),
    "eager": ("eager", "#000000", "*"),
}
_PEOPLE = {"keep-everything": "keep everything", **{method: name for method, (name, _, _) in _KNOWN.items()}}
# The time axis ends at this multiple of the highest highlighted overhead, without outliers; if another is far above.
_ABOVE, _FAR = 1.1, 1.5
_OUTLIER = 1.75  # times the overhead that nearly all highlighted points stay below

# Memory in bytes, and time as a multiple.
Point: TypeAlias = tuple[float, float]


def plot_overhead(rows: Sequence[ComparisonRow], path: Path) -> None:
    """Plot step time against simulated memory, as budgets count it: a line for each method, and the bound as a shaded area."""
    judged = select_simulated(rows)
    with draw_figure(path, rows[0].model) as axes:
        scale = _label_memory_axis(axes.xaxis.set_label_text, judged)
        budgets = sorted({row.budget_bytes or 0 for row in judged})
        bounds = [
            (budget / scale, bound / judged[0].base_s) for budget in budgets if (bound := bound_of(judged, budget)) is not None
        ]
        if bounds:
            xs, ys = zip(*bounds, strict=True)
            axes.fill_between(xs, ys, min(0.98, *ys), step="pre", color="C7", alpha=0.3, linewidth=0, label="proved impossible")
        _draw(axes, judged, _get_simulated_point, scale, linewidth=1)
        axes.set_ylabel("step time, as a multiple of keeping everything")


def plot_measured(rows: Sequence[ComparisonRow], path: Path) -> None:
    """Plot measured step time against measured peak; a cross marks wrong gradients."""
    with draw_figure(path, rows[0].model) as axes:
        scale = _label_memory_axis(axes.xaxis.set_label_text, rows)
        _draw(axes, rows, _get_measured_point, scale, linewidth=0)
        wrong = [point for row in rows if row.exactness == "wrong" and (point := _get_measured_point(row)) is not None]
        if wrong:
            xs, ys = zip(*wrong, strict=True)
            axes.plot([x / scale for x in xs], ys, "x", color="black", markersize=9, label="wrong gradients")
        axes.axhline(1.0, color="C7", linewidth=1)
        axes.set_ylabel("step time, as a multiple of eager PyTorch's")


def plot_memory(rows: Sequence[ComparisonRow], path: Path) -> None:
    """Plot the memory of each method at each budget, as budgets count it, with the budget as a line; rings are measured peaks."""
    judged = select_simulated(rows)
    with draw_figure(path, rows[0].model, columns=4) as axes:
        scale = _label_memory_axis(axes.yaxis.set_label_text, judged)
        methods = list_methods(judged)
        budgets = sorted({row.budget_bytes or 0 for row in judged}, reverse=True)
        for budget, color in zip(budgets, pick_shades(len(budgets)), strict=True):
            here = [row for row in judged if row.budget_bytes == budget]
            axes.axhline(budget / scale, color=color, linestyle="--", linewidth=1, label=f"budget {format_bytes(budget)}")
            peaks = [(methods.index(row.method), row.counted_bytes / scale) for row in here if row.counted_bytes]
            measured = [(methods.index(row.method), row.measured_peak_bytes / scale) for row in here if row.measured_peak_bytes]
            for points, size, fill in ((peaks, 5, "full"), (measured, 9, "none")):
                if points:
                    xs, ys = zip(*points, strict=True)
                    axes.plot(xs, ys, "o", color=color, markersize=size, fillstyle=fill)
        names = [_PEOPLE.get(method, method) for method in methods]
        ticks = axes.set_xticks(range(len(methods)), names, rotation=45, ha="right", fontsize="small")
        if _OURS in methods:
            ticks[methods.index(_OURS)].label1.set_fontweight("bold")
        axes.set_ylim(bottom=0)


def _draw(
    axes: "Axes", rows: Sequence[ComparisonRow], point: Callable[[ComparisonRow], Point | None], scale: float, *, linewidth: float
) -> None:
    """Draw a line for each method: our methods thick, well-known ones coloured, all others gray, PyTorch's own hollow.

    Single points far above all highlighted methods are drawn as arrows at the upper edge.
    """
    series: dict[tuple[bool, str], set[Point]] = {}
    for row in rows:
        if (found := point(row)) is not None:
            by_torch = row.run_by == RunBy.TORCH
            series.setdefault((by_torch, get_kind(row) if by_torch else row.method), set()).add(found)
    edge = _compute_edge(series)
    known = tuple(_KNOWN)
    cut: list[Point] = []
    for by_torch, method in sorted(series, key=lambda key: (known.index(key[1]) if key[1] in known else len(known), key)):
        points = sorted(series[by_torch, method])
        cut += [(x / scale, y) for x, y in points if y > edge]
        xs, ys = zip(*points, strict=True)
        (line,) = axes.plot([x / scale for x in xs], ys, markersize=5, linewidth=linewidth)
        line.set(fillstyle="none" if by_torch else "full")
        if (style := _KNOWN.get(method)) is None:
            named = "other methods" in axes.get_legend_handles_labels()[1]
            line.set(color="0.75", marker=".", zorder=1.5, linewidth=linewidth / 2, label=None if named else "other methods")
            continue
        name, color, marker = style
        line.set(color=color, marker=marker, label=f"PyTorch: {name}" if by_torch else name)
        if method == _OURS:
            line.set(linewidth=2.5 * linewidth, markersize=7, zorder=3)
    if cut:
        lowest = axes.get_ylim()[0]
        axes.set_ylim(lowest, edge)
        label = f"above the axis, up to {max(y for _, y in cut):.2f}x"
        axes.plot([x for x, _ in cut], [edge] * len(cut), "^", color="0.4", markersize=7, clip_on=False, linewidth=0, label=label)


def _compute_edge(series: Mapping[tuple[bool, str], set[Point]]) -> float:
    """Return the upper limit of the time axis: slightly above nearly all highlighted points, or infinity without outliers."""
    overheads = sorted(y - 1 for (_, method), points in series.items() for _, y in points if method in _KNOWN)
    highest = max((y - 1 for points in series.values() for _, y in points), default=0.0)
    if not overheads:
        return math.inf
    nearly_all = overheads[int(0.95 * (len(overheads) - 1))]
    edge = _ABOVE * max((one for one in overheads if one <= _OUTLIER * nearly_all), default=0.0)
    return 1 + edge if highest > _FAR * edge > 0 else math.inf


def _get_simulated_point(row: ComparisonRow) -> Point | None:
    return (row.counted_bytes, row.time_s / row.base_s) if row.counted_bytes and row.time_s else None


def _get_measured_point(row: ComparisonRow) -> Point | None:
    if row.measured_peak_bytes is None or row.measured_ratio is None:
        return None
    return row.measured_peak_bytes, row.measured_ratio


def _label_memory_axis(set_label: Callable[[str], object], rows: Sequence[ComparisonRow]) -> float:
    """Label an axis of memory with its unit, and return the bytes of the unit."""
    scale, unit = choose_size_unit(rows[0].base_peak_bytes)
    memory = rows[0].memory
    set_label(f"{'peak' if memory is CountedMemory.ALLOCATED else memory} memory in {unit}")
    return scale
