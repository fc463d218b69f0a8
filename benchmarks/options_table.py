"""The rows of ``benchmarks.options``, their table, and what must hold between sets of options."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from benchmarks.options_errors import Bits
from benchmarks.solves import TOLERANCE, Solved
from planner.graphs.units import format_bytes, format_ratio, format_seconds
from planner.solvers.result import Status
from planner.studies.rows import Made, declare_column, declare_key, declare_text, declare_value
from planner.studies.tables import format_bullets, group_by, join_markdown

NONE = "none"  # the set without an option
LEAST = "least"  # the budget of a search for the least one
BUDGETS = (LEAST, "70%", "50%", "30%", "20%")  # shares of the peak of the program
FLOATING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer(Made):
    """The offer of one option on one graph."""

    model: str = declare_key()
    option: str = declare_key()
    ops: int = declare_column("optional ones that it adds, or such as may write over an input")
    bits: Bits = declare_column("the most that one of them may differ from the program")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionsRow(Solved):
    """One set of options at one budget."""

    model: str = declare_key()
    options: str = declare_key("the set, of those that offer something on this graph")
    budget: str = declare_key("a share of the program's peak, or least: the least that a schedule was found for")
    proved_bytes: int | None = declare_value("of the least budget: no schedule needs less")
    base_peak_bytes: int = declare_column("of the step that keeps everything")
    seconds: float | None = declare_value("that the solve took")
    limit: str = declare_column("what it might have taken, seconds or units of work")
    link: str = declare_text("what it carries, and where its figures are from; empty where nothing is copied")

    @property
    def names(self) -> frozenset[str]:
        """The options of the set."""
        return frozenset() if self.options == NONE else frozenset(self.options.split("+"))

    @property
    def found(self) -> float | None:
        """Value that is compared between sets: the bytes of the least budget, or else the time; None without a schedule."""
        return self.budget_bytes if self.budget == LEAST else self.time_s

    @property
    def proved(self) -> float | None:
        """Proved lower bound on that value."""
        if self.budget == LEAST:
            return self.proved_bytes
        return math.inf if self.status == Status.INFEASIBLE else (self.bound_s or 0.0) * (1 - FLOATING)


def set_name(some: Sequence[str]) -> str:
    """Return the name of a set of options, in rows."""
    return "+".join(some) or NONE


def list_sets(offers: Sequence[Offer]) -> tuple[tuple[str, ...], ...]:
    """Return the sets of options that are solved for, each once: those that offer nothing are in none."""
    every, exact = (select_options_within(offers, bits) for bits in (Bits.LOSSY, Bits.EXACT))
    return tuple(dict.fromkeys(((), *((name,) for name in every), exact, select_options_within(offers, Bits.ROUNDING), every)))


def select_options_within(offers: Sequence[Offer], most: Bits) -> tuple[str, ...]:
    """Return the options that offer something, and differ from the program by `most` at the most."""
    kinds = tuple(Bits)
    return tuple(offer.option for offer in offers if offer.ops and kinds.index(offer.bits) <= kinds.index(most))


_HEAD = """\
Overhead over the step that keeps everything, with the proved gap in brackets, at shares of its peak. Least: the least budget \
for which a schedule was found, as a share of that peak, with the proved lower bound in brackets. Times are modelled by the \
roofline of an H200. Options that offer nothing on a model are left out of its sets.
"""


def format_table(rows: Iterable[OptionsRow], offers: Iterable[Offer], specs: Mapping[str, str]) -> str:
    """Return a section for each model of `specs` that was run, and the names of those that were not."""
    rows_of, offers_of = group_by(rows, "model"), group_by(offers, "model")
    run = [model for model in specs if model in offers_of]
    sections = [_format_section(model, specs[model], rows_of.get(model, []), offers_of[model]) for model in run]
    missing = [model for model in specs if model not in run]
    gaps = _format_gaps(rows_of, offers_of)
    return "\n".join((_HEAD, *gaps, *sections, *([f"Not run: {', '.join(missing)}.\n"] if missing else [])))


def _format_gaps(rows: Mapping[str, Sequence[OptionsRow]], offers: Mapping[str, Sequence[Offer]]) -> list[str]:
    """Return a line about the gaps of all models with all lossless options together; an empty list without schedules."""
    together = {model: set_name(select_options_within(own, Bits.ROUNDING)) for model, own in offers.items()}
    solves = (row for model, name in together.items() for row in rows.get(model, ()) if row.options == name)
    found = [row.gap for row in solves if row.budget != LEAST and row.gap is not None]
    if not found:
        return []
    within = [f"{sum(gap <= most for gap in found)} with a gap of at most {most:.0%}" for most in (0.01, 0.02)]
    return [f"All options together but lossy ones: of {len(found)} budgets with a schedule {', '.join(within)}.\n"]


def _format_section(model: str, spec: str, rows: Sequence[OptionsRow], offers: Sequence[Offer]) -> str:
    bits = {offer.option: offer.bits for offer in offers}
    sets = list_sets(offers)
    lossy = [some for some in sets if any(bits[name] is Bits.LOSSY for name in some)]
    found = {(row.options, row.budget): row for row in rows}
    size = f": peak {format_bytes(rows[0].base_peak_bytes)}, {format_seconds(rows[0].base_s)} a step" if rows else ""
    offered = (f"{o.option} {o.ops:,} ops ({o.bits})" if o.ops else f"{o.option} nothing" for o in offers)
    parts = [f"## {model}", f"`{spec}`{size}.", f"Offered: {', '.join(offered)}."]
    parts += [_format_lines([some for some in sets if some not in lossy], bits, found)]
    parts += ["With a lossy option:", _format_lines(lossy, bits, found)] if lossy else []
    return "\n\n".join((*(part.strip() for part in parts), format_bullets(_summarize(rows))))


def _format_lines(
    sets: Collection[tuple[str, ...]], bits: Mapping[str, Bits], found: Mapping[tuple[str, str], OptionsRow]
) -> str:
    """Return a table with a line for each of `sets`."""
    lines = [("options", "bits", *BUDGETS)]
    for some in sets:
        most = max((bits[option] for option in some), key=tuple(Bits).index, default=Bits.EXACT)
        cells = (_format_cell(found.get((set_name(some), budget))) for budget in BUDGETS)
        lines.append((set_name(some).replace("+", " + "), str(most), *cells))
    return join_markdown(lines)


def _format_cell(row: OptionsRow | None) -> str:
    if row is None:
        return "not run"
    if row.budget == LEAST and row.budget_bytes is not None and row.proved_bytes is not None:
        found, proved = (format_ratio(size / row.base_peak_bytes) for size in (row.budget_bytes, row.proved_bytes))
        return f"{found} ({proved})"
    return row.overhead_text + ("" if row.gap is None else f" ({format_ratio(row.gap)})")


def find_worse(rows: Sequence[OptionsRow], share: float) -> list[tuple[OptionsRow, OptionsRow]]:
    """Return pairs of rows for one budget: of a set, and of one that contains it and does worse by a share of the other's."""
    pairs = ((few, many) for few, many in _iterate_pairs(rows) if few.found is not None)
    # A search for the least budget that finds none was stopped.
    return [
        (few, many)
        for few, many in pairs
        if (many.budget != LEAST if many.found is None else many.found > few.found * (1 + share))
    ]


