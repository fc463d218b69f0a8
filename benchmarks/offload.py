"""Recomputation, offloading, both in one program, and the baselines: ``make bench-offload`` writes results/offload/.

Steps are traced with fake tensors and timed by the roofline of a device. Rows in the CSV are skipped, so that the benchmark,
which takes some hours, can be interrupted and resumed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import median

from benchmarks.command import add_names, build_parser, carry_out
from benchmarks.solves import Solved, build_graph, solve_row
from planner.graphs.errors import BudgetError
from planner.graphs.ir import Graph
from planner.graphs.simulate import simulate
from planner.graphs.units import format_bytes
from planner.plans.summary import summarize
from planner.settings.budget import read_budget
from planner.settings.option_settings import OptionSettings, build_option_settings
from planner.solvers.clock import WallClock
from planner.solvers.least import bracket_least_budget
from planner.solvers.registry import SOLVERS
from planner.studies.experiment import Study
from planner.studies.rows import (
    collect_provenance,
    declare_column,
    declare_key,
    declare_text,
    declare_value,
    find_missing_keys,
    order_by,
)
from planner.studies.tables import Column, format_bullets, format_markdown, group_by, group_side_by_side

MODELS: Mapping[str, str] = {
    "gpt2-medium": "zoo:gpt2,layers=24,width=1024,heads=16,batch=8,seq=1024,dtype=bfloat16",
    "resnet50": "zoo:resnet50,batch=256",
    "llama-16": "zoo:llama,layers=16,width=2048,seq=16384",
    # Layers as those of Llama 3.1 8B.
    "llama-8b-4k": "zoo:llama,layers=8,kv_heads=8,hidden=14336,seq=4096",
    "llama-8b-16k": "zoo:llama,layers=8,kv_heads=8,hidden=14336,seq=16384",
    "llama-8b-64k": "zoo:llama,layers=8,kv_heads=8,hidden=14336,seq=65536",
    "vit-l": "zoo:vit,layers=24,width=1024,heads=16,batch=64,dtype=bfloat16",
    "unet": "zoo:unet,batch=16",
}
_BETWEEN = ("least + 75%", "least + 50%", "least + 25%", "least + 10%")
_ALL = ("gpt2-medium", "llama-8b-4k", "llama-8b-16k", "llama-8b-64k", "vit-l", "resnet50", "unet")

RECOMPUTE, OFFLOAD, BOTH = "recompute only", "offload only", "both"
OURS = (RECOMPUTE, OFFLOAD, BOTH)
METHODS = (*OURS, *(name for name, entry in SOLVERS.items() if entry.only_transfers))
HOST = "256GB"
LIMIT_S, LEAST_S = 60.0, 15.0  # of a solve, and of the search for the least budget
GAP = 0.01  # the target in four cases of five
_ABOVE_LEAST = "least + "
_FLOATING = 1e-9


@dataclass(frozen=True, slots=True)
class Suite:
    """A device, the link to its host (None: as planned for by default), and the budgets of each of its models."""

    device: str
    link: str | None
    budgets: Mapping[str, Sequence[str]]


SUITES: Mapping[str, Suite] = {
    "h200-50GB/s": Suite(
        "h200", "50GB/s", {"gpt2-medium": ("60%", "50%"), "resnet50": ("60%", "40%"), "llama-16": ("60%", "40%")}
    ),
    **{device: Suite(device, None, dict.fromkeys(_ALL, _BETWEEN)) for device in ("h200", "h100", "a100", "rtx4090")},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadRow(Solved):
    """One method at one budget."""

    suite: str = declare_key()
    model: str = declare_key()
    budget: str = declare_key("a share of the peak, or of what lies between the least budget and the peak")
    method: str = declare_key("recompute only, offload only, both, or a name in planner.solvers.registry")
    least_bytes: int | None = declare_value("the least budget of a schedule that only recomputes, where budgets are above it")
    base_peak_bytes: int = declare_column("of the step that keeps everything")
    seconds: float | None = declare_value("that the solve took")
    host_bytes: int | None = declare_value("most on the host")
    recomputed: int | None = declare_value("executions beyond each op's first")
    copied: int | None = declare_value("copies, there and back")
    link: str = declare_text("what it carries, and where its figures are from")


@dataclass(frozen=True, slots=True)
class OffloadCase:
    """One model on one device: `make` returns the timed step without `options`."""

    suite: str
    model: str
    make: Callable[[], Graph]
    options: OptionSettings
    budgets: Sequence[str]


def solve(case: OffloadCase, known: Sequence[OffloadRow]) -> Iterator[OffloadRow]:
    """Yield the missing rows. First executions come in program order throughout, so that one bound holds for all."""
    wanted = find_missing_keys(product(case.budgets, METHODS), known, "budget", "method")
    if not wanted:
        return
    graph = case.make()
    offered = case.options.apply(graph)
    graphs = {RECOMPUTE: graph, OFFLOAD: forbid_recomputation(offered)}
    between = any(budget.startswith(_ABOVE_LEAST) for budget, _ in wanted)
    least_bytes = bracket_least_budget(graph, clock=WallClock(LEAST_S)).found_bytes if between else None
    peak_bytes = summarize(graph).keep_everything_peak_bytes
    for budget, method in wanted:
        blank = OffloadRow(
            suite=case.suite,
            model=case.model,
            budget=budget,
            method=method,
            base_s=graph.time_s,
            budget_bytes=compute_budget_bytes(budget, least_bytes, peak_bytes),
            least_bytes=least_bytes,
            base_peak_bytes=peak_bytes,
            link=str(case.options.link(graph.provenance)),
            **collect_provenance(),
        )
        own = graphs.get(method, offered)
        row, result = solve_row(blank, own, WallClock(LIMIT_S), "windows" if method in OURS else method)
        if result is not None and result.schedule is not None:
            computed, host_bytes = result.schedule.computed, sum(simulate(own, result.schedule).pool_peaks_bytes[1:])
            copied = sum(own.ops[op].optional for op in computed)
            row = replace(row, host_bytes=host_bytes, recomputed=len(computed) - copied - len(own.program), copied=copied)
        yield row


def forbid_recomputation(graph: Graph) -> Graph:
    """Return `graph` with no op of the program recomputable."""
    ops = tuple(op if op.optional else replace(op, recomputable=False) for op in graph.ops)
    return replace(graph, ops=ops)


def compute_budget_bytes(budget: str, least_bytes: int | None, peak_bytes: int) -> int:
    """Return a budget in bytes, static bytes included; `least_bytes` is known where the budget is above it.

    Raises:
        BudgetError: it cannot be read.
    """
    if least_bytes is None or not budget.startswith(_ABOVE_LEAST):
        return read_budget(budget).resolve(peak_bytes)
    share = budget.removeprefix(_ABOVE_LEAST)
    if not share.endswith("%"):
        raise BudgetError(f"budget {budget!r} is not of the form 'least + 25%'")
    return least_bytes + round(float(share[:-1]) / 100 * (peak_bytes - least_bytes))


def format_table(rows: Sequence[OffloadRow]) -> str:
    """Return for each suite the overhead of each method over the step that keeps everything, and the provenance of its rows."""
    return "\n".join(_format_suite(suite, own) for suite, own in group_by(rows, "suite").items())


def _format_suite(suite: str, rows: Sequence[OffloadRow]) -> str:
    cases = group_side_by_side(rows, "method", "model", "budget")
    others = [method for method in METHODS if method not in OURS and any(method in found for found in cases)]
    columns = (
        "model",
        Column("budget", lambda row: f"{row.budget} ({format_bytes(row.budget_bytes)})"),
        *(Column(method, "overhead_text", at=method) for method in OURS),
        Column("bound", "bound_overhead", at=BOTH),
        Column("gap", at=BOTH),
        Column("seconds", form="{:.0f}", at=BOTH),
        Column("on the host", lambda row: row.host_bytes or None, format_bytes, at=BOTH),
        *(Column(method, "overhead_text", at=method) for method in others),
    )
    return f"## {suite}\n\nThe link: {rows[0].link}.\n\n{format_markdown(cases, columns)}\n{format_bullets(_summarize(cases))}\n"


def find_below_bound(rows: Iterable[OffloadRow]) -> list[OffloadRow]:
    """Return rows of methods whose schedule takes less than the bound on all of them."""
    bounds = ((found, found[BOTH].bound_s) for found in group_side_by_side(rows, "method", "model", "budget") if BOTH in found)
    return [
        row
        for found, bound_s in bounds
        for row in found.values()
        if row.time_s is not None and bound_s is not None and row.time_s < bound_s * (1 - _FLOATING)
    ]


def _summarize(cases: Iterable[Mapping[str, OffloadRow]]) -> Iterator[str]:
    """Yield sentences on all cases in which both were solved for."""
    both = [found for found in cases if BOTH in found]
    tight = sum((gap := found[BOTH].gap) is not None and gap <= GAP + _FLOATING for found in both)
    known = sum(found[BOTH].time_s is not None for found in both)
    yield f"Both: a schedule in {known} of {len(both)} cases, a gap of at most {GAP:.0%} in {tight}."
    yield f"Slower than either alone: {sum(map(_is_worse, both))}."
    yield f"Methods below the bound: {len(find_below_bound(row for found in both for row in found.values()))}."
    for method in [method for method in METHODS if method not in (BOTH, OFFLOAD)]:
        pairs = [(found[method].time_s, found[BOTH].time_s) for found in both if method in found]
        ratios = [theirs / ours for theirs, ours in pairs if theirs is not None and ours is not None]
        if ratios:
            what = f"{method}: a schedule in {len(ratios)} of {len(pairs)} cases"
            yield f"{what}, there {median(ratios):.2f} of the time of both in the median, {max(ratios):.2f} at most."


def _is_worse(found: Mapping[str, OffloadRow]) -> bool:
    alone = [found[method].time_s for method in (RECOMPUTE, OFFLOAD) if method in found]
    best = min((time_s for time_s in alone if time_s is not None), default=None)
    both_s = found[BOTH].time_s
    return best is not None and (both_s is None or both_s > best * (1 + _FLOATING))


STUDY = Study(
    OffloadRow,
    solve,
    whole=False,
    order=order_by(suite=SUITES, model=MODELS, budget=("60%", "50%", "40%", *_BETWEEN), method=METHODS),
    pages={"table.md": format_table},
)


def main(words: Sequence[str] | None = None) -> int:
    """Solve the missing cases; write rows and table."""
    parser = build_parser(__doc__, OffloadRow, models=MODELS, out="results/offload")
    add_names(parser, "--suites", SUITES)
    arguments = parser.parse_args(words)
    cases = {}
    for name, model in product(arguments.suites, arguments.models):
        suite = SUITES[name]
        if model in suite.budgets:
            make, options = (
                partial(build_graph, MODELS[model], suite.device),
                build_option_settings(["offload"], suite.link, HOST),
            )
            cases[name, model] = OffloadCase(name, model, make, options, suite.budgets[model])
    return carry_out(STUDY, arguments, cases)
