"""Small models that ``planner.compile`` plans, and whether planning leaves a trace in them."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

import planner
from planner.capture.workload.models import Workload, build
from planner.plans.eager import Difference, DifferingOp, EagerComparison


def gpt2() -> Workload:
    torch.manual_seed(0)
    return build("gpt2", layers=1, width=32, heads=2, vocab=61, seq=24, batch=4, dropout=0.1)


def plain() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 3))
    return Workload(model, F.cross_entropy, (torch.randn(8, 16), torch.randint(3, (8,))))


def compiled(workload: Workload, **options: object) -> planner.PlannedStep:
    return planner.compile(*workload, budget="100%", passes=1, **options)


DIFFERS = EagerComparison(
    differences=(
        Difference("loss", 0.5, 0.25),
        Difference("buffer mean"),
        *(Difference(f"gradient of {i}", 1e-7) for i in range(3)),
    ),
    first_op=DifferingOp("mm_3", "aten.mm.default", "h.0"),
    gradient_error=2e-6,
    eager_error=1e-7,
    peak_bytes=1000,
    time_s=0.01,
    planned_time_s=0.02,
)


def workload(batch: int = 8) -> Workload:
    torch.manual_seed(0)
    return build("mlp", batch=batch, layers=2, width=16, classes=3)


def compiled_with_cache(cache: Path, *, budget: str = "100%", batch: int = 8, **options: Any) -> planner.PlannedStep:
    return planner.compile(*workload(batch), budget=budget, passes=1, cache=cache, **options)


CALLS: list[int] = []
BATCH = (torch.randn(8, 16, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3)


class Remembers(nn.Module):
    """Changes all kinds of state where it is run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 3)
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)
        self.count, self.cache, self.history, self.by_name = 0, None, [1], {"calls": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = 1
        self.cache = x
        hidden = F.dropout(torch.relu(self.norm(self.first(x))), 0.2)
        with torch.no_grad():
            self.scale.mul_(0.9)
        return self.last(hidden) * self.scale


def state_of(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """All that could change, as it is now."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), "x": BATCH[0]}
    found: dict[str, Any] = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    found |= {f"{name} itself": (id(tensor), tensor._version) for name, tensor in tensors.items()}
    found |= {f"{name}.grad": (id(p.grad), None if p.grad is None else p.grad.clone()) for name, p in model.named_parameters()}
    found |= {f"{name} hooks": dict(p._backward_hooks or {}) for name, p in model.named_parameters()}
    found |= {f"{name} later hooks": dict(p._post_accumulate_grad_hooks or {}) for name, p in model.named_parameters()}
    for name, module in model.named_modules():
        plain = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        found[f"attributes of {name}"] = {k: list(v) if isinstance(v, list) else v for k, v in plain.items()}
    if isinstance(model, Remembers):
        found["by name"] = dict(model.by_name)
    found["calls"] = list(CALLS)
    found["random"] = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    if optimizer is not None:
        found["optimizer"] = {i: dict(values) for i, values in enumerate(optimizer.state.values())}
    return found


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def assert_no_trace(model: nn.Module, act: Callable[[], object], optimizer: Optimizer | None = None) -> None:
    before = state_of(model, optimizer)
    act()
    after = state_of(model, optimizer)
    assert [name for name in before if not same(before[name], after[name])] == []


def plan(model: nn.Module, batch: Any = BATCH, **options: Any) -> planner.PlannedStep:
    return planner.compile(model, F.cross_entropy, batch, budget="100%", passes=1, **options)
