"""Steps as they are written to fine-tune models: frozen layers, moving averages, adapters."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from tests.planner.training.test_supported_code import check_trains_as_eager


def tokens(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(20, (16, 12), generator=generator), torch.randn(16, 12, 16, generator=generator)


class OnFrozenEmbeddings(nn.Module):
    """Trained layers on embeddings that are not, with a function that is called on the embeddings."""

    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16).requires_grad_(requires_grad=False)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)))
        self.call = call

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers(self.call(self.embedding(ids)))


def by_attribute(hidden: torch.Tensor) -> torch.Tensor:
    hidden.requires_grad = True
    return hidden


def writing_what_is(hidden: torch.Tensor) -> torch.Tensor:
    eye = torch.eye(16)
    eye.requires_grad = False
    return hidden @ eye


@pytest.mark.parametrize(
    "call",
    [torch.Tensor.requires_grad_, by_attribute, lambda h: (2 * h).detach().requires_grad_().requires_grad_(), writing_what_is],
)
def test_hidden_states_that_are_told_to_require_grad_train_as_in_eager_mode(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    check_trains_as_eager(lambda: OnFrozenEmbeddings(call), F.mse_loss, tokens)


def test_the_recipe_for_checkpointing_with_frozen_embeddings_trains_as_in_eager_mode() -> None:
    def make() -> nn.Module:
        model = OnFrozenEmbeddings(lambda hidden: hidden)
        model.embedding.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_(True))
        return model

    check_trains_as_eager(make, F.mse_loss, tokens)


class Asking(nn.Module):
    """A layer that looks for weights of another library by the names of their classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)))
        self.asked = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = type(self.asked.weight)
        if kind.__module__.startswith("other.") or kind.__qualname__.lower() == "quantized":
            return x
        return self.asked(self.layers(x))


def vectors(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(96, 16, generator=generator), torch.randn(96, 16, generator=generator)


def test_names_of_classes_of_tensors_are_read() -> None:
    check_trains_as_eager(Asking, F.mse_loss, vectors)


class Averaged(nn.Module):
    """A model with a moving average of its weights, which are written by ``.data =``."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)))
        self.averaged = copy.deepcopy(self.trained).requires_grad_(requires_grad=False)
        self.register_buffer("center", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.trained(x)
        with torch.no_grad():
            for average, weight in zip(self.averaged.parameters(), self.trained.parameters(), strict=True):
                average.data = 0.9 * average.data + 0.1 * weight.data
            wanted = self.averaged(x)
        loss = F.mse_loss(found, wanted - self.center)
        self.center.data = 0.9 * self.center + 0.1 * found.mean(0)
        return loss


def test_data_of_weights_is_written_in_place() -> None:
    check_trains_as_eager(Averaged, None, lambda number: vectors(number)[:1])


@pytest.mark.parametrize("planned", [planner.checkpoint, lambda m, **o: torch.compile(m, backend="planner", options=o)])
def test_data_of_weights_is_written_in_place_by_the_backend(planned: Callable[..., Any]) -> None:
    trained = []
    for wrap in (planned, lambda model, **_: model):
        torch._dynamo.reset()
        torch.manual_seed(2)
        model = Averaged()
        run = wrap(model, budget="100%")
        losses = []
        for number in range(3):
            loss = run(vectors(number)[0])
            loss.backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
            model.zero_grad()
            losses.append(loss.item())
        trained.append((losses, model.state_dict()))
    (losses, state), (wanted_losses, wanted_state) = trained
    assert losses == wanted_losses
    assert all(torch.equal(value, wanted_state[name]) for name, value in state.items())
