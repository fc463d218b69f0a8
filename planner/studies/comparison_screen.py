"""A comparison for a terminal: one row per method, the best first; ``comparisons`` has the whole table."""

from collections.abc import Sequence

from planner.graphs.units import format_bytes
from planner.show.views.text import format_table
from planner.studies.comparison_rows import OPTIMUM, PEAK_OF, ComparisonRow, RunBy, format_bound, list_methods, select_simulated
from planner.studies.comparisons import format_cell
from planner.studies.tables import group_by

METHODS, _BUDGETS = 8, 4  # that fit a terminal of 100 columns
_OURS, _BEST = "ours", "best baseline"


def format_screen(rows: Sequence[ComparisonRow], *, methods: int = METHODS) -> str:
    """Return the overhead of the best methods at each budget, by simulation or, if steps were run, as measured.

    Methods are sorted by the number of budgets that they fit, then by their mean overhead there.

    Args:
        rows: of one graph.
        methods: number of methods to show; our own is always among them.
    """
    replayed = [row for row in rows if row.run_by == RunBy.EXECUTOR and not row.budget.startswith(PEAK_OF)]
    shown = replayed or select_simulated(rows)
    if not shown:
        return ""
    budgets = sorted({row.budget_bytes or 0 for row in shown}, reverse=True)
    of_method = {name: {row.budget_bytes: row for row in shown if row.method == name} for name in list_methods(shown)}
    ranked = sorted(of_method, key=lambda name: _compute_rank(list(of_method[name].values())))
    best = next((name for name in ranked if name != OPTIMUM and _compute_rank(list(of_method[name].values()))[0] < 0), None)
    listed = ranked[:methods]
    if OPTIMUM in ranked and OPTIMUM not in listed:
        listed = [*ranked[: methods - 1], OPTIMUM]
    columns = budgets[:_BUDGETS]
    labels = {budget: own[-1].budget for budget, own in group_by(shown, "budget_bytes").items()}
    header = ("method", *(f"{format_bytes(size)}{_share(labels[size])}" for size in columns), "")
    lines = [(name, *(_format_cell(of_method[name].get(size)) for size in columns), _mark(name, best)) for name in listed]
    said = "measured, over eager PyTorch" if replayed else "by simulation, over the step without recomputation"
    parts = [
        f"overhead {said}",
        format_table(header, [*lines, ("bound", *(format_bound(shown, budget) for budget in columns), "")], numbers=0),
    ]
    some = [
        f"{len(part)} of {len(whole)} {name}"
        for name, part, whole in (("methods", listed, ranked), ("budgets", columns, budgets))
        if len(part) < len(whole)
    ]
    if some:
        parts.append(f"{' and '.join(some)}; table.md has all")
    return "\n".join(parts)


def _get_overhead(row: ComparisonRow) -> float | None:
    """Return the measured overhead of a step that was run and has right gradients, else that of its schedule."""
    if row.run_by == RunBy.SIMULATOR:
        return row.overhead
    return None if row.measured_ratio is None or row.exactness == "wrong" else row.measured_ratio - 1


def _compute_rank(rows: Sequence[ComparisonRow]) -> tuple[int, float]:
    """Return the key by which methods are sorted: first those that fit most budgets, then those of least mean overhead."""
    found = [overhead for row in rows if (overhead := _get_overhead(row)) is not None]
    return -len(found), sum(found) / len(found) if found else 0.0


def _format_cell(row: ComparisonRow | None) -> str:
    if row is None:
        return "-"
    overhead = _get_overhead(row)
    if overhead is None:
        return "wrong" if row.exactness == "wrong" else format_cell(row)
    return f"{overhead:z.2%}"


def _share(label: str) -> str:
    return f" ({label})" if label.endswith("%") else ""


def _mark(name: str, best: str | None) -> str:
    return _OURS if name == OPTIMUM else _BEST if name == best else ""
