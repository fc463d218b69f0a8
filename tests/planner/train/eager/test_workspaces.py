"""What ops take while they run besides their outputs."""

import pytest
import torch

from planner.runtime.allocator import measure_memory_rise, record_cpu_allocations
from planner.torch_private.core import profiler_enabled
from planner.train.eager.session import Rematerialization, rematerialize
from tests.support.eager.device_costs import Costs, measure_by
from tests.support.eager.learned_ops import watch_learned


def test_first_measurement_replaces_a_guess_and_a_larger_one_raises_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lstm, x = torch.nn.LSTM(8, 8), torch.randn(3, 2, 8)
    costs = measure_by(Costs(), monkeypatch)
    for first, second in (0, 10**6), (10**6, 0):
        with rematerialize("1GB") as session:
            learned = watch_learned(session.debug, monkeypatch)
            costs.taken_bytes = first
            lstm(x)
            known = max(learned, key=lambda op: op.out_bytes)
            assert not known.guessed and known.workspace_bytes == max(first - known.out_bytes, 0)
            costs.taken_bytes = second
            lstm(x)
            assert known.workspace_bytes == 10**6 - known.out_bytes


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh()) for _ in range(8)))


def test_room_is_made_for_workspaces_once_they_are_known(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(512, 256)
    output_bytes = 512 * 256 * 4
    costs = measure_by(Costs(3 * output_bytes), monkeypatch)
    with rematerialize("1GB") as session:
        (model(x).sum()).backward()
        model.zero_grad()
        (model(x).sum()).backward()
        # The peak counts outputs and workspaces of the op that runs.
        assert session.peak_bytes >= session.debug.memory.live_bytes + 3 * output_bytes
        costs.started.clear()
        model(x)
        known = [op for op in costs.started if op.out_bytes == output_bytes]
        assert known and all(op.workspace_bytes == 2 * output_bytes and op.seconds == 1.0 for op in known)


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


class Selecting(torch.nn.Module):
    """Selects by a mask: positions take 8 bytes for each element, and how many there are depends on the data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp() * torch.masked_select(x, x > 0).mean()


@pytest.mark.parametrize("layer", [torch.nn.Tanh, Selecting])
def test_what_kernels_on_the_cpu_take_is_in_the_budget(layer: type[torch.nn.Module]) -> None:
    """Convolutions copy their inputs and outputs."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3, padding=1), layer()) for _ in range(6)]
    model, x = torch.nn.Sequential(*layers), torch.randn(16, 8, 32, 32)

    def train() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    def measured(budget: int) -> tuple[Rematerialization, int]:
        model.zero_grad()
        with rematerialize(budget) as session:
            before = session.peak_bytes
            for _ in range(2):
                train()
            model.zero_grad()
            return session, before + measure_memory_rise(train, torch.device("cpu")).peak_bytes

    free, free_bytes = measured(10**9)
    assert free.peak_bytes >= free_bytes
    budget = (free.peak_bytes + free.least_budget()) // 2
    session, taken_bytes = measured(budget)
    assert session.evictions > 0
    assert taken_bytes <= session.peak_bytes <= budget


def test_an_op_that_fails_while_it_is_measured_leaves_no_profiler() -> None:
    with rematerialize("1GB"):
        with pytest.raises(RuntimeError, match="shapes"):
            torch.ones(2, 3) @ torch.ones(2, 3)
        assert not profiler_enabled()


def test_a_profiler_of_the_program_sees_its_allocations() -> None:
    with rematerialize("1GB"):
        sizes = [event.size_bytes for event in record_cpu_allocations(lambda: torch.ones(1001).sin())]
    assert sizes.count(4004) == 2
