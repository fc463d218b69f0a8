"""Recorded steps on CUDA: models, and loops that train them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from planner.capture.step import TrainingStep
from planner.capture.trace import capture
from planner.models import Workload
from planner.runtime.cuda_graph import CudaGraphs
from planner.runtime.executor import Executor
from planner.runtime.graphed_step import record, recordable
from planner.runtime.measure import loss_of
from planner.solving import solve
from tests.support.cuda_device import on_device
from tests.support.steps import make, random_schedule


def recorded(workload: Workload, *, seed: int | None = 1, recorder: CudaGraphs | None = None) -> Executor:
    """The recorded step, on CUDA, of a schedule that recomputes at random, or of one that keeps everything."""
    captured = recordable(capture(*workload))
    schedule = random_schedule(captured.graph, seed) if seed else solve(captured.graph, "100%").schedule
    executor = Executor(captured, schedule, workload.model, workload.loss_fn)
    step = TrainingStep(workload.model, workload.loss_fn)
    record(captured, executor, step, workload.batch, recorder or CudaGraphs(executor.device))
    return executor


class Pool(nn.Module):
    """Dropout, batch norm with all its buffers, and an input that is counted in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(24, 48), nn.BatchNorm1d(48), nn.Linear(48, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.dropout(torch.relu(self.norm(self.first(x))), 0.3))


def dropout_and_norm() -> Workload:
    torch.manual_seed(7)
    return on_device(Workload(Pool(), F.cross_entropy, (torch.randn(32, 24), torch.randint(5, (32,)))))


def _made_on_cuda(name: str) -> Workload:
    return on_device(make(name))


MODELS: dict[str, Callable[[], Workload]] = {
    name: partial(_made_on_cuda, name) for name in ("vit", "mutated", "tied", "frozen", "shared_gradient")
}


def train(
    workload: Workload, run: Callable[..., Any], *, batches: int = 1, set_to_none: bool = True, clip: float | None = None
) -> dict[str, torch.Tensor]:
    """All that four steps of AdamW leave behind, on batches that differ, and what hooks see."""
    parameters = [p for p in workload.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    left: dict[str, torch.Tensor] = {}
    seen: dict[int, list[torch.Tensor]] = {k: [] for k in range(len(parameters))}
    handles = [p.register_hook(seen[k].append) for k, p in enumerate(parameters)]
    torch.manual_seed(11)
    for i in range(4):
        for j in range(batches):
            batch = [value.roll(i + 3 * j, 0) for value in workload.batch]
            loss = loss_of(run(*batch))
            (loss / batches).backward()
            left[f"loss {i} {j}"] = loss.detach()  # no copy: nobody may write to it
        if clip is not None:
            left[f"norm {i}"] = nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        left |= {f"gradient {i} {k}": p.grad.clone() for k, p in enumerate(parameters) if p.grad is not None}
        optimizer.zero_grad(set_to_none=set_to_none)
    for handle in handles:
        handle.remove()
    if clip is None:  # which is in place, on what hooks have seen
        left |= {f"seen {k} {i}": gradient for k in seen for i, gradient in enumerate(seen[k]) if gradient is not None}
    left |= {name: value.detach() for name, value in workload.model.state_dict().items()}
    left["random state"] = torch.cuda.get_rng_state()
    return left


LOOPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"batches": 3},
    "accumulated, clipped": {"batches": 2, "clip": 0.1},
    "zeroed": {"set_to_none": False},
    "accumulated, zeroed": {"batches": 2, "set_to_none": False},
}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
