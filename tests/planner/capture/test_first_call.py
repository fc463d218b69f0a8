"""What a model does once, in its first call, happens before it is captured."""

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from graphs.errors import TraceError
from tests.planner.training.test_supported_code import check_trains_as_eager

LOCK = threading.Lock()


class Hooked(nn.Module):
    """Installs hooks under a lock in its first call, as models of Transformers do, draws, and counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)))
        self.register_buffer("calls", torch.zeros(()))
        self.caches: dict[int, torch.Tensor] = {}
        self.names: list[str] = []
        self.is_running = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.is_running = True
        if not self.names:
            with LOCK:
                for name, layer in self.layers.named_children():
                    layer.register_forward_hook(lambda _module, _inputs, output: 0.5 * output)
                    self.names.append(name)
        if x.shape[1] not in self.caches:
            with LOCK:
                self.caches[x.shape[1]] = torch.linspace(0, 1, x.shape[1])
        self.calls.add_(1)
        found = F.dropout(self.layers(x + self.caches[x.shape[1]]), 0.1) * self.calls
        self.is_running = False
        return found


def vectors(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(96, 16, generator=generator), torch.randn(96, 16, generator=generator)


def test_hooks_and_caches_of_the_first_call_are_made_before_the_capture() -> None:
    check_trains_as_eager(Hooked, F.mse_loss, vectors)


def test_planning_makes_the_first_call_and_restores_tensors_and_random_states() -> None:
    model = Hooked()
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    planner.trace(model, F.mse_loss, vectors(0), passes=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert model.calls.item() == 0
    assert model.names == ["0", "1", "2"] and list(model.caches) == [16]
    assert all(len(layer._forward_hooks) == 1 for layer in model.layers)


class Counting(Hooked):
    """Counts its calls in Python besides, which no capture can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.log: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.log.append(self.count)
        return self.count * super().forward(x)


def test_values_that_every_call_changes_are_as_before() -> None:
    model = Counting()
    with pytest.raises(TraceError, match="changes at every step"):
        planner.trace(model, F.mse_loss, vectors(0), passes=1)
    assert (model.count, model.log) == (0, [])


def test_a_step_that_cannot_be_captured_has_the_error_of_its_capture() -> None:
    class Locked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> Any:
            with LOCK:
                return self.layer(x)

    with pytest.raises(TraceError, match="lock"):
        planner.trace(Locked(), F.mse_loss, vectors(0), passes=1)
