"""Steps with all of pack, kernels and chunks, and with one of their parts left out: ``make bench-options ARGS=--ablation``.

A part is a kind of op that an option adds. A schedule that executes none of its ops needs no solve: it stays as it is without the
part. Each step is traced once, so that its solves have the same times. An alternative that was dropped because a better one was
measured does not come back when that one is left out, so that a gain may be counted too high.

Known weakness: a solve of 0.2 units is far from the optimum on large steps, so that a longer one may use parts that count as
unused here. Such parts are fewer than 16 chunks (2.7% on a GPT-2), and comparisons (3.4% on the MLP at 60%). Solve for longer,
and at other budgets, before you remove what is unused.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest

from benchmarks.options_table import BUDGETS, LEAST
from benchmarks.solves import Solved, solve_row
from benchmarks.zoo_models import MODELS
from planner.capture.workload.workload import parse_spec
from planner.graphs.ir import Graph, Op
from planner.graphs.options.selection import get_option_name, keep_traced_ops
from planner.graphs.units import format_ratio
from planner.plans.summary import summarize
from planner.settings.budget import read_budget
from planner.settings.option_settings import OptionSettings
from planner.settings.plan import PlanSettings
from planner.solvers.clock import WorkClock
from planner.solvers.order.reorder import find_order
from planner.solvers.result import Status
from planner.studies.experiment import Study
from planner.studies.rows import collect_provenance, declare_column, declare_key, declare_value, order_by
from planner.studies.tables import Column, format_markdown, group_by
from planner.studies.workload_tracing import Tracing

OPTIONS = ("pack", "kernels", "chunks")
NOTHING = "nothing"  # is left out
LEAST_CHANGE = 0.001
WORK = 0.2  # units for each solve
CPU_MODELS: Mapping[str, str] = {  # measured, at sizes at which a step takes 0.01 to 0.5 s on one thread
    "unet": "zoo:unet,batch=4,size=96,channels=8",
    "resnet18": "zoo:resnet18,batch=16,size=64,width=8,classes=10",
    "vgg16": "zoo:vgg16,batch=16,size=64,width=8,hidden=128,classes=10",
    "mobilenet_v2": "zoo:mobilenet_v2,batch=16,size=64,multiplier=0.25,classes=10,dropout=0",
    "gpt2-dropout": "zoo:gpt2,layers=4,width=64,heads=4,vocab=2000,batch=8,seq=128",
    "llama": "zoo:llama,layers=2,width=64,heads=4,hidden=192,vocab=2000,batch=8,seq=128,dtype=float32",
    "vit": "zoo:vit,batch=8,layers=6,width=64,heads=4,size=64,patch=8,classes=10",
    "mlp": "zoo:mlp,batch=512,width=128",
    "resnet50": "zoo:resnet50,batch=16,size=64,width=8,classes=10",
}
_SMALL = ("mlp", "vgg16", "resnet18", "unet", "mobilenet_v2")  # come first
H200_MODELS: Mapping[str, str] = {
    **{model: MODELS[model] for model in _SMALL},
    "gpt2-dropout": "zoo:gpt2,batch=8,dtype=bfloat16",
    **{model: spec for model, spec in MODELS.items() if model not in _SMALL},
}
STEPS: Mapping[str, Mapping[str, str]] = {"cpu": CPU_MODELS, "h200": H200_MODELS}
_PARTS: Mapping[str, str] = {  # by the word of an op
    **dict.fromkeys(("input", "weight"), "gradients apart"),
    **dict.fromkeys(("to_bits", "from_bits"), "comparisons"),
    "from_result": "results",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationRow(Solved):
    """One step at one budget without one part."""

    model: str = declare_key()
    costs: str = declare_key("h200: its roofline; cpu: measured here")
    budget: str = declare_key("share of the program's peak")
    part: str = declare_key("what is left out")
    offered: int = declare_column("ops of the part")
    used: int = declare_column("executions of these ops in the schedule with everything; with none there is no other solve")
    complete_s: float | None = declare_value("the step with everything")
    seconds: float | None = declare_value("that the solve took")
    work: float = declare_column("units that it might have taken", default=WORK)

    @property
    def change(self) -> float:
        """The longer time without the part, over the time with everything; infinite without a schedule."""
        return math.inf if self.time_s is None or self.complete_s is None else self.time_s / self.complete_s - 1


def list_parts(op: Op) -> tuple[str, ...]:
    """Return the parts that an optional op belongs to: its kind and, of chunks, their count."""
    option, *words = op.target.split(".")
    parts = words if option == "chunks" else [_PARTS.get(words[0], words[0])]
    return tuple(f"{option}: {part}" for part in parts)


def find_parts(graph: Graph) -> dict[str, list[Op]]:
    """Return the optional ops of each part."""
    found: dict[str, list[Op]] = {}
    for op in graph.ops:
        for part in list_parts(op) if op.optional and get_option_name(op) in OPTIONS else ():
            found.setdefault(part, []).append(op)
    return found


def leave_out(graph: Graph, dropped: Iterable[Op]) -> Graph:
    """Return `graph` without some of its optional ops."""
    names = {op.name for op in dropped}
    return keep_traced_ops(graph, [op.name for op in graph.ops if op.name not in names])


def trace(costs: str, spec: str) -> Graph:
    """Return the step of a model with all parts, in the order in which it is solved."""
    settings = PlanSettings(roofline=None if costs == "cpu" else costs, options=OptionSettings(OPTIONS))
    return find_order(Tracing(settings).trace_graph(parse_spec(spec))).graph


def ablate(case: tuple[str, str], known: Sequence[AblationRow], *, work: float = WORK) -> Iterator[AblationRow]:
    """Yield the rows of one model with one kind of costs."""
    costs, model = case
    graph = trace(costs, STEPS[costs][model])
    yield from ablate_graph(graph, model, costs, work)


def ablate_graph(graph: Graph, model: str, costs: str, work: float) -> Iterator[AblationRow]:
    """Yield the rows of a graph that is traced with all options."""
    parts, peak_bytes = find_parts(graph), summarize(graph).keep_everything_peak_bytes
    for budget in (budget for budget in BUDGETS if budget != LEAST):
        blank = AblationRow(
            model=model,
            costs=costs,
            budget=budget,
            part=NOTHING,
            work=work,
            budget_bytes=read_budget(budget).resolve(peak_bytes),
            base_s=graph.time_s,
            offered=0,
            used=0,
            **collect_provenance(),
        )
        row, result = solve_row(blank, graph, WorkClock(work))
        complete = replace(row, complete_s=row.time_s)
        yield complete
        if result is None or result.schedule is None:
            continue  # less has none either, or is not to be compared
        for part, ops in parts.items():
            ids = {op.id for op in ops}
            used = sum(op in ids for op in result.schedule.computed)
            row = replace(complete, part=part, offered=len(ops), used=used, seconds=None)
            yield solve_row(row, leave_out(graph, ops), WorkClock(work))[0] if used else row


@dataclass(frozen=True, slots=True)
class PartGains:
    """What one part gains, over all steps and budgets."""

    part: str
    rows: Sequence[AblationRow]

    @property
    def cells(self) -> int:
        """Number of cells whose schedule with everything executes an op of the part."""
        return sum(row.used > 0 for row in self.rows)

    @property
    def changed(self) -> int:
        """Number of cells that are slower without it by 0.1% and more."""
        return sum(row.used > 0 and row.change >= LEAST_CHANGE for row in self.rows)

    @property
    def largest(self) -> str:
        """The largest change, and where it is."""
        row = max(self.rows, key=lambda row: row.change if row.used else 0.0)
        if not row.used or row.change <= 0:
            return "none"
        change = "no schedule" if math.isinf(row.change) else format_ratio(row.change)
        return f"{change} ({row.model}, {row.costs}, {row.budget})"


def write_table(rows: Sequence[AblationRow]) -> str:
    """Return a line for each part."""
    own = [row for row in rows if row.part != NOTHING]
    gains = [PartGains(part, found) for part, found in sorted(group_by(own, "part").items())]
    columns = (
        Column("left out", "part"),
        Column("steps that have it", lambda gain: len({(row.model, row.costs) for row in gain.rows})),
        Column("cells that use it", "cells"),
        Column("slower by 0.1%", "changed"),
        Column("most", "largest"),
    )
    return (
        "Steps of the zoo with pack, kernels and chunks, at 70%, 50%, 30% and 20% of the peak, with the roofline of an H200 and "
        "as measured on a CPU: how many of these cells are slower if a part is left out. Longer solves may use more parts.\n\n"
        + format_markdown(gains, columns)
        + f"\nCells without a schedule: {sum(row.part == NOTHING and row.status not in _SOLVED for row in rows)}. Limit of each "
        f"solve: {', '.join(sorted({f'{row.work:g}' for row in rows}))} units of work.\n"
    )


_SOLVED = (Status.OPTIMAL, Status.FEASIBLE)


def make_study(work: float | None) -> Study[tuple[str, str], AblationRow]:
    """Return the experiment with `work` units for each solve; None: as many as by default."""
    return Study(
        AblationRow,
        partial(ablate, work=work or WORK),
        order=order_by(costs=STEPS, model=H200_MODELS, budget=BUDGETS),
        pages={"ablation.md": write_table},
        file="ablation.csv",
    )


def list_cases() -> dict[tuple[object, ...], tuple[str, str]]:
    """Return all steps, small ones first."""
    turns = zip_longest(*([(costs, model) for model in models] for costs, models in STEPS.items()))
    return {(model, costs): (costs, model) for costs, model in filter(None, chain.from_iterable(turns))}
