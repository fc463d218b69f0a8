"""Gains of options, each alone and together, and the errors of inexact ones: ``make bench-options``.

Results in results/options: least budgets and overheads at shares of the peak, of steps that are traced with fake tensors and
timed by the roofline of an H200 (table.md); and errors of small steps that are run on the CPU (errors.md). Rows in the CSVs are
skipped, so that the benchmark, which takes some hours, can be interrupted and resumed.
"""

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product

from benchmarks import offload
from benchmarks.command import carry_out, command_line, one_thread
from benchmarks.options_errors import ERRORS, MEASURED, Bits, bits_of
from benchmarks.solves import TOLERANCE, Solved, modelled, solved
from graphs.ir import Graph
from graphs.options.option import Need
from graphs.simulate import simulate
from graphs.units import format_bytes, format_ratio, format_seconds
from planner import options
from planner.attributes import attributes
from planner.budgets import budget_in_bytes
from planner.capture.options import OPTIONS, check_options, holding, needs, traced_options
from planner.option_settings import OptionSettings, option_settings
from planner.plans.summary import summarize
from planner.settings import SolveSettings
from planner.studies.experiment import Study
from planner.studies.rows import KeptRows, Made, column, key, missing_keys, provenance, text, value
from planner.studies.tables import as_markdown, bullets, by
from solvers.clock import Clock
from solvers.least import least_budget
from solvers.order.reorder import reordered
from solvers.result import Status

MODELS: Mapping[str, str] = {
    "gpt2-medium": offload.MODELS["gpt2-medium"],
    "head-100k": "zoo:mlp,batch=8192,width=1024,layers=4,classes=100000",
    "mobilenet_v2": "zoo:mobilenet_v2,batch=256",
    "gpt2-small": "zoo:gpt2,batch=8,seq=1024,dtype=bfloat16",
    "gpt2-small-4k": "zoo:gpt2,batch=2,seq=4096,dtype=bfloat16",
    "gpt2-medium-4k": "zoo:gpt2,layers=24,width=1024,heads=16,batch=2,seq=4096,dtype=bfloat16",
    **{name: offload.MODELS[name] for name in ("llama-16", "vit-l", "resnet50", "unet")},
}
# Placement needs other devices.
NAMES = tuple(option.to_try for name, option in OPTIONS.items() if Need.DEVICES not in needs((name,)))
NONE = "none"  # the set without an option
LEAST = "least"  # the budget of a search for the least one
SHARES = ("70%", "50%", "30%", "20%")  # of the peak of the program
BUDGETS = (LEAST, *SHARES)
LIMIT_S = 60.0
FLOATING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer(Made):
    """The offer of one option on one graph."""

    model: str = key()
    option: str = key()
    ops: int = column("optional ones that it adds, or such as may write over an input")
    bits: Bits = column("the most that one of them may differ from the program")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionsRow(Solved):
    """One set of options at one budget."""

    model: str = key()
    options: str = key("the set, of those that offer something on this graph")
    budget: str = key("a share of the program's peak, or least: the least that a schedule was found for")
    proved_bytes: int | None = value("of the least budget: no schedule needs less")
    base_peak_bytes: int = column("of the step that keeps everything")
    seconds: float | None = value("that the solve took")
    limit: str = column("what it might have taken, seconds or units of work")
    link: str = text("what it carries, and where its figures are from; empty where nothing is copied")

    @property
    def names(self) -> frozenset[str]:
        """The options of the set."""
        return frozenset() if self.options == NONE else frozenset(self.options.split("+"))


def set_name(some: Sequence[str]) -> str:
    """Return the name of a set of options, in rows."""
    return "+".join(some) or NONE


def sets_of(offers: Sequence[Offer]) -> tuple[tuple[str, ...], ...]:
    """Return the sets of options that are solved for, each once: those that offer nothing are in none."""
    every, exact = (options_within(offers, bits) for bits in (Bits.LOSSY, Bits.EXACT))
    return tuple(dict.fromkeys(((), *((name,) for name in every), exact, options_within(offers, Bits.ROUNDING), every)))


