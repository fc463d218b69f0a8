"""One process that trains by a plan, with or without an arena, and its resident memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

import planner
from benchmarks.command import one_thread
from benchmarks.process_memory import reset_highest_rss, status_bytes
from planner.models import build
from planner.runtime.measure import loss_of
from planner.runtime.release import release_unused
from planner.studies.rows import Made, column, key, provenance

MODELS = {
    "gpt2": partial(build, "gpt2", layers=4, width=256, heads=4, vocab=2000, batch=16, seq=256, dropout=0),
    "resnet18": partial(build, "resnet18", batch=32, size=160),
    "mobilenet_v2": partial(build, "mobilenet_v2", size=128, batch=32, dropout=0),
}
PLAN, ARENA = "plan", "arena"
_STEPS = 6
_SOLVE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentRow(Made):
    """The memory of one process that trains."""

    model: str = key()
    budget: str = key("a share of eager PyTorch's peak")
    way: str = key("plan, or the plan in an arena")
    budget_bytes: int = column("the budget")
    peak_bytes: int = column("of the plan, as measured by the allocator")
    interpreter_bytes: int = column("resident when the step is gone, less static memory")
    highest_bytes: int = column("the highest resident memory in some steps of training")

    @property
    def excess(self) -> float:
        """Part by which resident memory exceeds the budget and the interpreter together."""
        return self.highest_bytes / (self.budget_bytes + self.interpreter_bytes) - 1


def measured(name: str, budget: str, way: str) -> Iterator[ResidentRow]:
    """Yield the row of a process: this one."""
    one_thread()
    torch.manual_seed(0)
    model, loss_fn, batch = MODELS[name]()
    step = planner.compile(
        model, loss_fn, batch, budget=budget, arena=way == ARENA, time_limit_s=_SOLVE_S, wait=_SOLVE_S, swap="never"
    )
    plan = step.plan
    release_unused(torch.device("cpu"))
    reset_highest_rss()
    for _ in range(_STEPS):
        loss_of(step(*batch)).backward()
        model.zero_grad()
    highest_bytes = status_bytes("VmHWM")
    del step
    release_unused(torch.device("cpu"))
    yield ResidentRow(
        model=name,
        budget=budget,
        way=way,
        budget_bytes=plan.budget_bytes,
        peak_bytes=plan.measured_peak_bytes or plan.peak_bytes,
        interpreter_bytes=status_bytes("VmRSS") - plan.graph.static_bytes,
        highest_bytes=highest_bytes,
        **provenance(),
    )
