"""Figures of runs, as pure functions of measurements."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graphs.units import format_bytes, format_seconds
from planner.show.views.figures import choose_size_unit, draw_figure, pick_shades

if TYPE_CHECKING:
    from planner.measure.run_plan import RunReport


def plot_memory(reports: "Sequence[RunReport]", path: Path, *, title: str) -> None:
    """Plot measured memory over one step, a line for each report, with the budgets as dashed lines.

    Step times differ between reports, so the axis is the fraction of the step.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with draw_figure(path, title) as axes:
        scale, unit = choose_size_unit(max(report.budget_bytes for report in reports))
        for report, color in zip(reports, pick_shades(len(reports)), strict=True):
            end = report.timeline[-1][0]
            time = format_seconds(report.measured_time_s) if report.measured_ratio is None else f"{report.measured_ratio:.2f}x"
            label = f"budget {format_bytes(report.budget_bytes)}, step time {time}"
            xs, ys = [t / end for t, _ in report.timeline], [size / scale for _, size in report.timeline]
            axes.step(xs, ys, where="post", color=color, linewidth=0.8, label=label)
            axes.axhline(report.budget_bytes / scale, color=color, linestyle="--", linewidth=1)
        axes.set(xlabel="part of the step", ylabel=f"memory in {unit}", xlim=(0, 1))
        axes.set_ylim(bottom=0)
