"""Rows of sets of options as text: least budgets and overheads side by side, and what holds of all of them."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from benchmarks.options_case import BUDGETS, SHARES, TOLERANCE, faithful_of, sets_of
from benchmarks.options_rows import LEAST, Bits, ErrorRow, Offer, Row, set_name
from graphs.units import format_bytes, format_ratio, format_seconds
from planner.report.tables import as_markdown
from solvers.result import Status

FLOATING = 1e-9
_NOT_RUN = "not run"
_HEAD = """\
Overhead over the step that keeps everything, with the proved gap in brackets, at shares of its peak. Least: the least budget \
that a schedule was found for, as a share of that peak, with what is proved in brackets. Steps are timed by the roofline of an \
H200. Options that offer nothing on a model are in none of its sets.
"""

_ERRORS = (
    *("model", "option", "budget", "inexact ops", "loss", "largest", "norm", "peak predicted", "measured"),
    *("time predicted", "measured"),
)
_ERRORS_HEAD = """\
Small steps on the CPU with one option, beside the same steps without, which keep everything. Budgets lie between the least with \
the option and the peak without. Inexact ops: executions in the plan of ops that may differ. Errors are relative: of the loss; \
the most that an element of a gradient differs, over the largest of that gradient; and the distance of all gradients, in one \
vector, over its length. Peaks are shares of the peak without, times multiples of the time without.
"""


def table(rows: Sequence[Row], offers: Sequence[Offer], specs: Mapping[str, str]) -> str:
    """A section for each model of `specs` that was run, and the names of those that were not."""
    run = [model for model in specs if any(offer.model == model for offer in offers)]
    sections = [
        _section(model, specs[model], [r for r in rows if r.model == model], [o for o in offers if o.model == model])
        for model in run
    ]
    missing = [model for model in specs if model not in run]
    return "\n".join((_HEAD, *_gaps(rows, offers), *sections, *([f"Not run: {', '.join(missing)}.\n"] if missing else [])))


def _gaps(rows: Sequence[Row], offers: Sequence[Offer]) -> list[str]:
    """How near to their bounds the solves of all models come with all options together but lossy ones, if there are any."""
    models = {offer.model for offer in offers}
    together = {model: set_name(faithful_of([offer for offer in offers if offer.model == model])) for model in models}
    found = [row.gap for row in rows if row.budget != LEAST and row.options == together.get(row.model) and row.gap is not None]
    if not found:
        return []
    within = [f"{sum(gap <= most for gap in found)} with a gap of at most {most:.0%}" for most in (0.01, 0.02)]
    return [f"All options together but lossy ones: of {len(found)} budgets with a schedule {', '.join(within)}.\n"]


def _section(model: str, spec: str, rows: Sequence[Row], offers: Sequence[Offer]) -> str:
    bits = {offer.option: offer.bits for offer in offers}
    sets = sets_of(offers)
    lossy = [some for some in sets if any(bits[name] is Bits.LOSSY for name in some)]
    found = {(row.options, row.budget): row for row in rows}
    parts = [f"## {model}", f"`{spec}`{_size(rows)}.", _offered(offers), _lines([s for s in sets if s not in lossy], bits, found)]
    if lossy:
        parts += ["With a lossy option:", _lines(lossy, bits, found)]
    return "\n\n".join((*(part.strip() for part in parts), _holds(rows)))


def _size(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    return f": peak {format_bytes(rows[0].base_peak_bytes)}, {format_seconds(rows[0].base_s)} a step"


def _offered(offers: Sequence[Offer]) -> str:
    """What each option offers, in a sentence."""
    said = [f"{o.option} {o.ops:,} ops ({o.bits})" if o.ops else f"{o.option} nothing" for o in offers]
    return f"Offered: {', '.join(said)}."


def _lines(sets: Collection[tuple[str, ...]], bits: Mapping[str, Bits], found: Mapping[tuple[str, str], Row]) -> str:
    """A table with a line for each of `sets`."""
    lines = [("options", "bits", LEAST, *SHARES)]
    for options in sets:
        name = set_name(options)
        most = max((bits[option] for option in options), key=tuple(Bits).index, default=Bits.EXACT)
        cells = (_cell(found.get((name, budget))) for budget in BUDGETS)
        lines.append((name.replace("+", " + "), str(most), *cells))
    return as_markdown(lines)


def _cell(row: Row | None) -> str:
    if row is None:
        return _NOT_RUN
    if row.budget == LEAST and row.budget_bytes is not None and row.proved_bytes is not None:
        return f"{_share(row.budget_bytes, row)} ({_share(row.proved_bytes, row)})"
    if row.overhead is not None:
        return format_ratio(row.overhead) + (f" ({format_ratio(row.gap)})" if row.gap is not None else "")
    return row.status if row.status == Status.INFEASIBLE else row.reason or row.status


def _share(size_bytes: int, row: Row) -> str:
    return format_ratio(size_bytes / row.base_peak_bytes)


def worse(rows: Iterable[Row], by: float) -> list[tuple[Row, Row]]:
    """Pairs of rows for one budget: of a set, and of one that contains it and does worse by a part of the other's."""
    there = list(rows)
    return [(a, b) for a in there for b in there if _pair(a, b) and _is_worse(b, a, by)]


