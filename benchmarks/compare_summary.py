"""Summary of all comparisons on one page, from their CSVs alone: ``results/compare/summary.md``."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from planner.studies.best_rows import (
    HEURISTICS,
    NOT_TRIED,
    explain_none,
    explain_not_measured,
    find_best_measured,
    find_best_schedule,
    get_kind,
    select_kind,
)
from planner.studies.comparison_rows import ComparisonRow, select_simulated
from planner.studies.comparisons import LEGEND, IsoMemoryPair, build_simulated_table, format_cell, list_iso_memory_pairs
from planner.studies.rows import read_rows
from planner.studies.tables import format_bold, join_markdown

BUDGETS = ("70%", "50%")
METHODS = ("windows", "checkpoint-blocks", "chen-sqrt", "chen-greedy", "rotor", "sac", "memory-budget")
BEST = {f"{kind} (best)": members for kind, members in HEURISTICS.items()}
BASELINES = ("checkpoint-blocks", "sac", "memory-budget aot_eager", "memory-budget inductor", *HEURISTICS)
SIMULATED = {"h200": "modelled for an H200"}
OFFLOADS = "checkpoint-blocks", "sac", "save-on-cpu", "save-on-cpu checkpoint-blocks", "save-on-cpu sac", "offload-activations"
MEASURED = {
    "cpu": ("on one thread of a CPU", BASELINES),
    "cpu-offload": ("on one thread of a CPU, with its own memory as host memory", OFFLOADS),
    "cuda": ("on a GPU", BASELINES),
}

_SIMULATED = (
    "Overhead over the step without recomputation at shares of its peak, {said}. Each method has its best settings per budget: "
    "blocks at any level or depth, any save list (sac), any fraction (memory-budget), any heuristic (dtr and megengine, the best "
    "one in parentheses). "
    f"{LEGEND} No schedule can be below the bound."
)
_MEASURED = (
    "Measured {said}: the time of the optimal schedule divided by that of the other method, within the measured peak of the "
    "other method; below 1 the schedule is faster. The other method is tuned for each budget: the setting in parentheses is the "
    "fastest that fits, by measurement, with correct gradients. PyTorch runs its own methods; schedules of DTR and MegEngine are "
    "replayed. OOM: all settings that run need more memory; wrong: those that fit have wrong gradients."
)


def format_summary(folder: Path) -> str:
    """Return overheads at two budgets of each model, and times at equal measured peaks, as Markdown."""
    parts = ["# Every method on every model"]
    for suite, said in SIMULATED.items():
        if models := _read_models(folder / suite):
            lines = [_format_overheads(name, rows, budget) for name, rows in models.items() for budget in BUDGETS]
            parts += [_SIMULATED.format(said=said), join_markdown([("model", "budget", *METHODS, *BEST, "bound"), *lines])]
    for suite, (said, kinds) in MEASURED.items():
        if models := _read_models(folder / suite):
            lines = [_format_ratios(name, rows, budget, kinds) for name, rows in models.items() for budget in BUDGETS]
            parts += [
                _MEASURED.format(said=said),
                join_markdown([("model", "budget", *kinds), *lines]),
                _format_tally(models),
            ]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _read_models(folder: Path) -> dict[str, list[ComparisonRow]]:
    return {file.parent.name: read_rows(file, ComparisonRow) for file in sorted(folder.glob("*/rows.csv"))}


def _format_overheads(name: str, rows: Sequence[ComparisonRow], budget: str) -> tuple[str, ...]:
    """Return the line of one budget: cells of the comparison's own table, and the best heuristics."""
    judged = select_simulated(rows)
    header, *lines = build_simulated_table(judged)
    line = next((dict(zip(header, line, strict=True)) for line in lines if f"({budget})" in line[0]), {})
    cells = {method: line.get(method, NOT_TRIED).strip("*") for method in METHODS}
    budget_bytes = next((row.budget_bytes or 0 for row in judged if row.budget == budget), 0)
    for title, members in BEST.items():
        kind = [row for row in judged if row.method in members]
        best = find_best_schedule(kind, budget_bytes)
        if best is None:
            cells[title] = explain_none(row for row in kind if row.budget == budget)
        else:
            cells[title] = f"{format_cell(best)} ({best.method})"
    times = {title: float(text.partition("%")[0]) for title, text in cells.items() if "%" in text}
    least = min(times.values(), default=None)
    marked = (format_bold(text, best=title in times and times[title] == least) for title, text in cells.items())
    return name, budget, *marked, line.get("bound", NOT_TRIED)


def _format_ratios(name: str, rows: Sequence[ComparisonRow], budget: str, kinds: Sequence[str]) -> tuple[str, ...]:
    """Return for each of these `kinds` of methods the ratio of the optimal schedule's time to the best that fits `budget`."""
    budget_bytes = next((row.budget_bytes or 0 for row in rows if row.budget == budget), 0)
    pairs = list_iso_memory_pairs(rows)
    return name, budget, *(_format_ratio(kind, rows, pairs, budget_bytes) for kind in kinds)


def _format_ratio(kind: str, rows: Sequence[ComparisonRow], pairs: Sequence[IsoMemoryPair], budget_bytes: int) -> str:
    baselines = select_kind([pair.baseline for pair in pairs], kind)
    best = find_best_measured(baselines, budget_bytes)
    if best is None and kind in HEURISTICS:  # those that found no schedule have no pair
        return explain_none(row for row in select_simulated(rows) if get_kind(row) == kind and row.budget_bytes == budget_bytes)
    if best is None:
        return explain_not_measured(baselines, budget_bytes) if baselines else NOT_TRIED
    ratio = next(pair.ratio for pair in pairs if pair.baseline is best)
    return "" if ratio is None else f"{ratio:.2f} ({best.method})"


def _format_tally(models: Mapping[str, Sequence[ComparisonRow]]) -> str:
    """Return by kind of method how often the optimal schedule was at least as fast as one with correct gradients."""
    lost: dict[str, list[bool]] = {}
    for pair in (pair for rows in models.values() for pair in list_iso_memory_pairs(rows)):
        if pair.ratio is not None and pair.baseline.exactness != "wrong":
            lost.setdefault(get_kind(pair.baseline), []).append(pair.lost)
    said = (f"{kind} {len(losses) - sum(losses)} of {len(losses)}" for kind, losses in sorted(lost.items()))
    return f"Of all that no other of its kind beats, the schedule was as fast or faster beside: {', '.join(said)}."
