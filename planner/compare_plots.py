"""The figures of a comparison, made from its rows alone."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from graphs.units import format_bytes
from planner.compare_rows import Row, RunBy, bound_of, methods_of, simulated
from planner.plots import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Memory in GB and time as a multiple; None where there is none.
Point: TypeAlias = tuple[float, float]


def plot_overhead(rows: Sequence[Row], path: Path) -> None:
    """Step time against peak memory: a line or a point for each method, the bound shaded; measured beside simulated.

    Raises:
        PlannerError: matplotlib is not installed.
    """
    judged, measured = simulated(rows), [row for row in rows if row.measured_ratio is not None]
    figure = new_figure()
    panels = list(figure.subplots(1, 1 + bool(measured), squeeze=False)[0])
    _shade_bound(panels[0], judged)
    _draw(panels[0], judged, _simulated_point)
    panels[0].set(title="simulated", xlabel="peak memory in GB", ylabel="step time, as a multiple of keeping everything")
    _add_legend(panels[0], columns=2)
    if measured:
        _draw(panels[1], measured, _measured_point)
        panels[1].set(title="measured", xlabel="peak memory in GB", ylabel="step time, as a multiple of eager PyTorch's")
        _add_legend(panels[1], columns=2)
    figure.suptitle(rows[0].model)
    save_figure(figure, path)


def plot_memory(rows: Sequence[Row], path: Path) -> None:
    """Peak memory of each method at each budget, beside the budget; rings are measured peaks.

    Raises:
        PlannerError: matplotlib is not installed.
    """
    judged = simulated(rows)
    figure = new_figure()
    axes = figure.add_subplot()
    methods = methods_of(judged)
    for i, budget in enumerate(sorted({row.budget_bytes or 0 for row in judged}, reverse=True)):
        here = [row for row in judged if row.budget_bytes == budget and row.peak_bytes]
        axes.axhline(budget / 1e9, color=f"C{i % 10}", linestyle="--", linewidth=1)
        if here:
            xs, ys = [methods.index(row.method) for row in here], [(row.peak_bytes or 0) / 1e9 for row in here]
            axes.plot(xs, ys, "o", color=f"C{i % 10}", markersize=5, label=f"budget {format_bytes(budget)}")
        if run := [row for row in here if row.measured_peak_bytes]:
            xs, ys = [methods.index(row.method) for row in run], [(row.measured_peak_bytes or 0) / 1e9 for row in run]
            axes.plot(xs, ys, "o", color=f"C{i % 10}", markersize=9, fillstyle="none")
    axes.set_xticks(range(len(methods)), methods, rotation=45, ha="right", fontsize="small")
    axes.set(title=rows[0].model, ylabel="peak memory in GB")
    axes.set_ylim(bottom=0)
    _add_legend(axes)
    save_figure(figure, path)


def _shade_bound(axes: "Axes", rows: Sequence[Row]) -> None:
    budgets = sorted({row.budget_bytes or 0 for row in rows})
    bounds = [(budget / 1e9, bound / rows[0].base_s) for budget in budgets if (bound := bound_of(rows, budget)) is not None]
    if bounds:
        xs, ys = zip(*bounds, strict=True)
        axes.fill_between(xs, ys, min(0.98, *ys), step="pre", color="C7", alpha=0.3, linewidth=0, label="proved impossible")


def _draw(axes: "Axes", rows: Sequence[Row], point: Callable[[Row], Point | None]) -> None:
    """A line for each method of ours; what PyTorch runs is points, and a cross where its results are wrong."""
    order = methods_of(rows)
    ordered = sorted(rows, key=lambda row: (row.run_by == RunBy.TORCH, order.index(row.method)))
    for i, (torch, method) in enumerate(dict.fromkeys((row.run_by == RunBy.TORCH, _family(row)) for row in ordered)):
        mine = [row for row in rows if (row.run_by == RunBy.TORCH, _family(row)) == (torch, method)]
        points = sorted({found for row in mine if (found := point(row)) is not None})
        if points:
            xs, ys = zip(*points, strict=True)
            (line,) = axes.plot(xs, ys, color=f"C{i % 10}", marker="os^vDPX*"[i % 8], markersize=5)
            line.set(linewidth=0 if torch else 1, label=f"{method} (PyTorch)" if torch else method)
        wrong = [found for row in mine if row.exactness == "wrong" and (found := point(row)) is not None]
        if wrong:
            axes.plot(*zip(*wrong, strict=True), "x", color="black", markersize=9)


def _family(row: Row) -> str:
    """Where PyTorch's method has options, its name is followed by them: one name for all of a kind."""
    words = row.method.split()
    return f"{words[0]} {words[-1]}" if row.run_by == RunBy.TORCH and words[0] == "memory-budget" else row.method


def _simulated_point(row: Row) -> Point | None:
    return (row.peak_bytes / 1e9, row.time_s / row.base_s) if row.peak_bytes and row.time_s else None


def _measured_point(row: Row) -> Point | None:
    if row.measured_peak_bytes is None or row.measured_ratio is None:
        return None
    return row.measured_peak_bytes / 1e9, row.measured_ratio


def _add_legend(axes: "Axes", *, columns: int = 1) -> None:
    if axes.get_legend_handles_labels()[0]:  # nothing is drawn where no method fits
        axes.legend(ncols=columns, fontsize="x-small", markerscale=0.8)