def below_bound(rows: Iterable[Row]) -> list[tuple[Row, Row]]:
    """Pairs of rows for one budget: of a set, and of one that contains it and has a bound above its schedule, which is wrong."""
    there = list(rows)
    return [(a, b) for a in there for b in there if (a is b or _pair(a, b)) and _is_below(a, b)]


def _pair(a: Row, b: Row) -> bool:
    return (a.model, a.budget) == (b.model, b.budget) and a.names < b.names


def _is_worse(row: Row, than: Row, by: float) -> bool:
    if row.budget == LEAST:
        return row.budget_bytes is not None and than.budget_bytes is not None and row.budget_bytes > than.budget_bytes * (1 + by)
    return than.time_s is not None and (row.time_s is None or row.time_s > than.time_s * (1 + by))


def _is_below(row: Row, bounded: Row) -> bool:
    if row.budget == LEAST:
        return row.budget_bytes is not None and bounded.proved_bytes is not None and row.budget_bytes < bounded.proved_bytes
    if row.time_s is None:
        return False
    limit_s = bounded.bound_s or 0.0
    return bounded.status == Status.INFEASIBLE or row.time_s < limit_s * (1 - FLOATING)


def _holds(rows: Sequence[Row]) -> str:
    """Sentences on the rows of one model."""
    at_shares = [row for row in rows if row.budget != LEAST]
    infeasible = sum(row.status == Status.INFEASIBLE for row in at_shares)
    unknown = sum(row.time_s is None for row in at_shares) - infeasible
    sentences = [
        f"Of {len(at_shares)} budgets {infeasible} proved infeasible, {unknown} not decided.",
        f"Schedules below a bound: {len(below_bound(rows))}.",
    ]
    pairs = worse(rows, TOLERANCE)
    said = "; ".join(f"{b.options} at {b.budget}, {_value(b)}, than {a.options}, {_value(a)}" for a, b in pairs)
    sentences.append(
        f"Worse with an option more, by over {TOLERANCE:.1%}: {len(pairs)}{f' ({said})' if said else ''}; by less, which is "
        f"within the tolerance of solves: {len(worse(rows, FLOATING)) - len(pairs)}."
    )
    sentences += [f"The link: {link}." for link in dict.fromkeys(row.link for row in rows if row.link)]
    by_limit: dict[str, dict[str, None]] = {}
    for row in rows:
        by_limit.setdefault(row.limit, {})[row.options.replace("+", " + ")] = None
    limits = [limit + (f" ({'; '.join(names)})" if len(by_limit) > 1 else "") for limit, names in by_limit.items()]
    sentences.append(f"Limit of each solve: {', '.join(limits)}.")
    return "\n".join(f"- {sentence}" for sentence in sentences) + "\n"


def _value(row: Row) -> str:
    """What is compared with other sets, to more digits than a cell has."""
    if row.budget == LEAST:
        return f"{row.budget_bytes:,} B"
    return row.status if row.overhead is None else f"{row.overhead:.4%}"


def error_table(rows: Sequence[ErrorRow], run: Collection[str]) -> str:
    """Errors of options that round, then of lossy ones; and of which of the models `run` nothing was measured."""
    parts = [_ERRORS_HEAD]
    for bits in (Bits.ROUNDING, Bits.LOSSY):
        if found := [row for row in rows if row.bits is bits]:
            parts += [f"## {str(bits).capitalize()}", as_markdown([_ERRORS, *map(_error_cells, found)]).strip()]
    if exact := [f"{row.option} on {row.model}" for row in rows if row.bits is Bits.EXACT]:
        parts.append(f"Nothing inexact is offered by: {', '.join(exact)}.")
    if missing := [model for model in run if not any(row.model == model for row in rows)]:
        parts.append(f"Not run: {', '.join(missing)}.")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _error_cells(row: ErrorRow) -> tuple[str, ...]:
    budget = row.budget if row.budget_bytes is None else f"{row.budget} ({format_bytes(row.budget_bytes)})"
    if row.error:
        return (row.model, row.option, budget, row.error, *("" for _ in _ERRORS[4:]))
    assert row.base_peak_bytes is not None
    peaks = (row.predicted_peak_bytes, row.measured_peak_bytes)
    return (
        row.model,
        row.option,
        budget,
        "" if row.differing is None else str(row.differing),
        *("" if error is None else f"{error:.1e}" for error in (row.loss_error, row.largest_error, row.gradient_error)),
        *("" if peak is None else f"{peak / row.base_peak_bytes:.2%}" for peak in peaks),
        *("" if ratio is None else f"{ratio:.3f}x" for ratio in (row.predicted_ratio, row.measured_ratio)),
    )
