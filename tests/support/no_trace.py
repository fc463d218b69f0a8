"""A model with state of all kinds, and whether an act on it leaves a trace."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

import planner

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
