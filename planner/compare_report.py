"""What a comparison shows, from its rows alone: a table, and two figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graphs.units import format_bytes
from planner.compare import OPTIMUM, Row, bound_of
from planner.plots import new_figure, save_figure
from planner.tables import as_markdown
from solvers.result import Status

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEGEND = (
    "OOM: what the method does needs more; thrash: the step took more time than the method allows; "
    "time: nothing was found in the time given."
)


def write_report(rows: Sequence[Row], folder: Path) -> None:
    """Write ``table.md``, ``overhead.png`` and ``memory.png``.

    Raises:
        PlannerError: matplotlib is not installed.
    """
    folder.joinpath("table.md").write_text(table_text(rows))
    plot_overhead(rows, folder / "overhead.png")
    plot_memory(rows, folder / "memory.png")


def table_text(rows: Sequence[Row]) -> str:
    """Overhead by budget and method as Markdown; the least in bold, the bound last."""
    methods = list(dict.fromkeys(row.method for row in rows))
    cells = {(row.budget_bytes, row.method): row for row in rows}
    budgets = sorted({row.budget_bytes: row.budget for row in rows}.items(), reverse=True)
    lines = [("budget", *methods, "bound")]
    for budget_bytes, label in budgets:
        here = [cells.get((budget_bytes, method)) for method in methods]
        best = min((row.time_s for row in here if row is not None and row.time_s is not None), default=None)
        bound_s = bound_of(rows, budget_bytes)
        texts = ["" if row is None else cell_text(row, best=row.time_s is not None and row.time_s == best) for row in here]
        name = format_bytes(budget_bytes) + (f" ({label})" if label.endswith("%") else "")
        refuted = any(row is not None and row.method == OPTIMUM and row.status == Status.INFEASIBLE for row in here)
        bound = "infeasible" if refuted else "none" if bound_s is None else f"{bound_s / rows[0].base_s - 1:.2%}"
        lines.append((name, *texts, bound))
    base = f"which takes {rows[0].base_s:.4g} s and {format_bytes(rows[0].base_peak_bytes)}"
    commits, machines = (", ".join(sorted(set(names))) for names in ([r.commit for r in rows], [r.machine for r in rows]))
    notes = (
        f"# {rows[0].model or 'A comparison'}",
        f"Overhead over the step without recomputation, {base}; by simulation. {_LEGEND}",
        as_markdown(lines),
        f"Commit {commits}; {machines}; limit {rows[0].time_limit_s:g} s a row, tolerance {rows[0].tolerance:g}.",
    )
    return "\n\n".join(notes) + "\n"


def cell_text(row: Row, *, best: bool) -> str:
    """A row in a few characters."""
    if row.overhead is not None:
        text = f"{row.overhead:.2%}"
        return f"**{text}**" if best else text
    if row.status != "limit":
        return row.status
    if "thrash" in row.message:
        return "thrash"
    return "time" if "limit" in row.message else "OOM"


def plot_overhead(rows: Sequence[Row], path: Path) -> None:
    """Step time against peak memory: a line or a point for each method, and the bound shaded."""
    figure = new_figure()
    axes = figure.add_subplot()
    base_s = rows[0].base_s
    budgets = sorted({row.budget_bytes for row in rows})
    bounds = [(budget / 1e9, bound / base_s) for budget in budgets if (bound := bound_of(rows, budget)) is not None]
    if bounds:
        xs, ys = zip(*bounds, strict=True)
        axes.fill_between(xs, ys, min(0.98, *ys), step="pre", color="C7", alpha=0.3, linewidth=0, label="proved impossible")
    for i, method in enumerate(dict.fromkeys(row.method for row in rows)):
        mine = [row for row in rows if row.method == method]
        points = sorted({(row.peak_bytes / 1e9, row.time_s / base_s) for row in mine if row.peak_bytes and row.time_s})
        if points:
            xs, ys = zip(*points, strict=True)
            marker = "os^vDPX*"[i % 8]
            axes.plot(xs, ys, marker=marker, markersize=5, linewidth=1, color=f"C{i % 10}", label=method)
    axes.set(title=rows[0].model, xlabel="peak memory in GB", ylabel="step time, as a multiple of keeping everything")
    _add_legend(axes, columns=2)
    save_figure(figure, path)


def plot_memory(rows: Sequence[Row], path: Path) -> None:
    """Peak memory of each method at each budget, beside the budget."""
    figure = new_figure()
    axes = figure.add_subplot()
    methods = list(dict.fromkeys(row.method for row in rows))
    for i, budget in enumerate(sorted({row.budget_bytes for row in rows}, reverse=True)):
        here = [
            (methods.index(row.method), row.peak_bytes / 1e9) for row in rows if row.budget_bytes == budget and row.peak_bytes
        ]
        axes.axhline(budget / 1e9, color=f"C{i % 10}", linestyle="--", linewidth=1)
        if here:
            xs, ys = zip(*here, strict=True)
            axes.plot(xs, ys, "o", color=f"C{i % 10}", markersize=5, label=f"budget {format_bytes(budget)}")
    axes.set_xticks(range(len(methods)), methods, rotation=45, ha="right", fontsize="small")
    axes.set(title=rows[0].model, ylabel="peak memory in GB")
    axes.set_ylim(bottom=0)
    _add_legend(axes)
    save_figure(figure, path)


def _add_legend(axes: "Axes", *, columns: int = 1) -> None:
    if axes.get_legend_handles_labels()[0]:  # nothing is drawn where no method fits
        axes.legend(fontsize="small", ncols=columns)
