"""Steps as they are written to fine-tune models: frozen layers, moving averages, adapters."""

import copy
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from benchmarks.models.parts import FunctionModule
from planner.graphs.errors import TraceError
from tests.support.marks import slow
from tests.support.models.as_eager import Together, check_trains_as_eager
from tests.support.models.outcomes import assert_same, train_by


def tokens(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(20, (16, 12), generator=generator), torch.randn(16, 12, 16, generator=generator)


class OnFrozenEmbeddings(nn.Module):
    """Trained layers on embeddings that are not, with a function that is called on the embeddings."""

    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor], layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16).requires_grad_(requires_grad=False)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(layers)))
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


GRADIENT_WRITES = [
    torch.Tensor.requires_grad_,
    by_attribute,
    lambda h: (2 * h).detach().requires_grad_().requires_grad_(),
    writing_what_is,
    lambda h: h + torch.zeros(16, requires_grad=True),
]


def all_and_each(ways: list[Any]) -> list[Any]:
    """Several ways in one step; the weekly run has a step for each."""
    return [ways, *slow(*([way] for way in ways))]


@pytest.mark.parametrize("calls", all_and_each(GRADIENT_WRITES))
def test_hidden_states_that_are_told_to_require_grad_train_as_in_eager_mode(calls: list[Any]) -> None:
    layers = 3 if len(calls) == 1 else 1  # several together suffice for something to be recomputed
    check_trains_as_eager(lambda: Together(*(OnFrozenEmbeddings(call, layers) for call in calls)), F.mse_loss, tokens)


def test_the_recipe_for_checkpointing_with_frozen_embeddings_trains_as_in_eager_mode() -> None:
    def make() -> nn.Module:
        model = OnFrozenEmbeddings(lambda hidden: hidden)
        model.embedding.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_(True))
        return model

    check_trains_as_eager(make, F.mse_loss, tokens)


class WithCritic(nn.Module):
    """A generator and its critic in one step; the critic's weights get no gradient from the generator's loss."""

    def __init__(self, freeze: Callable[[nn.Module, bool], object], *, shared: bool) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.critic = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
        self.freeze = freeze
        if shared:
            self.critic[0].weight = self.generator[0].weight

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        self.freeze(self.critic, False)
        made = self.generator(x)
        fooled = F.softplus(-self.critic(made)).mean()
        self.freeze(self.critic, True)
        return fooled + F.softplus(self.critic(made.detach())).mean() + F.softplus(-self.critic(real)).mean()


def freeze_each(module: nn.Module, trained: bool) -> None:  # as the method of a module
    for parameter in module.parameters():
        parameter.requires_grad = trained


@pytest.mark.parametrize(("freeze", "shared"), [(nn.Module.requires_grad_, False), (freeze_each, True)])
def test_parameters_are_frozen_for_a_part_of_the_step(freeze: Callable[[nn.Module, bool], object], shared: bool) -> None:
    check_trains_as_eager(lambda: WithCritic(freeze, shared=shared), None, vectors)


def test_parameters_that_the_step_leaves_frozen_are_named() -> None:
    model = WithCritic(lambda critic, trained: critic.requires_grad_(trained and False), shared=False)
    with pytest.raises(
        TraceError, match=r"changes requires_grad of a parameter \(model.critic.0.weight\) and does not set it back"
    ):
        planner.compile(model, None, vectors(0), budget="100%")
    assert all(parameter.requires_grad for parameter in model.parameters())


