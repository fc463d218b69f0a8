"""Tiny training steps that the tests of capture and execution share."""

import time
from collections.abc import Callable
from functools import cache, partial
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models.parts import FunctionModule
from planner.capture.lowering.lower import Capture
from planner.capture.trace import capture
from planner.capture.workload.models import Workload, build
from planner.graphs.ir import Graph
from planner.graphs.schedule import Schedule, schedule_of
from planner.plans.plan import Plan
from planner.plans.solve import solve
from planner.progress import Progress


class TiedWeights(nn.Module):
    """Embedding and head share one parameter; so do two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 32)
        self.first = nn.Linear(32, 32)
        self.second = nn.Linear(32, 32)
        self.second.weight = self.first.weight
        self.head = nn.Linear(32, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(self.embedding(tokens)))
        return self.head(torch.tanh(self.second(hidden)))


class MutatedBuffer(nn.Module):
    """Normalises by a running mean that it updates itself before and after use."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(48, 96)
        self.outer = nn.Linear(96, 3)
        self.register_buffer("mean", torch.zeros(96))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.inner(x))
        scaled = hidden / (self.mean + 1.5)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
            self.calls += 1
        return self.outer(F.dropout(scaled - self.mean, 0.2, self.training))


def tokens(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def tied() -> Workload:
    return Workload(TiedWeights(), tokens, (torch.randint(20, (8, 40)), torch.randint(20, (8, 40))))


def mutated() -> Workload:
    return Workload(MutatedBuffer(), F.cross_entropy, (torch.randn(60, 48), torch.randint(3, (60,))))


def frozen() -> Workload:
    """The first layer and a bias are frozen, one parameter is never used."""
    model = FunctionModule(
        lambda m, x: m.head(F.silu(m.middle(torch.relu(m.frozen(x))))),
        frozen=nn.Linear(48, 64).requires_grad_(requires_grad=False),
        middle=nn.Linear(64, 64),
        head=nn.Linear(64, 3),
        unused=nn.Parameter(torch.ones(5)),
    )
    model.middle.bias.requires_grad_(requires_grad=False)
    return Workload(model, F.cross_entropy, (torch.randn(60, 48), torch.randint(3, (60,))))


def shared_gradient() -> Workload:
    """Two parameters whose gradients are one tensor, and one that is an expanded view."""
    parts = {name: nn.Parameter(torch.randn(6, 12)) for name in ("left", "right", "shift")}
    model = FunctionModule(lambda m, x: (x * torch.sigmoid(m.left + m.right)).sum() + m.shift.sum(), **parts)
    return Workload(model, None, (torch.randn(6, 12),))


def rotated() -> Workload:
    """Complex numbers, read as they are, conjugated, and by their negated imaginary parts."""

    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        value = torch.view_as_complex(x.unflatten(-1, (24, 2)))
        for phase in m.phases:
            value = torch.tanh(value * torch.polar(torch.ones(24), phase))
        away = torch.exp(value.conj().imag)
        return (value @ value.mH).abs().softmax(-1).square().sum() + (away * torch.sigmoid(away)).sum()

    model = FunctionModule(forward, phases=nn.ParameterList(torch.randn(24) for _ in range(4)))
    return Workload(model, None, (torch.randn(10, 48),))


_GPT2 = {"layers": 2, "width": 64, "heads": 4, "vocab": 97, "seq": 48, "batch": 4}

STEPS: dict[str, Callable[[], Workload]] = {
    "gpt2_sdpa": partial(build, "gpt2", **_GPT2, attention="sdpa"),
    "gpt2_written": partial(build, "gpt2", **_GPT2, attention="written"),
    "llama": partial(build, "llama", layers=2, width=64, heads=4, kv_heads=2, hidden=128, vocab=97, seq=48, batch=4),
    "vit": partial(build, "vit", layers=2, width=64, heads=4, size=32, patch=8, classes=10, batch=8, dropout=0.1),
    "resnet18": partial(build, "resnet18", blocks=(1, 1, 1, 1), width=16, size=48, classes=10, batch=8),
    "unet": partial(build, "unet", channels=8, depth=2, size=48, batch=4),
    "tied": tied,
    "frozen": frozen,
    "mutated": mutated,
    "shared_gradient": shared_gradient,
    "rotated": rotated,
}


def make(name: str) -> Workload:
    """The step `name`, the same every time."""
    torch.manual_seed(7)
    return STEPS[name]()


@cache
def capture_of(name: str) -> Capture:
    """The step `name`, captured once: it holds for each model that ``make`` makes."""
    return capture(*make(name))


def random_schedule(graph: Graph, seed: int) -> Schedule:
    """Any valid schedule: before some ops of the backward pass, earlier ones again, in program order."""
    random = Random(seed)
    computed: list[int] = []
    for op in graph.ops:
        if random.random() < 0.03:
            wanted = {other.id for other in graph.ops[: op.id] if other.recomputable and random.random() < 0.3}
            computed += [other.id for other in graph.ops[: op.id] if other.id in wanted]
        computed.append(op.id)
    return schedule_of(graph, computed)


def solve_for(seconds: float, graph: Graph, budget: int | str, *, tolerance: float = 0.05) -> Plan:
    """The plan after so many seconds, or the first one: a busy machine is slower, but gives a plan too."""
    end = time.monotonic() + seconds
    found = False

    def look(progress: Progress) -> None:
        nonlocal found
        found |= progress.best_s is not None

    def should_stop() -> bool:
        return found and time.monotonic() > end

    return solve(graph, budget, tolerance=tolerance, time_limit_s=600.0, on_progress=look, should_stop=should_stop)


def classes(model: nn.Module, *inputs: Any) -> Workload:
    return Workload(model, F.cross_entropy, (*inputs, torch.randint(3, (24,))))


def norm_twice() -> Workload:
    model = FunctionModule(
        lambda m, x: m.b(m.norm(m.a(m.norm(m.a(x))))), norm=nn.BatchNorm1d(32), a=nn.Linear(32, 32), b=nn.Linear(32, 3)
    )
    return classes(model, torch.randn(24, 32))
