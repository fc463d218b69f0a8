"""A small model, compiled by the backend with round trips to the host."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from planner.torch_compile.backend import planner as planner_backend


def layers(norm: type[nn.Module] = nn.LayerNorm) -> nn.Sequential:
    """Layers with dropout."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), norm(64), nn.GELU(), nn.Dropout(0.2)) for _ in range(4)))


def compiled(model: nn.Module, budget: str | int, **options: object) -> Callable[..., Any]:
    given = {"budget": budget, "time_limit_s": 2, "tolerance": 0.05, "options": ["offload"], "link": 1e12, **options}
    return torch.compile(model, backend=planner_backend, dynamic=False, options=given)


def trained_once(step: Callable[..., Any], x: torch.Tensor) -> None:
    step(x).sum().backward()


def assert_same_state(model: nn.Module, twin: nn.Module) -> None:
    pairs = zip(model.named_parameters(), twin.parameters(), strict=True)
    assert [name for (name, a), b in pairs if not torch.equal(a.grad, b.grad)] == []  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))
