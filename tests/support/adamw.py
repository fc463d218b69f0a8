"""Three steps of AdamW, by a schedule or by plain PyTorch, and all that they leave behind."""

import copy

import torch

from graphs.schedule import Schedule
from planner.capture.lowering.lower import Capture
from planner.capture.step import TrainingStep
from planner.models import Workload
from planner.runtime.executor import Executor
from planner.runtime.measure import loss_of


def train(workload: Workload, schedule: tuple[Capture, Schedule] | None) -> dict[str, torch.Tensor]:
    """All that three steps of AdamW leave behind; plain PyTorch without a schedule."""
    model = copy.deepcopy(workload.model)
    step = TrainingStep(model, workload.loss_fn)
    run = step if schedule is None else Executor(schedule[0], schedule[1], model, workload.loss_fn)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    torch.manual_seed(11)
    left = {}
    for i in range(3):
        optimizer.zero_grad()
        loss = loss_of(run(*workload.batch))
        loss.backward()
        left[f"loss {i}"] = loss.detach()
        left |= {f"gradient {i} of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    left |= {name: value.detach() for name, value in model.state_dict().items()}
    left["random state"] = torch.get_rng_state()
    return left


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
