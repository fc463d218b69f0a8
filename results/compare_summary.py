"""All comparisons on one page, made from their CSVs alone: ``results/compare/summary.md``."""

from collections.abc import Sequence
from pathlib import Path

from planner.compare_report import cell_text, duels_of
from planner.compare_rows import Row, bound_of, read_rows, simulated
from planner.tables import as_markdown

BUDGET = "50%"
METHODS = ("windows", "checkpoint_blocks", "chen-sqrt", "chen-greedy", "rotor", "sac", "memory-budget", "dtr", "msps")
RIVALS = (
    "checkpoint_blocks",
    "sac",
    "sac-every-second",
    "memory-budget 0.50 aot_eager",
    "memory-budget 0.50 inductor",
    "dtr at 70%",
    "dtr at 50%",
)
SIMULATED = {"h200": "modelled for an H200"}
MEASURED = {"cpu": "on one thread of a CPU", "cuda": "on a GPU"}

_SIMULATED = (
    f"Overhead over the step without recomputation at {BUDGET} of its peak, {{said}}. OOM: what the method does needs more; "
    "thrash: the step took more time than the method allows. No schedule can be below the bound."
)
_MEASURED = (
    "Measured {said}: time of the optimal schedule for the peak that the other method was measured to take, over the other's "
    "time; below 1 the schedule is faster. PyTorch's methods as PyTorch runs them, DTR's schedules replayed. wrong: the "
    "other's gradients are."
)


def summary_text(folder: Path) -> str:
    """Overheads at one budget of each model, and times at equal measured peaks, as Markdown."""
    parts = ["# Every method on every model"]
    for suite, said in SIMULATED.items():
        if models := _models(folder / suite):
            parts += [
                _SIMULATED.format(said=said),
                as_markdown([("model", *METHODS, "bound"), *(_overheads(name, rows) for name, rows in models.items())]),
            ]
    for suite, said in MEASURED.items():
        if models := _models(folder / suite):
            parts += [
                _MEASURED.format(said=said),
                as_markdown([("model", *RIVALS), *(_ratios(name, rows) for name, rows in models.items())]),
            ]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _models(folder: Path) -> dict[str, list[Row]]:
    return {file.parent.name: read_rows(file) for file in sorted(folder.glob("*/rows.csv"))}


def _overheads(name: str, rows: Sequence[Row]) -> tuple[str, ...]:
    judged = simulated(rows)
    cells = {row.method: row for row in judged if row.budget == BUDGET}
    least = min((row.overhead for row in cells.values() if row.overhead is not None), default=None)
    texts = [cell_text(cells[method]) if method in cells else "" for method in METHODS]
    best = [method in cells and least is not None and cells[method].overhead == least for method in METHODS]
    bound_s = next((bound_of(judged, row.budget_bytes) for row in cells.values() if row.budget_bytes), None)
    bound = "none" if bound_s is None else f"{bound_s / judged[0].base_s - 1:.2%}"
    return name, *(f"**{text}**" if first else text for text, first in zip(texts, best, strict=True)), bound


def _ratios(name: str, rows: Sequence[Row]) -> tuple[str, ...]:
    duels = {duel.name: duel for duel in duels_of(rows)}
    texts = []
    for rival in RIVALS:
        duel = duels.get(rival)
        if duel is None or duel.rival.measured_ratio is None:
            texts.append("does not run" if duel is not None else "")
        elif duel.ratio is None:
            texts.append("" if duel.ours is None else cell_text(duel.ours))
        else:
            texts.append(f"{duel.ratio:.2f}{' (wrong)' if duel.rival.exactness == 'wrong' else ''}")
    return name, *texts
