"""Tables of a comparison, pure functions of its rows; the figures are in ``comparison_plots``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

from planner.graphs.escape import escape_text
from planner.graphs.io.files import write_text
from planner.graphs.units import format_bytes
from planner.solvers.result import Reason, compute_gap
from planner.studies.best_rows import NOT_TRIED, WHY_NOT, build_tuned_table
from planner.studies.comparison_plots import plot_measured, plot_memory, plot_overhead
from planner.studies.comparison_rows import PEAK_OF, ComparisonRow, RunBy, format_bound, list_methods, select_simulated
from planner.studies.tables import format_bold, group_by, join_markdown

LEGEND = (
    "does not apply: the method does not support this model, at any budget; OOM: the method needs more memory; thrash: the step "
    "took more time than the method allows; infeasible: proved, no schedule fits; time: no schedule was found in the time limit; "
    "too large: the graph has more ops than the method supports; not tried: there is no such row."
)
_MESSAGE = 110  # characters of a message in a table; rows.csv has all
_MEASURED = (
    "Time of a step as a multiple of eager PyTorch's, measured alternately (median), and measured peak. Schedules are replayed "
    "by our executor. wrong: loss or gradients differ from those of eager PyTorch."
)
_RESERVED = (
    "Memory that PyTorch's caching allocator reserves {settings} for training with the same schedules, libraries{context} "
    "included, as a multiple of the budget."
)
_ON_HOST = (
    "On the host: the largest size of the copies there, which is not in the peak. PyTorch's save_on_cpu and torchtune's "
    "OffloadActivations are hooks on saved tensors that copy as schedules do."
)
_TUNED = (
    "Of the levels and depths of blocks, the save lists of SAC and the fractions of the Memory Budget API, the fastest that was "
    "measured to fit with correct gradients, as a multiple of eager PyTorch's time. OOM: all that run need more memory; wrong: "
    "those that fit have wrong gradients."
)
_ISO_MEMORY = (
    "PyTorch's own methods as PyTorch runs them, and the best heuristics of DTR and MegEngine by simulation. A method is listed "
    "if no other of its kind is better in time and peak. It is compared with the optimal schedule for its measured peak; both "
    "are measured alternately, as multiples of eager PyTorch's time. gradients: bit-identical to eager's, rounded (to at least "
    "half of the digits, or as rounding the parameters changes them), or wrong. The last column is the optimal schedule's time "
    "divided by the method's: below 1 the schedule is faster."
)


def write_report(rows: Sequence[ComparisonRow], folder: Path, *, figures: bool = True) -> list[Path]:
    """Write ``table.md``, ``overhead.png`` and ``memory.png``, and ``measured.png`` if there are measurements; return the files.

    Args:
        figures: False to write the table only.
    """
    written = [folder / "table.md"]
    write_text(written[0], format_tables(rows))
    measured = any(row.measured_s is not None for row in rows)
    plots = {"overhead": plot_overhead, "memory": plot_memory, **({"measured": plot_measured} if measured else {})}
    for name, plot in plots.items() if figures else ():
        written.append(folder / f"{name}.png")
        plot(rows, written[-1])
    return written


def format_tables(rows: Sequence[ComparisonRow]) -> str:
    """Return a page of tables: schedules by simulation and, if steps were run, measurements at each budget and at equal peaks."""
    first = rows[0]
    parts = [f"# {escape_text(first.model) or 'A comparison'}"]
    if judged := select_simulated(rows):
        base = f"which takes {judged[0].base_s:.4g} s and {format_bytes(judged[0].base_peak_bytes)}"
        on_cuda = any(row.reserved_bytes is not None for row in judged)
        counted = f"Budgets count {judged[0].memory.said}. " if on_cuda else ""
        parts += [
            f"Overhead over the step without recomputation, {base}; by simulation. {counted}{LEGEND}",
            join_markdown(build_simulated_table(judged)),
        ]
        if on_cuda:
            memory = judged[0].memory
            said = _RESERVED.format(
                settings="with expandable segments" if memory.is_expandable else "with its default settings",
                context=" and CUDA's context" if memory.counts_context else "",
            )
            parts += [f"## Reserved on the device\n\n{said}", join_markdown(build_reserved_table(judged))]
    if replayed := [row for row in rows if row.run_by == RunBy.EXECUTOR and not row.budget.startswith(PEAK_OF)]:
        said = f"{_MEASURED} {_ON_HOST}" if any(row.measured_host_bytes for row in rows) else _MEASURED
        parts += [f"## Measured\n\n{said}", join_markdown(_build_rows_by_budget(replayed, format_measured, _get_sound_ratio, 2))]
    if any(row.run_by == RunBy.TORCH for row in rows):
        parts += [f"## PyTorch's own, tuned for each budget\n\n{_TUNED}", join_markdown(build_tuned_table(rows))]
    pairs = list_iso_memory_pairs(rows)
    if any(pair.ours for pair in pairs):
        parts += [f"## At equal peak\n\n{_ISO_MEMORY}", join_markdown(build_iso_memory_table(pairs)), describe_iso_memory(pairs)]
    commits, machines = (" and ".join(sorted(set(names))) for names in ([r.commit for r in rows], [r.machine for r in rows]))
    limits = ", ".join(f"{limit:g} s" for limit in sorted({row.time_limit_s for row in rows}))
    parts += [f"Commit {commits}; {machines}; limit {limits} a row, tolerance {first.tolerance:g}."]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def build_simulated_table(rows: Sequence[ComparisonRow]) -> list[tuple[str, ...]]:
    """Return the table of overheads by budget and method; the least is in bold, the bound is the last column."""
    header, *lines = _build_rows_by_budget(rows, format_cell, lambda row: row.overhead, 4)
    budgets = sorted({row.budget_bytes or 0 for row in rows}, reverse=True)
    bounds = [format_bound(rows, budget) for budget in budgets]
    return [(*header, "bound"), *((*line, bound) for line, bound in zip(lines, bounds, strict=True))]


def build_reserved_table(rows: Sequence[ComparisonRow]) -> list[tuple[str, ...]]:
    """Return the table of reserved memory by budget and method, as multiples of the budget; the least is in bold."""
    return _build_rows_by_budget(
        rows, lambda row: "" if (found := _share_reserved(row)) is None else f"{found:.2f}", _share_reserved, 2
    )


def _share_reserved(row: ComparisonRow) -> float | None:
    return row.reserved_bytes / row.budget_bytes if row.reserved_bytes is not None and row.budget_bytes else None


@dataclass(frozen=True, slots=True)
class IsoMemoryPair:
    """A baseline at its own peak memory, and the optimal schedule for the same memory (None if it did not run)."""

    name: str
    baseline: ComparisonRow
    ours: ComparisonRow | None

    @property
    def ratio(self) -> float | None:
        """The measured time of the optimal schedule, divided by that of the baseline."""
        if self.ours is None or self.ours.measured_ratio is None or self.baseline.measured_ratio is None:
            return None
        return self.ours.measured_ratio / self.baseline.measured_ratio

    @property
    def lost(self) -> bool:
        """True if the baseline is faster and its gradients are right."""
        return self.ratio is not None and self.ratio > 1 and self.baseline.exactness != "wrong"


def list_iso_memory_pairs(rows: Sequence[ComparisonRow]) -> list[IsoMemoryPair]:
    """Return a pair for each method that PyTorch runs, and for each schedule that was compared at its own peak."""
    ours = {row.budget.removeprefix(PEAK_OF): row for row in rows if row.budget.startswith(PEAK_OF)}
    names = {row.name: row for row in rows}
    return [IsoMemoryPair(name, row, ours.get(name)) for name, row in names.items() if row.run_by == RunBy.TORCH or name in ours]


def build_iso_memory_table(pairs: Sequence[IsoMemoryPair]) -> list[tuple[str, ...]]:
    """Return the table of pairs: peak and time of each baseline and of the optimal schedule."""
    header = ("method", "gradients", "peak", "time", "optimal schedule: peak", "time", "over the other's")
    return [header, *map(_build_iso_memory_row, pairs)]


def _build_iso_memory_row(pair: IsoMemoryPair) -> tuple[str, ...]:
    baseline, ours = pair.baseline, pair.ours
    if baseline.measured_ratio is None or baseline.measured_peak_bytes is None:
        why = "does not apply" if baseline.reason == Reason.INAPPLICABLE else "does not run"
        return pair.name, f"{why}: {shorten(baseline.message, _MESSAGE, placeholder=' ...')}", "", "", "", "", ""
    theirs = (pair.name, baseline.exactness, baseline.measured_memory, f"{baseline.measured_ratio:.2f}x")
    if ours is None or ours.measured_ratio is None or ours.measured_peak_bytes is None or pair.ratio is None:
        return (*theirs, "another of its kind is better" if ours is None else format_cell(ours), "", "")
    time = format_bold(f"{ours.measured_ratio:.2f}x", best=not pair.lost)
    return *theirs, ours.measured_memory, time, f"{pair.ratio:.2f}"


def describe_iso_memory(pairs: Sequence[IsoMemoryPair]) -> str:
    """Return a sentence on where the optimal schedule was slower than a baseline, and why if that is known."""
    lost = [pair for pair in pairs if pair.lost]
    if not lost:
        return "Nowhere was the optimal schedule slower."
    text = f"Slower than the other: {'; '.join(f'{pair.name} ({_explain(pair)})' for pair in lost)}."
    same = [pair.ours.measured_ratio for pair in pairs if pair.ours and pair.ours.measured_ratio and not pair.ours.overhead]
    if len(same) < 2:
        return text
    return f"{text} Schedules that keep everything, which are all the same, took {min(same):.2f}x to {max(same):.2f}x here."


def _explain(pair: IsoMemoryPair) -> str:
    if pair.name.endswith("inductor"):
        return "it fuses ops into kernels of its own; schedules run ATen's ops one by one"
    gap = None if pair.ours is None else compute_gap(pair.ours.time_s, pair.ours.bound_s)
    if gap is not None and pair.ours is not None and gap > pair.ours.tolerance:
        return f"the schedule is not proved optimal: gap {gap:.1%}"
    return "by simulation the schedule is optimal: the rest is the executor, and noise"


def format_cell(row: ComparisonRow) -> str:
    """Return the text of a table cell for a simulated row."""
    if row.overhead is not None:
        return f"{row.overhead:.2%}"
    return WHY_NOT[Reason(row.reason)] if row.reason else row.status


def format_measured(row: ComparisonRow) -> str:
    """Return the text of a table cell for a measured row."""
    if row.exactness == "wrong":
        return "wrong"
    if row.measured_ratio is None or row.measured_peak_bytes is None:
        return format_cell(row) if row.time_s is None else "error"
    return f"{row.measured_ratio:.2f}x, {row.measured_memory}"


def _get_sound_ratio(row: ComparisonRow) -> float | None:
    return None if row.exactness == "wrong" else row.measured_ratio


def _build_rows_by_budget(
    rows: Sequence[ComparisonRow],
    text: Callable[[ComparisonRow], str],
    value: Callable[[ComparisonRow], float | None],
    digits: int,
) -> list[tuple[str, ...]]:
    """Return table cells by budget (largest first) and method; the least values, rounded to `digits`, are in bold."""
    methods, lines = list_methods(rows), []
    for budget_bytes, own in sorted(group_by(rows, "budget_bytes").items(), reverse=True):
        found = {row.method: row for row in reversed(own)}
        # Rounded as in the text: values that read the same are equal.
        values = {method: round(known, digits) for method, row in found.items() if (known := value(row)) is not None}
        least = min(values.values(), default=None)
        cells = (
            format_bold(text(found[method]), best=method in values and values[method] == least) if method in found else NOT_TRIED
            for method in methods
        )
        label = own[-1].budget
        lines.append((format_bytes(budget_bytes) + (f" ({label})" if label.endswith("%") else ""), *cells))
    return [("budget", *methods), *lines]
