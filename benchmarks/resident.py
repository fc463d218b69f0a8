"""The resident memory of training beside the budget: ``make bench-resident`` writes results/resident/.

Each row trains in a process of its own with one thread, by a plan with or without an arena. What the process has in memory when
the step is gone, less static memory, is the interpreter: Python, PyTorch and the planner. Linux only.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

import planner
from benchmarks.command import Main, limit_threads
from benchmarks.process_memory import read_status_bytes, reset_highest_rss
from planner.capture.workload.models import build
from planner.graphs.units import format_bytes
from planner.measure.steps import get_loss
from planner.memory.release import release_unused
from planner.studies.experiment import Study
from planner.studies.processes import ALONE, iterate_results
from planner.studies.rows import Made, collect_provenance, declare_column, declare_key, find_missing_keys, order_by
from planner.studies.tables import Column

MODELS = {
    "gpt2": partial(build, "gpt2", layers=4, width=256, heads=4, vocab=2000, batch=16, seq=256, dropout=0),
    "resnet18": partial(build, "resnet18", batch=32, size=160),
    "mobilenet_v2": partial(build, "mobilenet_v2", size=128, batch=32, dropout=0),
}
BUDGETS = ("90%", "80%")
PLAN, ARENA = "plan", "arena"
WAYS = (PLAN, ARENA)
_STEPS = 6
_SOLVE_S = 10.0
_LIMIT_S = 600.0
_WITHIN = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentRow(Made):
    """The memory of one process that trains."""

    model: str = declare_key()
    budget: str = declare_key("a share of eager PyTorch's peak")
    way: str = declare_key("plan, or the plan in an arena")
    budget_bytes: int = declare_column("the budget")
    peak_bytes: int = declare_column("of the plan, as measured by the allocator")
    interpreter_bytes: int = declare_column("resident when the step is gone, less static memory")
    highest_bytes: int = declare_column("the highest resident memory in some steps of training")

    @property
    def excess(self) -> float:
        """Part by which resident memory exceeds the budget and the interpreter together."""
        return self.highest_bytes / (self.budget_bytes + self.interpreter_bytes) - 1


def measure(name: str, known: Sequence[ResidentRow]) -> Iterator[ResidentRow]:
    """Yield the rows of a model that are not `known`."""
    for budget, way in find_missing_keys(product(BUDGETS, WAYS), known, "budget", "way"):
        yield from iterate_results(measure_process, name, budget, way, variables=ALONE, limit_s=_LIMIT_S)


def measure_process(name: str, budget: str, way: str) -> Iterator[ResidentRow]:
    """Yield the row of a process: this one."""
    limit_threads()
    torch.manual_seed(0)
    model, loss_fn, batch = MODELS[name]()
    step = planner.compile(
        model, loss_fn, batch, budget=budget, arena=way == ARENA, time_limit_s=_SOLVE_S, wait=_SOLVE_S, swap="never"
    )
    plan = step.plan
    release_unused(torch.device("cpu"))
    reset_highest_rss()
    for _ in range(_STEPS):
        get_loss(step(*batch)).backward()
        model.zero_grad()
    highest_bytes = read_status_bytes("VmHWM")
    del step
    release_unused(torch.device("cpu"))
    yield ResidentRow(
        model=name,
        budget=budget,
        way=way,
        budget_bytes=plan.budget_bytes,
        peak_bytes=plan.measured_peak_bytes or plan.peak_bytes,
        interpreter_bytes=read_status_bytes("VmRSS") - plan.graph.static_bytes,
        highest_bytes=highest_bytes,
        **collect_provenance(),
    )


def list_failures(rows: Sequence[ResidentRow]) -> Iterator[str]:
    """Yield a line for each arena whose process takes more than the budget and the interpreter by over 2%."""
    for row in rows:
        if row.way == ARENA and row.excess > _WITHIN:
            yield f"{row.model} {row.budget}: resident {format_bytes(row.highest_bytes)}, {row.excess:.1%} too much"


TABLE = (
    *("model", "budget", "way"),
    Column("is", "budget_bytes", format_bytes),
    Column("interpreter", "interpreter_bytes", format_bytes),
    Column("highest resident", "highest_bytes", format_bytes),
    Column("beyond both", "excess", "{:+.1%}"),
)


STUDY = Study(
    ResidentRow,
    measure,
    whole=False,
    order=order_by(model=MODELS, budget=BUDGETS, way=WAYS),
    pages={"table.md": TABLE},
    failures=list_failures,
)
main = Main(STUDY, MODELS)
