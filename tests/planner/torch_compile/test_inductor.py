"""Inductor's kernels under our schedule: within the budget, and right."""

import copy
import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import config as inductor_config

from graphs.capture.step import TrainingStep
from graphs.ir import Graph
from graphs.plan import Plan
from graphs.zoo import Workload
from planner.runtime.measure import StepOutcome, measure_memory, outcome
from planner.studies.measured import relative_error
from planner.torch_compile import backend
from tests.support.budgets import between

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++"),
]


def mlp(norm: type[nn.Module] = nn.LayerNorm, dropout: float = 0.0) -> Workload:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), norm(32), nn.GELU(), nn.Dropout(dropout)) for _ in range(2)]
    return Workload(nn.Sequential(*layers), F.mse_loss, (torch.randn(512, 32), torch.randn(512, 32)))


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Graph, Plan]]:
    """What was solved, with its plan."""
    found: list[tuple[Graph, Plan]] = []
    solve = backend.solve

    def noted(graph: Graph, budget: str | int, **options: Any) -> Plan:
        found.append((graph, solve(graph, budget, **options)))
        return found[-1][1]

    monkeypatch.setattr(backend, "solve", noted)
    return found


def run(workload: Workload, budget: str | int) -> tuple[StepOutcome, int]:
    """What a step with Inductor's kernels leaves behind, and its peak."""
    model = copy.deepcopy(workload.model)
    compiled = torch.compile(model, backend="planner", dynamic=False, options={"budget": budget, "compile": "inductor"})

    def step(*batch: Any) -> Any:
        return workload.loss_fn(compiled(*batch[:-1]), batch[-1])

    found = outcome(step, model, workload.batch, seed=1)
    return found, measure_memory(step, workload.batch, static_bytes=0, device=torch.device("cpu")).peak_bytes


def check(wanted: StepOutcome, found: StepOutcome) -> None:
    names = [name for name in wanted.values if "random" not in name]
    assert relative_error(wanted, found, names) < 1e-5


@pytest.mark.parametrize("norm", [nn.LayerNorm, pytest.param(nn.BatchNorm1d, marks=pytest.mark.slow)])
def test_gradients_are_eager_ones_but_for_rounding(norm: type[nn.Module], solved: list[tuple[Graph, Plan]]) -> None:
    workload = mlp(norm)
    wanted = outcome(TrainingStep(workload.model, workload.loss_fn), workload.model, workload.batch, seed=1)
    found, whole = run(workload, "100%")
    check(wanted, found)
    found, tight = run(workload, between(solved[0][0]))
    check(wanted, found)
    plan = solved[1][1]
    assert len(plan.schedule.computed) > plan.graph.ops
    assert tight < whole
    # The loss function is not in the graph: a gradient and its input's size, besides.
    assert tight <= plan.budget_bytes + 2 * workload.batch[0].nbytes


@pytest.mark.parametrize("as_eager", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_dropout_is_the_same_when_computed_again(solved: list[tuple[Graph, Plan]], *, as_eager: bool) -> None:
    workload = mlp(dropout=0.3)
    with inductor_config.patch(fallback_random=as_eager):
        wanted, _ = run(workload, "100%")
        check(wanted, run(workload, between(solved[0][0]))[0])
