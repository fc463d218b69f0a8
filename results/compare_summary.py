"""All comparisons on one page, made from their CSVs alone: ``results/compare/summary.md``."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from planner.compare_report import cell_text, duels_of, simulated_table
from planner.compare_rows import Row, read_rows, simulated
from planner.tables import as_markdown

BUDGETS = ("70%", "50%")
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
    "Overhead over the step without recomputation at parts of its peak, {said}. OOM: what the method does needs more; "
    "thrash: the step took more time than the method allows. No schedule can be below the bound."
)
_MEASURED = (
    "Measured {said}: time of the optimal schedule for the peak that the other method was measured to take, over the other's "
    "time; below 1 the schedule is faster. PyTorch's methods as PyTorch runs them, DTR's schedules replayed. wrong: the "
    "other's gradients are."
)


def summary_text(folder: Path) -> str:
    """Overheads at two budgets of each model, and times at equal measured peaks, as Markdown."""
    parts = ["# Every method on every model"]
    for suite, said in SIMULATED.items():
        if models := _models(folder / suite):
            parts += [
                _SIMULATED.format(said=said),
                as_markdown(
                    [
                        ("model", "budget", *METHODS, "bound"),
                        *(_overheads(name, rows, budget) for name, rows in models.items() for budget in BUDGETS),
                    ]
                ),
            ]
    for suite, said in MEASURED.items():
        if models := _models(folder / suite):
            parts += [
                _MEASURED.format(said=said),
                as_markdown([("model", *RIVALS), *(_ratios(name, rows) for name, rows in models.items())]),
                _tally(models),
            ]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _models(folder: Path) -> dict[str, list[Row]]:
    return {file.parent.name: read_rows(file) for file in sorted(folder.glob("*/rows.csv"))}


def _overheads(name: str, rows: Sequence[Row], budget: str) -> tuple[str, ...]:
    """The line of one budget of the table that the comparison itself has, with fewer methods."""
    header, *lines = simulated_table(simulated(rows))
    line = next((dict(zip(header, line, strict=True)) for line in lines if f"({budget})" in line[0]), {})
    return name, budget, *(line.get(column, "") for column in (*METHODS, "bound"))


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


def _tally(models: Mapping[str, Sequence[Row]]) -> str:
    """How often the optimal schedule was not slower, by kind of method; wrong ones are no wins of theirs."""
    lost: dict[str, list[bool]] = {}
    for duel in (duel for rows in models.values() for duel in duels_of(rows) if duel.ratio is not None):
        first, *rest = duel.name.split()
        kind = f"{first} {rest[-1]}" if first == "memory-budget" else first
        lost.setdefault(kind, []).append(duel.lost)
    said = (f"{kind} {len(losses) - sum(losses)} of {len(losses)}" for kind, losses in sorted(lost.items()))
    return f"Of all models, options and budgets, the schedule was as fast or faster beside: {', '.join(said)}."