def options_within(offers: Sequence[Offer], most: Bits) -> tuple[str, ...]:
    """Return the options that offer something, and differ from the program by `most` at the most."""
    kinds = tuple(Bits)
    return tuple(offer.option for offer in offers if offer.ops and kinds.index(offer.bits) <= kinds.index(most))


@dataclass(frozen=True)
class OptionsCase:
    """One model on one device.

    Attributes:
        model: its name.
        make: returns the timed step with all options of `names` that are found in it.
        names: options, in the order of the registry.
        clock: returns a new clock, for a solve or a search for the least budget.
        known_offers: known offers of options.
    """

    model: str
    make: Callable[[], Graph]
    names: Sequence[str]
    clock: Callable[[], Clock]
    known_offers: KeptRows[Offer]

    @cached_property
    def traced(self) -> Graph:
        """The step, which is traced when it is asked for."""
        return self.make()

    @cached_property
    def ordered(self) -> Graph:
        """The step in the common order of all sets of options: a bound for one set also bounds its subsets."""
        return reordered(holding(self.traced, traced_options(self.names))).graph

    @cached_property
    def offers(self) -> tuple[Offer, ...]:
        """The offers of all options."""
        found = []
        for name in self.names:
            added = [op for op in self.offered((name,)).ops if op.optional or op.overwrites]
            found.append(Offer(model=self.model, option=name, ops=len(added), bits=bits_of(added), **provenance()))
        return tuple(found)

    def offered(self, some: Sequence[str]) -> Graph:
        """Return the step with a set of options."""
        return _settings(some).apply(self.ordered)


def solve(case: OptionsCase, known: Sequence[OptionsRow]) -> Iterator[OptionsRow]:
    """Yield the missing rows of a model, which is traced if there are any."""
    offers: Sequence[Offer] = [offer for offer in case.known_offers.of(case.model) if offer.option in case.names]
    if len(offers) < len(case.names):
        offers = case.offers
        case.known_offers.add(*offers)
    for some in sets_of(offers):
        if missing := missing_keys(product([set_name(some)], BUDGETS), known, "options", "budget"):
            graph = case.offered(some)
            yield from (_solved(case, some, graph, budget) for _, budget in missing)


def _solved(case: OptionsCase, some: Sequence[str], graph: Graph, budget: str) -> OptionsRow:
    options, limit, traced = _settings(some), case.clock(), case.traced
    peak_bytes = summarize(traced).keep_everything_peak_bytes
    row = OptionsRow(
        model=case.model,
        options=set_name(some),
        budget=budget,
        budget_bytes=None if budget == LEAST else budget_in_bytes(budget, peak_bytes),
        base_s=traced.time_s,
        base_peak_bytes=peak_bytes,
        limit=limit.amount(limit.limit),
        link=str(options.link(traced.provenance)) if options.offloads else "",
        **provenance(),
    )
    if budget != LEAST:
        return solved(row, graph, case.clock())[0]
    begin = time.monotonic()
    bracket = least_budget(graph, clock=case.clock())
    seconds = time.monotonic() - begin
    judged = attributes(simulate(graph, bracket.schedule), "time_s", "peak_bytes")
    found = {"budget_bytes": bracket.found_bytes, "proved_bytes": bracket.proved_bytes}
    return replace(row, status=str(Status.FEASIBLE), seconds=seconds, **judged, **found)


def _settings(some: Sequence[str]) -> OptionSettings:
    return option_settings(some, host_budget=offload.HOST if Need.LINK in needs(some) else None)


_HEAD = """\
Overhead over the step that keeps everything, with the proved gap in brackets, at shares of its peak. Least: the least budget \
that a schedule was found for, as a share of that peak, with what is proved in brackets. Steps are timed by the roofline of an \
H200. Options that offer nothing on a model are in none of its sets.
"""


def table(rows: Iterable[OptionsRow], offers: Iterable[Offer], specs: Mapping[str, str]) -> str:
    """Return a section for each model of `specs` that was run, and the names of those that were not."""
    rows_of, offers_of = by(rows, "model"), by(offers, "model")
    run = [model for model in specs if model in offers_of]
    sections = [_section(model, specs[model], rows_of.get(model, []), offers_of[model]) for model in run]
    missing = [model for model in specs if model not in run]
    gaps = _gaps(rows_of, offers_of)
    return "\n".join((_HEAD, *gaps, *sections, *([f"Not run: {', '.join(missing)}.\n"] if missing else [])))


