"""Steps on the stand-in, compared with eager PyTorch on the CPU and on the stand-in."""

import copy
from collections.abc import Callable
from typing import Any

import torch

from planner.capture.step import TrainingStep
from planner.models import Workload
from planner.runtime.measure import loss_of


def assert_as_eager(workload: Workload, step: Callable[..., Any], batches: int = 2) -> None:
    """Train a copy of the model by eager PyTorch and the model by `step`: all that is left is equal, to the last bit."""
    twin = Workload(copy.deepcopy(workload.model), workload.loss_fn, workload.batch)
    wanted = trained(twin, TrainingStep(twin.model, twin.loss_fn), batches)
    found = trained(workload, step, batches)
    assert wanted.keys() == found.keys()
    assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []


def trained(workload: Workload, step: Callable[..., Any], batches: int = 2) -> dict[str, torch.Tensor]:
    """What is left of as many steps of SGD, on the host."""
    parameters = {name: p for name, p in workload.model.named_parameters() if p.requires_grad}
    left: dict[str, torch.Tensor] = {}
    torch.manual_seed(2)
    for i in range(batches):
        loss = loss_of(step(*workload.batch))
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
