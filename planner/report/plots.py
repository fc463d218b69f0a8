"""Figures: pure functions of what was measured."""

import io
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graphs.errors import PlannerError, UsageError
from graphs.io.files import check_writable, write_bytes
from graphs.units import format_bytes, format_seconds
from planner.visible import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from planner.running import RunReport
    from planner.studies.curve import Curve

_TITLE_WIDTH, _TITLE_LINES = 90, 3


def plot_memory(reports: "Sequence[RunReport]", path: Path, *, title: str) -> None:
    """Measured memory over one step, a line for each report, with the budgets as dashed lines.

    The step runs faster or slower from report to report; the axis is the part of it that has passed.

    Raises:
        PlannerError: matplotlib is not installed.
    """
    figure = new_figure()
    axes = figure.add_subplot()
    for i, report in enumerate(reports):
        end = report.timeline[-1][0]
        time = format_seconds(report.measured_time_s) if report.measured_ratio is None else f"{report.measured_ratio:.2f}x"
        label = f"budget {format_bytes(report.budget_bytes)}, step time {time}"
        xs, ys = [t / end for t, _ in report.timeline], [size / 1e6 for _, size in report.timeline]
        axes.step(xs, ys, where="post", color=f"C{i}", linewidth=0.8, label=label)
        axes.axhline(report.budget_bytes / 1e6, color=f"C{i}", linestyle="--", linewidth=1)
    axes.set(xlabel="part of the step", ylabel="memory in MB", xlim=(0, 1))
    set_title(axes, title)
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path)


def check_plot(path: Path) -> None:
    """Find out, before work is spent, whether a figure can be written to `path`.

    Raises:
        OutputError: the folder is not there or not writable.
        UsageError: the name's ending is no format of figures.
        PlannerError: matplotlib is not installed.
    """
    check_writable(path)
    formats = new_figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in formats:
        raise UsageError(f"{path} does not end in a format of figures: choose one of {', '.join(sorted(formats))}")


def plot_curve(curve: "Curve", path: Path, *, title: str) -> None:
    """Overhead against budget; what is below the bound is shaded.

    Raises:
        PlannerError: matplotlib is not installed.
    """
    figure = new_figure()
    axes = figure.add_subplot()
    drawn = False
    for number, part in enumerate((curve,) if curve.without is None else (curve.without, curve)):
        bounded = [(p.budget_bytes / 1e9, 100 * o) for p in part.points if (o := part.overhead(p.bound_s)) is not None]
        solved = [(p.budget_bytes / 1e9, 100 * o) for p in part.points if (o := part.overhead(p.time_s)) is not None]
        kind = f" with {', '.join(part.options)}" if part.options else ""
        if bounded:
            xs, ys = zip(*bounded, strict=True)
            # A bound holds at all smaller budgets too: between two points, that of the larger one.
            label = f"proved impossible in this order{kind}"
            axes.fill_between(xs, ys, step="pre", color=("C7", "C0")[number], alpha=0.3, linewidth=0, label=label)
        if solved:
            xs, ys = zip(*solved, strict=True)
            # A schedule serves all larger budgets: between two points, that of the smaller one.
            axes.step(xs, ys, where="post", color=f"C{number}", marker="o", markersize=4, label=f"best schedule{kind}")
        drawn = drawn or bool(bounded or solved)
    for budget in [p.budget_bytes / 1e9 for p in curve.points if p.status == "infeasible"]:
        axes.axvline(budget, color="C3", linestyle=":", linewidth=1)
    axes.set(xlabel="budget in GB", ylabel="overhead in %")
    set_title(axes, title)
    axes.margins(x=0.02)
    axes.set_ylim(bottom=0)
    if drawn:
        axes.legend()
    save_figure(figure, path)


def set_title(axes: "Axes", title: str) -> None:
    """Write `title`, a name that others gave, as it is: dollars begin no formula, and what is too long is cut."""
    lines = textwrap.wrap(visible(title), _TITLE_WIDTH, max_lines=_TITLE_LINES, placeholder=" ...")
    axes.set_title("\n".join(lines), parse_math=False, usetex=False)


def save_figure(figure: "Figure", path: Path) -> None:
    """Write the figure, whole or not at all.

    Raises:
        OutputError: it cannot be written.
    """
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a box is shown for it
        figure.savefig(content, format=path.suffix.removeprefix(".").lower(), dpi=120)
    write_bytes(path, _reduced(content) if path.suffix.lower() == ".png" else content.getvalue())


def _reduced(png: io.BytesIO) -> bytes:
    """Figures have few colors: a palette makes their files a quarter as large."""
    from PIL import Image  # matplotlib needs it as well

    reduced = io.BytesIO()
    with Image.open(png) as image:
        image.convert("RGB").quantize(256).save(reduced, format="png", optimize=True)
    return reduced.getvalue()


def new_figure() -> "Figure":
    """A figure of the size that all have.

    Raises:
        PlannerError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlannerError("plots need matplotlib: pip install 'remat-planner[plots]'") from error
    return Figure(figsize=(9, 5), layout="constrained")
