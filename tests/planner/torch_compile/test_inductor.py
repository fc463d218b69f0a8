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
from graphs.zoo import Workload
from planner.runtime.measure import Outcome, measure_memory, outcome
from planner.studies.measured import relative_error
from planner.torch_compile import backend

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++"),
]


def mlp(norm: type[nn.Module] = nn.LayerNorm, dropout: float = 0.0) -> Workload:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), norm(32), nn.GELU(), nn.Dropout(dropout)) for _ in range(3)]
    return Workload(nn.Sequential(*layers), F.mse_loss, (torch.randn(512, 32), torch.randn(512, 32)))


def run(workload: Workload, budget: str) -> tuple[Outcome, int]:
    """What a step with Inductor's kernels leaves behind, and its peak."""
    model = copy.deepcopy(workload.model)
    compiled = torch.compile(model, backend="planner", dynamic=False, options={"budget": budget, "compile": "inductor"})

    def step(*batch: Any) -> Any:
        return workload.loss_fn(compiled(*batch[:-1]), batch[-1])

    found = outcome(step, model, workload.batch, seed=1)
    return found, measure_memory(step, workload.batch, static_bytes=0, device=torch.device("cpu")).peak_bytes


def check(wanted: Outcome, found: Outcome) -> None:
    names = [name for name in wanted.values if "random" not in name]
    assert relative_error(wanted, found, names) < 1e-5


@pytest.mark.parametrize("norm", [nn.LayerNorm, pytest.param(nn.BatchNorm1d, marks=pytest.mark.slow)])
def test_gradients_are_eager_ones_but_for_rounding(norm: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    workload = mlp(norm)
    plans = []
    solve = backend.solve
    monkeypatch.setattr(backend, "solve", lambda *given, **options: plans.append(solve(*given, **options)) or plans[-1])
    wanted = outcome(TrainingStep(workload.model, workload.loss_fn), workload.model, workload.batch, seed=1)
    peaks = {}
    for budget in ("100%", "70%"):
        found, peaks[budget] = run(workload, budget)
        check(wanted, found)
    assert len(plans[1].schedule.computed) > plans[1].graph.ops
    assert peaks["70%"] < 0.9 * peaks["100%"]
    # The loss function is not in the graph: a gradient and its input's size, besides.
    assert peaks["70%"] <= plans[1].budget_bytes + 2 * workload.batch[0].nbytes


@pytest.mark.parametrize("as_eager", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_dropout_is_the_same_when_computed_again(*, as_eager: bool) -> None:
    workload = mlp(dropout=0.3)
    with inductor_config.patch(fallback_random=as_eager):
        check(run(workload, "100%")[0], run(workload, "75%")[0])
