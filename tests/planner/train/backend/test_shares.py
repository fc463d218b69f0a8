"""A share of the budget is one of the predicted peak of plain eager PyTorch, whichever kernels run."""

import pytest
import torch
from torch import nn

import planner
from planner.plans.solve import compute_eager_peak_bytes
from planner.plans.summary import summarize
from planner.settings.budget import Share

LAYERS, WIDTH, ROWS = 4, 128, 1024


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))))


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What budgets were shares of, in order."""
    found: list[int] = []
    in_bytes = Share.resolve

    def noted(budget: Share, peak_bytes: int) -> int:
        found.append(peak_bytes)
        return in_bytes(budget, peak_bytes)

    monkeypatch.setattr(Share, "resolve", noted)
    return found


def test_a_share_is_the_same_for_the_kernels_of_eager_and_of_inductor(peaks: list[int]) -> None:
    batch = torch.randn(ROWS, WIDTH)
    for kernels in ("eager", "inductor"):
        torch._dynamo.reset()
        compiled = torch.compile(model(), backend="planner", options={"budget": "90%", "kernels": kernels, "time_limit_s": 5})
        compiled(batch).sum().backward()
    assert len(set(peaks)) == 1
    kept_by_eager = LAYERS * 3 * ROWS * WIDTH * 4  # the inputs of each layer, GELU and LayerNorm
    assert peaks[0] > kept_by_eager


def test_eager_peak_includes_static_memory_of_the_planned_graph() -> None:
    batch = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    eager = planner.trace(model(), nn.functional.mse_loss, batch, roofline="cpu")
    planned = planner.trace(model(), nn.functional.mse_loss, batch, roofline="cpu", optimizer="adamw")
    assert (
        compute_eager_peak_bytes(eager, planned, None)
        == summarize(planned).keep_everything_peak_bytes
        > summarize(eager).keep_everything_peak_bytes
    )
