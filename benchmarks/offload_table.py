"""Rows of methods that recompute, offload or both, as text: overheads side by side, and what holds of all of them."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from benchmarks.offload_case import METHODS
from benchmarks.offload_rows import BOTH, OFFLOAD, OURS, RECOMPUTE, Row
from graphs.units import format_bytes, format_ratio
from planner.report.tables import as_markdown
from solvers.result import Status

GAP = 0.01  # that is asked for, in four cases of five
_FLOATING = 1e-9

Case = tuple[str, str]  # model and budget


def table(rows: Sequence[Row]) -> str:
    """For each suite the overhead of each method over the step that keeps everything, and what holds of its rows."""
    suites = dict.fromkeys(row.suite for row in rows)
    return "\n".join(_of_suite(suite, [row for row in rows if row.suite == suite]) for suite in suites)


def _of_suite(suite: str, rows: Sequence[Row]) -> str:
    cases = _cases(rows)
    methods = [method for method in METHODS if any(method in found for found in cases.values())]
    header = ("model", "budget", *OURS, "bound", "gap", "seconds", "on the host", *(m for m in methods if m not in OURS))
    lines = [header]
    for (model, budget), found in cases.items():
        both = found.get(BOTH)
        bound = None if both is None or both.bound_s is None else both.bound_s / both.base_s - 1
        lines.append(
            (
                model,
                f"{budget} ({format_bytes(next(iter(found.values())).budget_bytes)})",
                *(_overhead(found.get(method)) for method in OURS),
                _ratio(bound),
                _ratio(None if both is None else both.gap),
                "" if both is None or both.seconds is None else f"{both.seconds:.0f}",
                "" if both is None or not both.host_bytes else format_bytes(both.host_bytes),
                *(_overhead(found.get(method)) for method in methods if method not in OURS),
            )
        )
    return f"## {suite}\n\nThe link: {rows[0].link}.\n\n{as_markdown(lines)}\n{_holds(cases)}\n"


def _cases(rows: Iterable[Row]) -> dict[Case, dict[str, Row]]:
    cases: dict[Case, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault((row.model, row.budget), {})[row.method] = row
    return cases


def below_bound(rows: Iterable[Row]) -> list[Row]:
    """Rows of methods whose schedule takes less than the bound on all of them."""
    found: list[Row] = []
    for case in _cases(rows).values():
        bound = case[BOTH].bound_s if BOTH in case else None
        if bound is not None:
            found += [row for row in case.values() if row.time_s is not None and row.time_s < bound * (1 - _FLOATING)]
    return found


def _holds(cases: Mapping[Case, Mapping[str, Row]]) -> str:
    """Sentences on all cases in which both were solved for."""
    solved = [found for found in cases.values() if BOTH in found]
    gaps = [found[BOTH].gap for found in solved]
    tight = sum(gap is not None and gap <= GAP + _FLOATING for gap in gaps)
    known = sum(found[BOTH].time_s is not None for found in solved)
    sentences = [
        f"Both: a schedule in {known} of {len(solved)} cases, a gap of at most {GAP:.0%} in {tight}.",
        f"Slower than either alone: {sum(_worse(found) for found in solved)}.",
        f"Methods below the bound: {len(below_bound(row for found in solved for row in found.values()))}.",
    ]
    for method in [method for method in METHODS if method not in (BOTH, OFFLOAD)]:
        pairs = [(found[method].time_s, found[BOTH].time_s) for found in solved if method in found]
        ratios = [theirs / ours for theirs, ours in pairs if theirs is not None and ours is not None]
        if ratios:
            what = f"{method}: a schedule in {len(ratios)} of {len(pairs)} cases"
            sentences.append(f"{what}, there {median(ratios):.2f} of the time of both in the median, {max(ratios):.2f} at most.")
    return "\n".join(f"- {sentence}" for sentence in sentences) + "\n"


def _worse(found: Mapping[str, Row]) -> bool:
    alone = [found[m].time_s for m in (RECOMPUTE, OFFLOAD) if m in found]
    best = min((time_s for time_s in alone if time_s is not None), default=None)
    both_s = found[BOTH].time_s
    return best is not None and (both_s is None or both_s > best * (1 + _FLOATING))


def _overhead(row: Row | None) -> str:
    if row is None:
        return ""
    if row.overhead is not None:
        return format_ratio(row.overhead)
    return row.status if row.status == Status.INFEASIBLE else row.reason or row.status


def _ratio(value: float | None) -> str:
    return "" if value is None else format_ratio(value)
