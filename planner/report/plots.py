"""Figures of runs and of curves, as pure functions of measurements."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graphs.units import format_bytes, format_seconds
from planner.views.figures import COLORS, drawn, shades, size_unit, spread_out

if TYPE_CHECKING:
    from planner.running import RunReport
    from planner.studies.curve import Curve


def plot_memory(reports: "Sequence[RunReport]", path: Path, *, title: str) -> None:
    """Plot measured memory over one step, a line for each report, with the budgets as dashed lines.

    Step times differ between reports, so the axis is the fraction of the step.

    Raises:
        PlannerError: matplotlib is not installed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with drawn(path, title) as axes:
        scale, unit = size_unit(max(report.budget_bytes for report in reports))
        for report, color in zip(reports, shades(len(reports)), strict=True):
            end = report.timeline[-1][0]
            time = format_seconds(report.measured_time_s) if report.measured_ratio is None else f"{report.measured_ratio:.2f}x"
            label = f"budget {format_bytes(report.budget_bytes)}, step time {time}"
            xs, ys = [t / end for t, _ in report.timeline], [size / scale for _, size in report.timeline]
            axes.step(xs, ys, where="post", color=color, linewidth=0.8, label=label)
            axes.axhline(report.budget_bytes / scale, color=color, linestyle="--", linewidth=1)
        axes.set(xlabel="part of the step", ylabel=f"memory in {unit}", xlim=(0, 1))
        axes.set_ylim(bottom=0)


def plot_curve(curve: "Curve", path: Path, *, title: str) -> None:
    """Plot overhead against budget; the area below the bound is shaded.

    Raises:
        PlannerError: matplotlib is not installed.
    """
    with drawn(path, title) as axes:
        parts = (curve,) if curve.without is None else (curve.without, curve)
        scale, unit = size_unit(max(p.budget_bytes for part in parts for p in part.points))
        for part, color in zip(parts, (COLORS["ours"], COLORS["blocks"]), strict=False):
            bounded = [(p.budget_bytes / scale, 100 * o) for p in part.points if (o := part.overhead(p.bound_s)) is not None]
            solved = [(p.budget_bytes / scale, 100 * o) for p in part.points if (o := part.overhead(p.time_s)) is not None]
            kind = f" with {', '.join(part.options)}" if part.options else ""
            if bounded:
                xs, ys = zip(*bounded, strict=True)
                # A bound holds at all smaller budgets: between two points, that of the larger one holds.
                label = f"proved impossible in this order{kind}"
                axes.fill_between(xs, ys, step="pre", color=color if part.options else "0.6", alpha=0.3, linewidth=0, label=label)
            if solved:
                xs, ys = zip(*solved, strict=True)
                # A schedule fits all larger budgets: between two points, that of the smaller one holds.
                axes.step(xs, ys, where="post", color=color, marker="o", markersize=5, linewidth=2, label=f"remat-planner{kind}")
        for i, budget in enumerate(p.budget_bytes / scale for p in curve.points if p.status == "infeasible"):
            axes.axvline(budget, color=COLORS["budget"], linestyle=":", linewidth=1.2, label=None if i else "infeasible")
        axes.set(xlabel=f"budget ({curve.memory}) in {unit}", ylabel="overhead in %")
        axes.margins(x=0.02)
        overheads = [100 * o for part in parts for p in part.points if (o := part.overhead(p.time_s)) is not None]
        spread_out(axes, overheads)