def _gaps(rows: Mapping[str, Sequence[OptionsRow]], offers: Mapping[str, Sequence[Offer]]) -> list[str]:
    """Return a line about the gaps of all models with all lossless options together; an empty list without schedules."""
    together = {model: set_name(options_within(own, Bits.ROUNDING)) for model, own in offers.items()}
    solves = (row for model, name in together.items() for row in rows.get(model, ()) if row.options == name)
    found = [row.gap for row in solves if row.budget != LEAST and row.gap is not None]
    if not found:
        return []
    within = [f"{sum(gap <= most for gap in found)} with a gap of at most {most:.0%}" for most in (0.01, 0.02)]
    return [f"All options together but lossy ones: of {len(found)} budgets with a schedule {', '.join(within)}.\n"]


def _section(model: str, spec: str, rows: Sequence[OptionsRow], offers: Sequence[Offer]) -> str:
    bits = {offer.option: offer.bits for offer in offers}
    sets = sets_of(offers)
    lossy = [some for some in sets if any(bits[name] is Bits.LOSSY for name in some)]
    found = {(row.options, row.budget): row for row in rows}
    size = f": peak {format_bytes(rows[0].base_peak_bytes)}, {format_seconds(rows[0].base_s)} a step" if rows else ""
    offered = (f"{o.option} {o.ops:,} ops ({o.bits})" if o.ops else f"{o.option} nothing" for o in offers)
    parts = [f"## {model}", f"`{spec}`{size}.", f"Offered: {', '.join(offered)}."]
    parts += [_lines([some for some in sets if some not in lossy], bits, found)]
    parts += ["With a lossy option:", _lines(lossy, bits, found)] if lossy else []
    return "\n\n".join((*(part.strip() for part in parts), bullets(_holds(rows))))


def _lines(sets: Collection[tuple[str, ...]], bits: Mapping[str, Bits], found: Mapping[tuple[str, str], OptionsRow]) -> str:
    """Return a table with a line for each of `sets`."""
    lines = [("options", "bits", *BUDGETS)]
    for some in sets:
        most = max((bits[option] for option in some), key=tuple(Bits).index, default=Bits.EXACT)
        cells = (_cell(found.get((set_name(some), budget))) for budget in BUDGETS)
        lines.append((set_name(some).replace("+", " + "), str(most), *cells))
    return as_markdown(lines)


def _cell(row: OptionsRow | None) -> str:
    if row is None:
        return "not run"
    if row.budget == LEAST and row.budget_bytes is not None and row.proved_bytes is not None:
        found, proved = (format_ratio(size / row.base_peak_bytes) for size in (row.budget_bytes, row.proved_bytes))
        return f"{found} ({proved})"
    return row.overhead_text + ("" if row.gap is None else f" ({format_ratio(row.gap)})")


def worse(rows: Sequence[OptionsRow], share: float) -> list[tuple[OptionsRow, OptionsRow]]:
    """Return pairs of rows for one budget: of a set, and of one that contains it and does worse by a share of the other's."""

    def is_worse(row: OptionsRow, than: OptionsRow) -> bool:
        # Of the least budget bytes are compared, else times.
        own, other = (r.budget_bytes if r.budget == LEAST else r.time_s for r in (row, than))
        if other is None or (own is None and row.budget == LEAST):
            return False
        return own is None or own > other * (1 + share)

    return [(row, other) for row, other in _pairs(rows) if is_worse(other, row)]


def below_bound(rows: Sequence[OptionsRow]) -> list[tuple[OptionsRow, OptionsRow]]:
    """Return pairs of rows: of a set, and of itself or one that contains it, whose bound its schedule is below."""

    def is_below(row: OptionsRow, bounded: OptionsRow) -> bool:
        if row.budget == LEAST:
            found, proved = row.budget_bytes, bounded.proved_bytes
            return found is not None and proved is not None and found < proved
        bound_s = (bounded.bound_s or 0.0) * (1 - FLOATING)
        return row.time_s is not None and (bounded.status == Status.INFEASIBLE or row.time_s < bound_s)

    return [(row, other) for row, other in (*zip(rows, rows, strict=True), *_pairs(rows)) if is_below(row, other)]