def find_below_bound(rows: Sequence[OptionsRow]) -> list[tuple[OptionsRow, OptionsRow]]:
    """Return pairs of rows: of a set, and of itself or one that contains it, whose bound its schedule is below."""
    pairs = (*zip(rows, rows, strict=True), *_iterate_pairs(rows))
    known = ((row, other) for row, other in pairs if row.found is not None and other.proved is not None)
    return [(row, other) for row, other in known if row.found < other.proved]


def _iterate_pairs(rows: Sequence[OptionsRow]) -> Iterator[tuple[OptionsRow, OptionsRow]]:
    """Return pairs of rows for one budget: of a set, and of one that contains it."""
    pairs = product(rows, repeat=2)
    return ((a, b) for a, b in pairs if (a.model, a.budget) == (b.model, b.budget) and a.names < b.names)


def _summarize(rows: Sequence[OptionsRow]) -> Iterator[str]:
    """Yield sentences on the rows of one model."""
    at_shares = [row for row in rows if row.budget != LEAST]
    infeasible = sum(row.status == Status.INFEASIBLE for row in at_shares)
    unknown = sum(row.time_s is None for row in at_shares) - infeasible
    yield f"Of {len(at_shares)} budgets {infeasible} proved infeasible, {unknown} not decided."
    yield f"Schedules below a bound: {len(find_below_bound(rows))}."
    pairs = find_worse(rows, TOLERANCE)
    said = "; ".join(f"{b.options} at {b.budget}, {_format_value(b)}, than {a.options}, {_format_value(a)}" for a, b in pairs)
    yield (
        f"Worse with an option more, by over {TOLERANCE:.1%}: {len(pairs)}{f' ({said})' if said else ''}; by less, which is "
        f"within the tolerance of solves: {len(find_worse(rows, FLOATING)) - len(pairs)}."
    )
    yield from (f"The link: {link}." for link in group_by(rows, "link") if link)
    limits = group_by(rows, "limit")
    names = {limit: "; ".join(group_by(own, "options")).replace("+", " + ") for limit, own in limits.items()}
    yield f"Limit of each solve: {', '.join(f'{limit} ({names[limit]})' if len(limits) > 1 else limit for limit in limits)}."


def _format_value(row: OptionsRow) -> str:
    """Return the value that is compared with other sets, with more digits than its cell."""
    if row.budget == LEAST:
        return f"{row.budget_bytes:,} B"
    return row.status if row.overhead is None else f"{row.overhead:.4%}"
