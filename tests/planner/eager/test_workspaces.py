"""What ops take while they run besides their outputs, as it is measured on CUDA."""

import pytest
import torch

from planner.eager.session import rematerialize
from planner.eager.sizes import KnownOp
from tests.support.eager.device_costs import Costs, measure_by


def test_first_measurement_replaces_a_guess_and_larger_ones_raise_it() -> None:
    known = KnownOp(100, workspace_bytes=1000, guessed=True)
    known.measured(30)
    assert (known.workspace_bytes, known.guessed) == (30, False)
    known.measured(40)
    known.measured(20)
    assert known.workspace_bytes == 40


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh()) for _ in range(8)))


def test_room_is_made_for_workspaces_once_they_are_known(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(512, 256)
    output_bytes = 512 * 256 * 4
    measure_by(Costs(3 * output_bytes), monkeypatch)
    with rematerialize("1GB") as session:
        (model(x).sum()).backward()
        model.zero_grad()
        (model(x).sum()).backward()
        known = [op for op in session._entered.sizes._recent.values() if op.out_bytes == output_bytes]
        assert known and all(op.workspace_bytes == 2 * output_bytes and op.seconds == 1.0 for op in known)
        # The peak counts outputs and workspaces of the op that runs.
        assert session.peak_bytes >= session._entered.memory.live_bytes + 3 * output_bytes


def test_a_budget_holds_with_workspaces(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(512, 256)
    output_bytes = 512 * 256 * 4
    measure_by(Costs(3 * output_bytes), monkeypatch)
    with rematerialize("1GB") as free:
        for _ in range(2):
            model(x).sum().backward()
            model.zero_grad()
    held = free.peak_bytes - 2 * output_bytes
    with rematerialize(held) as session:
        for _ in range(3):
            model(x).sum().backward()
            model.zero_grad()
        assert session.evictions > 0 and session.peak_bytes <= held