class Naming(nn.Module):
    """A step that looks at how its layers are printed, as PEFT does where an adapter is switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * len(repr(self.layers).partition("(")[0])


def test_modules_are_printed_in_the_step() -> None:
    check_trains_as_eager(Naming, F.mse_loss, vectors)


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


def assert_backend_trains_as_eager(make: Callable[[], nn.Module], wrap: Callable[..., Any]) -> None:
    trained = []
    for planned in (wrap, lambda model, **_: model):
        torch._dynamo.reset()
        torch.manual_seed(2)
        model = make()
        trained.append(train_by(planned(model, budget="100%"), model, (vectors(number)[:1] for number in range(3))))
    assert_same(*trained)


@pytest.mark.parametrize("planned", [lambda m, **o: torch.compile(m, backend="planner", options=o), *slow(planner.checkpoint)])
def test_data_of_weights_is_written_in_place_by_the_backend(planned: Callable[..., Any]) -> None:
    assert_backend_trains_as_eager(Averaged, planned)


class Renewed(nn.Module):
    """Gives its buffers other tensors in several ways, and reads old and new values after that."""

    def __init__(self, renew: Callable[["Renewed", torch.Tensor], torch.Tensor], layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(layers)))
        self.register_buffer("center", torch.zeros(16))
        self.register_buffer("last", torch.ones(16))
        self.renew = renew

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.layers(x)
        with torch.no_grad():
            new = 0.9 * self.center + 0.1 * found.mean(0)
        return (found - self.renew(self, new) - self.last + self.center).square().mean()


def write_data(model: Renewed, new: torch.Tensor) -> torch.Tensor:
    old = model.center.data
    model.center.data = new
    return old


def write_storage(model: Renewed, new: torch.Tensor) -> torch.Tensor:
    old = model.center.detach()[2:]
    model.center.set_(new)
    new.mul_(2.0)
    return old.sum()


def write_twice(model: Renewed, new: torch.Tensor) -> torch.Tensor:
    model.center.data = new
    model.last.set_(model.center)
    model.center.data = model.center + 1.0
    return model.last


def replace(model: Renewed, new: torch.Tensor) -> torch.Tensor:
    old = model.center
    model.center = new
    new.mul_(2.0)
    return old


def shift(model: Renewed, new: torch.Tensor) -> torch.Tensor:
    model.last, model.center = model.center, model.last
    model.center = model.center * new
    return new


def write_after_training(model: Renewed, new: torch.Tensor) -> torch.Tensor:
    scaled = model.layers[-1][-1].bias * model.center  # its backward pass reads the new data
    model.center.data = new
    return scaled


def replace_after_training(model: Renewed, new: torch.Tensor) -> torch.Tensor:
    scaled = model.layers[-1][-1].bias * model.center.view(4, 4).flatten()  # its backward pass reads the old tensor
    model.center = new
    return scaled


BUFFER_WRITES = [write_data, write_storage, write_twice, write_after_training, replace, shift, replace_after_training]


@pytest.mark.parametrize("ways", all_and_each(BUFFER_WRITES))
def test_buffers_that_get_other_tensors_are_written_as_in_eager_mode(ways: list[Any]) -> None:
    layers = 3 if len(ways) == 1 else 1
    check_trains_as_eager(lambda: Together(*(Renewed(way, layers) for way in ways)), None, lambda number: vectors(number)[:1])


@pytest.mark.parametrize("ways", all_and_each(BUFFER_WRITES[:4]))
def test_the_backend_writes_buffers_that_get_other_tensors(ways: list[Any]) -> None:
    assert_backend_trains_as_eager(
        lambda: Together(*(Renewed(way, layers=1) for way in ways)), partial(planner.checkpoint, wait=0.1)
    )


def test_a_trained_parameter_whose_old_data_is_read_after_it_is_replaced_is_refused() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        old = m.layer.weight.data
        m.layer.weight.data = 0.9 * old
        return (m.layer(x) - x @ old).square().mean()

    with pytest.raises(TraceError, match=r"m\.layer\.weight\.data = .* replaces the data of a trained parameter.*clone"):
        planner.compile(FunctionModule(forward, layer=nn.Linear(16, 16)), None, vectors(0)[:1], budget="100%")


class Spread(nn.Module):
    """A weight of few trained numbers at fixed places of a dense one, as adapters in another basis have it."""

    def __init__(self, *, select: bool) -> None:
        super().__init__()
        self.select = select
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)))
        self.spectrum = nn.ParameterDict({"default": nn.Parameter(torch.randn(20))})
        places = torch.randperm(16 * 16, generator=torch.Generator().manual_seed(0))[:20]
        self.indices = {"default": torch.stack([places // 16, places % 16])}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        indices = self.indices["default"].to(x.device)
        dense, numbers = torch.zeros(16, 16), self.spectrum["default"].float()
        if self.select:
            inside = (indices[0, :] < 12) & (indices[1, :] < 14)
            indices, numbers = indices[:, inside], numbers[inside]
        dense[indices[0, :], indices[1, :]] = numbers
        return self.layers(x) + F.linear(x, torch.fft.ifft2(dense).real)


@pytest.mark.parametrize("select", [False, True])
def test_trained_numbers_at_places_that_an_attribute_lists(select: bool) -> None:
    check_trains_as_eager(lambda: Spread(select=select), F.mse_loss, vectors)


class Constrained(nn.Module):
    """Layers, one of whose weights is written to before it is read."""

    def __init__(self, constrain: Callable[[nn.Parameter], None]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2)))
        self.constrain = constrain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[0](x)
        self.constrain(self.layers[1][0].weight)
        return self.layers[1](hidden)


def by_data(weight: nn.Parameter) -> None:
    weight.data = weight.data * 0.9


def by_copied_data(weight: nn.Parameter) -> None:
    weight.data.copy_(F.normalize(weight.data, dim=0) * 0.9)


def without_gradients(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(0.9).clamp_(-0.2, 0.2)


def one_row(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight[1] *= 0.9


@pytest.mark.parametrize("ways", all_and_each([by_data, by_copied_data, without_gradients, one_row]))
def test_writes_to_trained_parameters_train_as_in_eager_mode(ways: list[Any]) -> None:
    check_trains_as_eager(lambda: nn.Sequential(*map(Constrained, ways)), F.mse_loss, vectors)


def test_planning_restores_the_parameters_that_a_step_writes_to() -> None:
    torch.manual_seed(2)
    model = Constrained(by_data)
    before = copy.deepcopy(model.state_dict())
    step = planner.compile(model, F.mse_loss, vectors(0), budget="100%", wait=0.1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    step(*vectors(0)).backward()
    assert torch.equal(model.layers[1][0].weight, before["layers.1.0.weight"] * 0.9)


class ConstrainedAfterwards(Constrained):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(x)
        self.constrain(self.layers[1][0].weight)
        return hidden


def test_data_that_is_written_after_it_was_read_trains_as_in_eager_mode() -> None:
    check_trains_as_eager(lambda: ConstrainedAfterwards(by_copied_data), F.mse_loss, vectors)


def test_data_that_is_replaced_after_it_was_read_raises() -> None:
    with pytest.raises(TraceError, match=r"weight\.data = weight\.data \* 0\.9\) replaces the data of a trained parameter"):
        planner.compile(ConstrainedAfterwards(by_data), F.mse_loss, vectors(0), budget="100%", wait=0.1)


def test_writes_to_data_with_inductors_kernels_raise() -> None:
    with pytest.raises(TraceError, match=r"writes to 'layers\.1\.0\.weight', which is not planned with Inductor's kernels"):
        planner.compile(Constrained(by_data), F.mse_loss, vectors(0), budget="100%", wait=0.1, kernels="inductor")


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++")
def test_writes_without_gradients_with_inductors_kernels_train_as_under_torch_compile() -> None:
    model = Constrained(without_gradients)
    step = planner.compile(model, F.mse_loss, vectors(0), budget="100%", wait=0.1, kernels="inductor")
    assert step.plan.eager.identical
