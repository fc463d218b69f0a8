"""Batches of varying sizes: exact, within the budget from the first one on, and few plans kept."""

from pathlib import Path

import pytest
import torch
from torch import nn

import planner
from planner.capture.workload.models import Workload, build
from planner.graphs.errors import InfeasibleError
from planner.train.compile.dynamic import DynamicStep
from tests.support.budgets import HALF_WAY
from tests.support.models.outcomes import assert_exact, assert_exact_within_budget

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.usefixtures("half_way")]

Tokens = tuple[torch.Tensor, torch.Tensor]


def gpt2() -> Workload:
    torch.manual_seed(0)
    return build("gpt2", layers=1, width=32, heads=2, vocab=61, seq=400, batch=4)


def tokens(batch: int, length: int) -> Tokens:
    return torch.randint(61, (batch, length)), torch.randint(61, (batch, length))


def planned(workload: Workload, first: Tokens, **options: int) -> DynamicStep:
    step = planner.compile(
        workload.model,
        workload.loss_fn,
        first,
        budget=HALF_WAY,
        dynamic=True,
        passes=1,
        tolerance=0.1,
        time_limit_s=60.0,
        **options,
    )
    assert isinstance(step, DynamicStep)
    return step


def check(step: DynamicStep, workload: Workload, batch: Tokens) -> None:
    assert_exact_within_budget(step, workload.model, batch, workload.loss_fn)
    assert step.plans[-1] == step.plan
    assert step.plan.measured_peak_bytes <= step.plan.budget_bytes


@pytest.mark.slow
def test_dynamic_plans_keep_the_budget_for_varying_lengths() -> None:
    workload = gpt2()
    step = planned(workload, tokens(4, 48), max_plans=3)
    budget = step.plan.budget_bytes
    for length in (48, 33, 40, 49, 53, 33):
        check(step, workload, tokens(4, length))
        assert step.plan.budget_bytes == budget
        assert len(step.plans) <= 3
    assert step.plans[-2].graph.keep_everything_peak_bytes > budget
    assert [plan.graph.provenance["inputs"][0] for plan in step.plans] == ["int64[4, 49]", "int64[4, 53]", "int64[4, 33]"]

    with pytest.raises(InfeasibleError, match=r"for a batch of \[4, 400\], .*least any schedule"):
        step(*tokens(4, 400))
    check(step, workload, tokens(4, 53))


def test_batch_and_length_vary_apart() -> None:
    torch.manual_seed(0)
    layers = (nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Dropout(0.1), nn.Linear(32, 8))
    workload = Workload(nn.Sequential(*layers), nn.functional.mse_loss, (torch.randn(4, 16, 8), torch.randn(4, 16, 8)))
    step = planned(workload, workload.batch)
    for batch, length in ((5, 12), (3, 20), (4, 17)):
        check(step, workload, (torch.randn(batch, length, 8), torch.randn(batch, length, 8)))
    assert len(step.plans) == 4


class Branches(nn.Module):
    """Its ops depend on the length."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        return (hidden.tanh() if len(x) > 20 else hidden).sum()


def test_ops_may_change_with_the_size() -> None:
    torch.manual_seed(0)
    model = Branches()
    step = planner.compile(model, None, (torch.randn(16, 8),), budget="1MB", dynamic=True, passes=1)
    for rows in (12, 24):
        batch = (torch.randn(rows, 8),)
        assert_exact(step, model, batch)


def test_plans_of_all_sizes_are_kept_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Branches()

    def step() -> DynamicStep:
        made = planner.compile(model, None, (torch.randn(16, 8),), budget="1MB", dynamic=True, passes=1, cache=tmp_path)
        made(torch.randn(12, 8))
        assert isinstance(made, DynamicStep)
        return made

    first = step()
    monkeypatch.setattr("planner.train.compile.compiler.profile_capture", None)  # nothing is measured again
    assert [plan.schedule for plan in step().plans] == [plan.schedule for plan in first.plans]
