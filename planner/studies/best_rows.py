"""The best result of each kind of method, tuned for each budget."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from planner.graphs.units import format_bytes
from planner.solvers.result import Reason
from planner.studies.comparison_rows import OPTIMUM, PEAK_OF, ComparisonRow, RunBy
from planner.studies.tables import format_bold

# Kinds whose members differ in their eviction rule.
HEURISTICS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "dtr": ("dtr", "dtr-full", "dtr-local", "lru", "largest", "msps", "dtr-random"),
        "megengine": ("megengine", "megengine-static"),
    }
)
WHY_NOT = MappingProxyType(
    {
        Reason.INAPPLICABLE: "does not apply",
        Reason.MEMORY: "OOM",
        Reason.THRASHING: "thrash",
        Reason.SIZE: "too large",
        Reason.TIME: "time",
    }
)
NOT_TRIED = "not tried"
PLAIN = "eager"  # PyTorch without a memory-saving method
# Reasons for a kind without results, in order of how close it came.
_NEAREST = (Reason.TIME, Reason.THRASHING, Reason.MEMORY, Reason.SIZE, Reason.INAPPLICABLE)


def get_kind(row: ComparisonRow) -> str:
    """Return the kind of a row's method: heuristics of one system, save lists of SAC, or fractions of the memory budget."""
    first, *options = row.method.split()
    if row.run_by != RunBy.TORCH:
        return next((kind for kind, members in HEURISTICS.items() if first in members), row.method)
    if first == "memory-budget":
        return f"{first} {options[-1]}"
    if first == "save-on-cpu":  # alone, and around checkpointed blocks: other methods
        return row.method
    return "sac" if first.startswith("sac") else first


def select_kind(rows: Sequence[ComparisonRow], kind: str) -> list[ComparisonRow]:
    """Return the rows of `kind`; if SAC runs, its rows include checkpointing, which is SAC with an empty save list."""
    own = [row for row in rows if get_kind(row) == kind]
    if kind == "sac" and any(row.measured_ratio is not None for row in own):
        own += [row for row in rows if get_kind(row) == "checkpoint-blocks"]
    return own


def find_best_schedule(rows: Iterable[ComparisonRow], budget_bytes: int) -> ComparisonRow | None:
    """Return the fastest simulated schedule of `rows` that fits, whatever budget it was found for; None if none fits."""
    fits = [row for row in rows if row.counted_bytes is not None and row.counted_bytes <= budget_bytes]
    return min(fits, key=lambda row: row.time_s or 0.0, default=None)


def find_best_measured(rows: Iterable[ComparisonRow], budget_bytes: int) -> ComparisonRow | None:
    """Return the fastest step of `rows` whose measured peak fits and whose gradients are right; None if there is none."""
    ran = [row for row in rows if row.measured_ratio is not None and row.measured_peak_bytes is not None]
    fits = [row for row in ran if (row.measured_peak_bytes or 0) <= budget_bytes and row.exactness != "wrong"]
    return min(fits, key=lambda row: row.measured_ratio or 0.0, default=None)


def find_undominated(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """Return measured steps that no correct step of the same kind dominates in time and peak."""
    ran = [row for row in rows if row.measured_ratio is not None and row.measured_peak_bytes is not None]
    return [row for row in ran if not any(_is_beaten(rows, row, other) for other in ran if other is not row)]


def _is_beaten(rows: Sequence[ComparisonRow], row: ComparisonRow, other: ComparisonRow) -> bool:
    if other.exactness == "wrong" or get_kind(other) != get_kind(row):
        return False
    mine, theirs = _get_measures(row), _get_measures(other)
    return all(a >= b for a, b in zip(mine, theirs, strict=True)) and (mine != theirs or rows.index(other) < rows.index(row))


def _get_measures(row: ComparisonRow) -> tuple[float, float]:
    return row.measured_ratio or 0.0, row.measured_peak_bytes or 0


def explain_none(rows: Iterable[ComparisonRow]) -> str:
    """Return in a word or two why none of `rows` has a result."""
    rows = list(rows)
    if not rows:
        return NOT_TRIED
    reasons = [Reason(row.reason) for row in rows if row.reason]
    if not reasons:
        return rows[0].status
    return WHY_NOT[min(reasons, key=_NEAREST.index)]


def build_tuned_table(rows: Sequence[ComparisonRow]) -> list[tuple[str, ...]]:
    """Return a table of PyTorch's methods at the optimum's budgets: the fastest step of each kind whose measured peak fits."""
    optima = [
        row for row in rows if row.run_by == RunBy.EXECUTOR and row.method == OPTIMUM and not row.budget.startswith(PEAK_OF)
    ]
    stock = [row for row in rows if row.run_by == RunBy.TORCH and row.method != PLAIN]
    kinds = {kind: select_kind(stock, kind) for kind in dict.fromkeys(map(get_kind, stock))}
    lines = []
    for optimum in sorted(optima, key=lambda row: -(row.budget_bytes or 0)):
        budget_bytes = optimum.budget_bytes or 0
        found = {kind: find_best_measured(own, budget_bytes) for kind, own in kinds.items()}
        times = [row.measured_ratio for row in (optimum, *found.values()) if row is not None and row.measured_ratio is not None]
        least = min(times, default=0.0)
        ours = _step_text(OPTIMUM, optimum, least) if optimum.measured_ratio is not None else explain_none([optimum])
        theirs = (
            explain_not_measured(own, budget_bytes) if (best := found[kind]) is None else _step_text(kind, best, least)
            for kind, own in kinds.items()
        )
        lines.append((f"{format_bytes(budget_bytes)} ({optimum.budget})", ours, *theirs))
    return [("budget", "optimal schedule", *kinds), *lines]


def _step_text(kind: str, row: ComparisonRow, least: float) -> str:
    """Return measured time and peak of a step with its options as text, in bold if it reads like the `least` time."""
    time = f"{row.measured_ratio:.2f}x"
    options = row.method if kind == "sac" else row.method.partition(" ")[2]
    return f"{format_bold(time, best=time == f'{least:.2f}x')}, {row.measured_memory}{f' ({options})' if options else ''}"


def explain_not_measured(kind: Sequence[ComparisonRow], budget_bytes: int) -> str:
    """Return in a word or two the reason why no step of `kind` both fits by its measured peak and has right gradients."""
    peaks = [row.measured_peak_bytes for row in kind if row.measured_peak_bytes is not None]
    if peaks:
        return "wrong" if min(peaks) <= budget_bytes else WHY_NOT[Reason.MEMORY]
    return explain_none(kind) if kind and all(row.reason for row in kind) else "does not run"
