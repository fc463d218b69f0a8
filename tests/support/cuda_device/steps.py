"""Steps on CUDA or on the stand-in, recorded as CUDA graphs or not: models, and loops that train them."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models.parts import FunctionModule
from planner.capture.step import TrainingStep
from planner.capture.trace import capture
from planner.capture.workload.models import Workload
from planner.measure.steps import get_loss
from planner.plans.solve import solve
from planner.runtime.cuda.cuda_graph import CudaGraphs
from planner.runtime.cuda.graphed_step import prepare_for_recording, record
from planner.runtime.executor import Executor
from tests.support.cuda_device import on_device
from tests.support.models.outcomes import assert_same
from tests.support.models.steps import make, random_schedule


def recorded(workload: Workload, *, seed: int | None = 1, recorder: CudaGraphs | None = None) -> Executor:
    """The recorded step, on CUDA, of a schedule that recomputes at random, or of one that keeps everything."""
    captured = prepare_for_recording(capture(*workload))
    schedule = random_schedule(captured.graph, seed) if seed else solve(captured.graph, "100%").schedule
    executor = Executor(captured, schedule, workload.model, workload.loss_fn)
    step = TrainingStep(workload.model, workload.loss_fn)
    record(captured, executor, step, workload.batch, recorder or CudaGraphs(executor.device))
    return executor


def dropout_and_norm() -> Workload:
    """Dropout, batch norm with all its buffers, and an input that is counted in."""
    torch.manual_seed(7)
    parts: dict[str, Any] = {"first": nn.Linear(24, 48), "norm": nn.BatchNorm1d(48), "last": nn.Linear(48, 5)}
    model = FunctionModule(lambda m, x: m.last(F.dropout(torch.relu(m.norm(m.first(x))), 0.3)), **parts)
    return on_device(Workload(model, F.cross_entropy, (torch.randn(32, 24), torch.randint(5, (32,)))))


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
            loss = get_loss(run(*batch))
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


def assert_as_eager(workload: Workload, step: Callable[..., Any], batches: int = 2) -> None:
    """Train a copy of the model by eager PyTorch and the model by `step`: all that is left is equal, to the last bit."""
    twin = Workload(copy.deepcopy(workload.model), workload.loss_fn, workload.batch)
    wanted = trained(twin, TrainingStep(twin.model, twin.loss_fn), batches)
    found = trained(workload, step, batches)
    assert_same(wanted, found)


def trained(workload: Workload, step: Callable[..., Any], batches: int = 2) -> dict[str, torch.Tensor]:
    """What is left of as many steps of SGD, on the host."""
    parameters = {name: p for name, p in workload.model.named_parameters() if p.requires_grad}
    left: dict[str, torch.Tensor] = {}
    torch.manual_seed(2)
    for i in range(batches):
        loss = get_loss(step(*workload.batch))
        loss.backward()
        left[f"loss {i}"] = loss.detach().cpu()
        left |= {f"gradient {i} of {name}": p.grad.cpu() for name, p in parameters.items() if p.grad is not None}
        with torch.no_grad():
            for p in parameters.values():
                if p.grad is not None:
                    p -= 0.01 * p.grad
                p.grad = None
    left |= {name: value.cpu() for name, value in workload.model.state_dict().items()}
    left["random state"] = torch.cuda.get_rng_state()
    return left
