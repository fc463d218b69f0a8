"""Gains of options, each alone and together, and the errors of inexact ones: ``make bench-options``.

Results in results/options: least budgets and overheads at shares of the peak, of steps that are traced with fake tensors and
timed by the roofline of an H200 (table.md); and errors of small steps that are run on the CPU (errors.md). Rows in the CSVs are
skipped, so that the benchmark, which takes some hours, can be interrupted and resumed.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product

from benchmarks import offload, options_ablation
from benchmarks.command import build_parser, carry_out, limit_threads
from benchmarks.options_errors import ERRORS, MEASURED, find_most_bits
from benchmarks.options_table import BUDGETS, LEAST, Offer, OptionsRow, format_table, list_sets, set_name
from benchmarks.solves import build_graph, solve_row
from planner.capture.options import (
    OPTIONS,
    check_options,
    list_options_for_any_step,
    list_step_option_names,
    needs,
    restrict_to,
)
from planner.cli import argument_types
from planner.graphs.ir import Graph
from planner.graphs.options.option import Need
from planner.graphs.simulate import simulate
from planner.plans.select_attributes import select_attributes
from planner.plans.summary import summarize
from planner.settings.budget import read_budget
from planner.settings.option_settings import OptionSettings, build_option_settings
from planner.settings.plan import PlanSettings
from planner.solvers.clock import Clock
from planner.solvers.least import bracket_least_budget
from planner.solvers.order.reorder import find_order
from planner.solvers.result import Status
from planner.studies.experiment import Study
from planner.studies.rows import collect_provenance, find_missing_keys

MODELS: Mapping[str, str] = {
    "gpt2-medium": offload.MODELS["gpt2-medium"],
    "head-100k": "zoo:mlp,batch=8192,width=1024,layers=4,classes=100000",
    "mobilenet_v2": "zoo:mobilenet_v2,batch=256",
    "gpt2-small": "zoo:gpt2,batch=8,seq=1024,dtype=bfloat16",
    "gpt2-small-4k": "zoo:gpt2,batch=2,seq=4096,dtype=bfloat16",
    "gpt2-medium-4k": "zoo:gpt2,layers=24,width=1024,heads=16,batch=2,seq=4096,dtype=bfloat16",
    **{name: offload.MODELS[name] for name in ("llama-16", "vit-l", "resnet50", "unet")},
}
# Others need other devices, or sharded parameters.
NAMES = tuple(OPTIONS[name].to_try for name in list_options_for_any_step())
LIMIT_S = 60.0


@dataclass(frozen=True)
class TracedStep:
    """The step of one model: `make` returns it, timed, with all options of `names` that are found in it."""

    model: str
    make: Callable[[], Graph]
    names: Sequence[str]

    @cached_property
    def traced(self) -> Graph:
        """The step, which is traced when it is asked for."""
        return self.make()

    @cached_property
    def ordered(self) -> Graph:
        """The step in the common order of all sets of options: a bound for one set also bounds its subsets."""
        return find_order(restrict_to(self.traced, list_step_option_names(self.names))).graph

    def add_options(self, some: Sequence[str]) -> Graph:
        """Return the step with a set of options."""
        return _make_settings(some).apply(self.ordered)


def find_offers(step: TracedStep, known: Sequence[Offer]) -> Iterator[Offer]:
    """Yield the missing offers of options."""
    for name in step.names:
        if name not in {offer.option for offer in known}:
            added = [op for op in step.add_options((name,)).ops if op.optional or op.overwrites]
            yield Offer(model=step.model, option=name, ops=len(added), bits=find_most_bits(added), **collect_provenance())


@dataclass(frozen=True, slots=True)
class OptionsCase:
    """One model, what its options offer, and a function that returns a new clock for a solve or a search."""

    step: TracedStep
    offers: Sequence[Offer]
    clock: Callable[[], Clock]


def solve(case: OptionsCase, known: Sequence[OptionsRow]) -> Iterator[OptionsRow]:
    """Yield the missing rows of a model, which is traced if there are any."""
    for some in list_sets(case.offers):
        if missing := find_missing_keys(product([set_name(some)], BUDGETS), known, "options", "budget"):
            graph = case.step.add_options(some)
            yield from (_solve(case, some, graph, budget) for _, budget in missing)


def _solve(case: OptionsCase, some: Sequence[str], graph: Graph, budget: str) -> OptionsRow:
    settings, clock, traced = _make_settings(some), case.clock(), case.step.traced
    peak_bytes = summarize(traced).keep_everything_peak_bytes
    row = OptionsRow(
        model=case.step.model,
        options=set_name(some),
        budget=budget,
        budget_bytes=None if budget == LEAST else read_budget(budget).resolve(peak_bytes),
        base_s=traced.time_s,
        base_peak_bytes=peak_bytes,
        limit=clock.format_amount(clock.limit),
        link=str(settings.link(traced.provenance)) if settings.offloads else "",
        **collect_provenance(),
    )
    if budget != LEAST:
        return solve_row(row, graph, case.clock())[0]
    begin = time.monotonic()
    bracket = bracket_least_budget(graph, clock=case.clock())
    seconds = time.monotonic() - begin
    judged = select_attributes(simulate(graph, bracket.schedule), "time_s", "peak_bytes")
    found = {"budget_bytes": bracket.found_bytes, "proved_bytes": bracket.proved_bytes}
    return replace(row, status=str(Status.FEASIBLE), seconds=seconds, **judged, **found)


def _make_settings(some: Sequence[str]) -> OptionSettings:
    return build_option_settings(some, host_budget=offload.HOST if Need.LINK in needs(some) else None)


def _get_position(option: str) -> int:
    """Return the position of an option in the registry, without its argument."""
    return tuple(OPTIONS).index(option.partition(":")[0])


def _place(row: OptionsRow) -> tuple[int, list[int], int]:
    """Return the place of a row among others: small sets come first."""
    some = sorted(map(_get_position, row.names))
    return tuple(MODELS).index(row.model), [len(some), *some], BUDGETS.index(row.budget)


OFFERS = Study(
    Offer,
    find_offers,
    whole=False,
    order=lambda offer: (tuple(MODELS).index(offer.model), _get_position(offer.option)),
    file="offers.csv",
)


def main(words: Sequence[str] | None = None) -> int:
    """Make the missing rows; write rows and tables."""
    parser = build_parser(__doc__, OptionsRow, models=(*MODELS, *MEASURED), out="results/options")
    parser.add_argument(
        "--options", type=argument_types.parse_names, default=",".join(NAMES), help="with commas (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=argument_types.parse_duration, default=LIMIT_S, help="for each solve (default: %(default)g)"
    )
    parser.add_argument(
        "--work", type=argument_types.parse_work, help="instead of seconds, units of work: a busy machine changes no row"
    )
    parser.add_argument("--ablation", action="store_true", help="leave out each part of pack, kernels and chunks instead")
    arguments = parser.parse_args(words)
    if arguments.ablation:
        limit_threads()
        return carry_out(options_ablation.make_study(arguments.work), arguments, options_ablation.list_cases())
    names = arguments.options
    check_options(names)
    limit_threads()
    clock = PlanSettings(time_limit_s=arguments.seconds, work_limit=arguments.work).start_clock
    pairs = [(model, option) for model in arguments.models if model in MEASURED for option in names]
    code = carry_out(ERRORS, arguments, {pair: (*pair, clock) for pair in pairs if list_step_option_names(pair[1:])})
    trace = partial(build_graph, options=OptionSettings(list_step_option_names(names)))
    steps = {(m,): TracedStep(m, partial(trace, MODELS[m]), names) for m in arguments.models if m in MODELS}
    code = carry_out(OFFERS, arguments, steps) or code
    offers = OFFERS.read_kept(arguments.out)
    own = {key: [offer for offer in offers.of(*key) if offer.option in names] for key in steps}
    cases = {key: OptionsCase(step, own[key], clock) for key, step in steps.items()}
    pages = {"table.md": lambda rows: format_table(rows, offers, MODELS)}
    return carry_out(Study(OptionsRow, solve, whole=False, order=_place, pages=pages), arguments, cases) or code
