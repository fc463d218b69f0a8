"""Training by a schedule is training: three AdamW steps, equal to the last bit."""

import copy

import pytest
import torch

from graphs.capture.lower import Capture
from graphs.capture.step import TrainingStep
from graphs.capture.trace import capture
from graphs.cost.profile import profile
from graphs.cost.replay import RealStep
from graphs.schedule import Schedule
from graphs.simulate import simulate
from graphs.zoo import Workload
from planner.runtime.executor import Executor
from planner.runtime.measure import loss_of
from solvers.policies.store_all import store_all
from tests.support.budgets import on_the_way
from tests.support.steps import STEPS, make, random_schedule, solve_for

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


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


@pytest.mark.parametrize("name", STEPS)
def test_every_schedule_trains_as_eager_does(name: str) -> None:
    workload = make(name)
    captured = capture(*workload)
    graph = profile(RealStep.of(captured, TrainingStep(workload.model, workload.loss_fn), workload.batch), passes=1)
    eager = train(workload, None)
    assert_same(eager, train(workload, (captured, store_all(graph))))
    recomputed = 0
    for budget in on_the_way(graph, 0.6, 0.1):
        plan = solve_for(0.0, graph, budget)
        recomputed += simulate(graph, plan.schedule).recomputed
        assert_same(eager, train(workload, (captured, plan.schedule)))
    for seed in range(3):
        schedule = random_schedule(graph, seed)
        recomputed += simulate(graph, schedule).recomputed
        assert_same(eager, train(workload, (captured, schedule)))
    assert recomputed > 0


def test_recomputed_dropout_draws_what_it_drew() -> None:
    workload = make("gpt2_written")
    captured = capture(*workload)
    dropouts = [op.id for op in captured.graph.ops if op.random and op.recomputable]
    schedule = random_schedule(captured.graph, 1)
    again = [op for op in dropouts if schedule.computed.count(op) > 1]
    assert again
    assert_same(train(workload, None), train(workload, (captured, schedule)))
