"""Loops of Hugging Face Accelerate: prepared models, optimizers and loaders, with and without a plan."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerate = pytest.importorskip("accelerate")

import planner  # noqa: E402
from planner.graphs.errors import MismatchError  # noqa: E402
from tests.support.budgets import HALF_WAY  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.usefixtures("half_way")]

QUICK: dict[str, Any] = {"passes": 1, "tolerance": 0.05, "time_limit_s": 20.0, "compare_eager": False}


@pytest.fixture(autouse=True)
def _own_state() -> Iterator[None]:
    """Accelerate keeps the precision of the first ``Accelerator`` for the process."""
    accelerate.state.AcceleratorState._reset_state(True)
    yield
    accelerate.state.AcceleratorState._reset_state(True)


def prepared(precision: str, rows: int) -> tuple[Any, ...]:
    """The accelerator, and what it prepared: 256 rows in a batch."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32), nn.LayerNorm(32)) for _ in range(3)]
    model = nn.Sequential(*layers, nn.Linear(32, 5))
    data = TensorDataset(torch.randn(rows, 32), torch.randint(5, (rows,)))
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return accelerator, *accelerator.prepare(model, optimizer, DataLoader(data, batch_size=256))


def trained(precision: str, rows: int = 1280, budget: str | int | None = None, **options: Any) -> tuple[list[torch.Tensor], Any]:
    """Losses, norms and parameters of two epochs, with a plan where there is a budget."""
    accelerator, model, optimizer, loader = prepared(precision, rows)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    if budget is not None:
        batch = tuple(next(iter(loader)))
        step = planner.compile(
            model, F.cross_entropy, batch, budget=budget, optimizer=optimizer, accumulate=True, **{**QUICK, **options}
        )
    torch.manual_seed(5)
    left = []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = step(x, y)
                accelerator.backward(loss)
                left.append(loss.detach())
                if accelerator.sync_gradients:
                    left.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
                optimizer.step()
                optimizer.zero_grad()
    return [*left, *(p.detach() for p in model.parameters())], step


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_trains_as_accelerate_alone(precision: str) -> None:
    eager, _ = trained(precision)
    accelerate.state.AcceleratorState._reset_state(True)
    planned, step = trained(precision, budget=HALF_WAY)
    assert all(map(torch.equal, planned, eager))
    assert step.plan.graph.provenance["optimizer"]["name"] == "AdamW"
    assert len(step.plan.schedule.computed) > step.plan.graph.ops
    assert step.plan.measured_peak_bytes <= step.plan.budget_bytes


def test_a_state_that_is_loaded_after_planning_trains_on_as_accelerate_alone(tmp_path: Path) -> None:
    def train(step: Any) -> None:
        for x, y in loader:
            accelerator.backward(step(x, y))
            optimizer.step()
            optimizer.zero_grad()

    accelerator, model, optimizer, loader = prepared("bf16", 512)
    train(lambda x, y: F.cross_entropy(model(x), y))
    accelerator.save_state(tmp_path)
    train(lambda x, y: F.cross_entropy(model(x), y))
    alone = [p.detach() for p in model.parameters()]
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator, model, optimizer, loader = prepared("bf16", 512)
    step = planner.compile(model, F.cross_entropy, tuple(next(iter(loader))), budget=HALF_WAY, optimizer=optimizer, **QUICK)
    accelerator.load_state(tmp_path)
    train(step)
    assert all(map(torch.equal, model.parameters(), alone))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"replan": True}, {"dynamic": True}], ids=str)
def test_smaller_last_batch_trains_as_accelerate_alone(options: dict[str, bool]) -> None:
    eager, _ = trained("bf16", rows=960)
    accelerate.state.AcceleratorState._reset_state(True)
    planned, _ = trained("bf16", rows=960, budget="4MB", **options)
    assert all(map(torch.equal, planned, eager))


def test_model_prepared_after_planning_raises() -> None:
    model, batch = nn.Linear(8, 3), (torch.randn(4, 8), torch.randint(3, (4,)))
    step = planner.compile(model, F.cross_entropy, batch, budget="1MB", **QUICK)
    accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    with pytest.raises(MismatchError, match=r"model\.forward was set since the step was planned"):
        step(*batch)