def _pairs(rows: Sequence[OptionsRow]) -> Iterator[tuple[OptionsRow, OptionsRow]]:
    """Return pairs of rows for one budget: of a set, and of one that contains it."""
    pairs = product(rows, repeat=2)
    return ((a, b) for a, b in pairs if (a.model, a.budget) == (b.model, b.budget) and a.names < b.names)


def _holds(rows: Sequence[OptionsRow]) -> Iterator[str]:
    """Yield sentences on the rows of one model."""
    at_shares = [row for row in rows if row.budget != LEAST]
    infeasible = sum(row.status == Status.INFEASIBLE for row in at_shares)
    unknown = sum(row.time_s is None for row in at_shares) - infeasible
    yield f"Of {len(at_shares)} budgets {infeasible} proved infeasible, {unknown} not decided."
    yield f"Schedules below a bound: {len(below_bound(rows))}."
    pairs = worse(rows, TOLERANCE)
    said = "; ".join(f"{b.options} at {b.budget}, {_value(b)}, than {a.options}, {_value(a)}" for a, b in pairs)
    yield (
        f"Worse with an option more, by over {TOLERANCE:.1%}: {len(pairs)}{f' ({said})' if said else ''}; by less, which is "
        f"within the tolerance of solves: {len(worse(rows, FLOATING)) - len(pairs)}."
    )
    yield from (f"The link: {link}." for link in by(rows, "link") if link)
    limits = by(rows, "limit")
    names = {limit: "; ".join(by(own, "options")).replace("+", " + ") for limit, own in limits.items()}
    yield f"Limit of each solve: {', '.join(f'{limit} ({names[limit]})' if len(limits) > 1 else limit for limit in limits)}."


def _value(row: OptionsRow) -> str:
    """Return the value that is compared with other sets, with more digits than its cell."""
    if row.budget == LEAST:
        return f"{row.budget_bytes:,} B"
    return row.status if row.overhead is None else f"{row.overhead:.4%}"


def _listed(option: str) -> int:
    """Return the position of an option in the registry, without its argument."""
    return tuple(OPTIONS).index(option.partition(":")[0])


def _place(row: OptionsRow) -> tuple[int, list[int], int]:
    """Return the place of a row among others: small sets come first."""
    some = sorted(map(_listed, row.names))
    return tuple(MODELS).index(row.model), [len(some), *some], BUDGETS.index(row.budget)


def main(words: Sequence[str] | None = None) -> int:
    """Make the missing rows; write rows and tables."""
    parser = command_line(__doc__, OptionsRow, models=(*MODELS, *MEASURED), out="results/options")
    parser.add_argument("--options", type=options.names, default=",".join(NAMES), help="with commas (default: %(default)s)")
    parser.add_argument("--seconds", type=options.duration, default=LIMIT_S, help="for each solve (default: %(default)g)")
    parser.add_argument("--work", type=options.work, help="instead of seconds, units of work: a busy machine changes no row")
    arguments = parser.parse_args(words)
    check_options(arguments.options)
    one_thread()
    clock = SolveSettings(time_limit_s=arguments.seconds, work_limit=arguments.work).clock
    pairs = [(model, option) for model in arguments.models if model in MEASURED for option in arguments.options]
    errors = {pair: (*pair, clock) for pair in pairs if traced_options(pair[1:])}
    code = carry_out(ERRORS, arguments, errors)
    offers = KeptRows(
        arguments.out / "offers.csv", Offer, lambda offer: (tuple(MODELS).index(offer.model), _listed(offer.option))
    )
    if arguments.fresh:
        offers.drop([offer for model in arguments.models for offer in offers.of(model)])
    models = [model for model in arguments.models if model in MODELS]
    names = arguments.options
    traces = {model: partial(modelled, MODELS[model], options=traced_options(names)) for model in models}
    cases = {(model,): OptionsCase(model, trace, names, clock, offers) for model, trace in traces.items()}
    pages = {"table.md": lambda rows: table(rows, offers, MODELS)}
    return carry_out(Study(OptionsRow, solve, whole=False, order=_place, pages=pages), arguments, cases) or code


if __name__ == "__main__":
    sys.exit(main())
