"""Loops with graph breaks: what is left of an iterator is passed on to the next piece if the loop cannot change it."""

import copy
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from planner.train.backend.planned_graph import PlannedGraph

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), pytest.mark.filterwarnings("ignore::UserWarning")]

SIZE = 8


class Layers(nn.Module):
    """A loop of three iterations that the data may end."""

    def __init__(self, loop: Callable[["Layers", Tensor], Iterator[Tensor]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))
        self.named = nn.ModuleDict({str(i): nn.Linear(SIZE, SIZE) for i in range(3)})
        self.loop, self.scale, self.queue = loop, 1.0, [0]

    def forward(self, x: Tensor) -> Tensor:
        return self.loop(self, x)


def count_layers(model: Layers, x: Tensor) -> Tensor:
    for i, layer in enumerate(model.layers, start=1):
        x = torch.tanh(layer(x)) * i
        if x.abs().max() > 100:
            break
    return x


def pair_layers(model: Layers, x: Tensor) -> Tensor:
    for i, (layer, other) in zip(range(5), zip(model.layers, model.named.values(), strict=True), strict=False):
        x = torch.tanh(layer(x)) + other(x) * i
        if x.abs().max() > 100:
            break
    return x


def follow_items(model: Layers, x: Tensor) -> Tensor:
    for name, layer in model.named.items():
        x = torch.tanh(layer(x)) * (int(name) + 1)
        if x.abs().max() > 100:
            break
    return x


def follow_chain(model: Layers, x: Tensor) -> Tensor:
    for layer in itertools.chain(model.layers.children(), (layer for layer in model.layers[:1])):
        x = torch.tanh(layer(x))
        if x.abs().max() > 100:
            break
    return x


def follow_reversed(model: Layers, x: Tensor) -> Tensor:
    for i in reversed(range(3)):
        x = torch.tanh(model.layers[i](x))
        if x.abs().max() > 100:
            break
    return x


def ask_once(model: Layers, x: Tensor) -> Tensor:
    for i, layer in enumerate(model.layers):
        x = torch.tanh(layer(x))
        if i == 0 and x.abs().max() > 100:
            break
    return x


def follow_queue(model: Layers, x: Tensor) -> Tensor:
    queue = [0]
    for i in queue:
        x = torch.tanh(model.layers[i](x))
        if i < 2:
            queue.append(i + 1)
        if x.abs().max() > 100:
            break
    return x


def follow_attribute(model: Layers, x: Tensor) -> Tensor:
    model.queue = [0]
    for i in model.queue:
        x = torch.tanh(model.layers[i](x))
        if x.abs().max() > 100:
            break
        if i < 2:
            model.queue.append(i + 1)
    return x


def read_attribute(model: Layers, x: Tensor) -> Tensor:
    model.scale = 1.0
    for factor in (i * model.scale for i in range(1, 4)):
        x = torch.tanh(model.layers[0](x)) * factor
        model.scale += 1
        if x.abs().max() > 100:
            break
    return x


def draw_numbers(model: Layers, x: Tensor) -> Tensor:
    for noise in (torch.rand(SIZE) for _ in range(3)):
        x = torch.tanh(model.layers[0](x + noise))
        if x.abs().max() > 0:
            break
    return x + torch.rand(SIZE)


def follow_map(model: Layers, x: Tensor) -> Tensor:
    for layer in map(nn.Module.train, model.layers):
        x = torch.tanh(layer(x))
        if x.abs().max() > 100:
            break
    return x


def follow_filter(model: Layers, x: Tensor) -> Tensor:
    for layer in filter(lambda layer: layer is not model.layers[1], model.layers):
        x = torch.tanh(layer(x))
        if x.abs().max() > 100:
            break
    return x


def repeat_layers(model: Layers) -> Iterator[nn.Module]:
    return itertools.islice(itertools.cycle(list(model.layers)), 5)


def follow_cycle(model: Layers, x: Tensor) -> Tensor:
    for layer in repeat_layers(model):  # which returns an iterator to code that is left out
        x = torch.tanh(layer(x))
        if x.abs().max() > 100:
            break
    return x


def train(called: Callable[..., Tensor], model: Layers, calls: int = 2) -> list[Tensor | None]:
    torch.manual_seed(1)
    outputs = [called(torch.full((SIZE, SIZE), 0.1 * step)) for step in range(calls)]
    torch.stack(outputs).square().sum().backward()
    return [*outputs, *model.buffers(), *(parameter.grad for parameter in model.parameters())]


def assert_exact(
    loop: Callable[[Layers, Tensor], Tensor], change: Callable[[nn.Module], object] = nn.Module.train, calls: int = 2
) -> None:
    torch.manual_seed(0)
    model = Layers(loop)
    change(model.layers)
    twin = copy.deepcopy(model)
    found = train(torch.compile(model, backend="planner", options={"budget": "100%", "wait": 0.1}), model, calls)
    for a, b in zip(found, train(twin, twin, calls), strict=True):
        assert a is b is None or torch.equal(a, b)


@pytest.mark.parametrize("loop", [count_layers, pair_layers, follow_items, follow_chain, follow_reversed])
def test_iterators_that_a_loop_cannot_change_are_passed_on(
    loop: Callable[[Layers, Tensor], Tensor], graphs: list[PlannedGraph]
) -> None:
    assert_exact(loop)
    assert len(graphs) >= 3


@pytest.mark.parametrize("loop", [follow_queue, follow_attribute, read_attribute, draw_numbers, follow_cycle])
def test_a_loop_that_may_change_what_it_iterates_over_runs_as_in_eager_pytorch(loop: Callable[[Layers, Tensor], Tensor]) -> None:
    assert_exact(loop)


@pytest.mark.parametrize("loop", [follow_map, follow_filter])
def test_a_loop_over_calls_runs_without_a_plan_and_says_so(
    loop: Callable[[Layers, Tensor], Tensor], graphs: list[PlannedGraph]
) -> None:
    with pytest.warns(UserWarning, match="no graph was found in Layers"):
        assert_exact(loop)
    assert not graphs


def test_what_items_of_an_iterator_hold_is_written_before_it_advances() -> None:
    assert_exact(ask_once, lambda layers: [*map(spectral_norm, layers)], calls=1)  # a weight of two calls has another sum


class Choosing(Layers):
    """Its own code is left out: Dynamo captures the function that chooses layers by itself."""

    @torch.compiler.disable(recursive=False)
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.loop(self, layer):  # type: ignore[arg-type]
                x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize(
    "choose",
    [
        lambda model, layer: layer is not model.layers[1],
        lambda model, layer: layer == model.layers[2],
        lambda model, layer: layer in (model.layers[0], model.layers[1]),
    ],
    ids=["is", "equals", "in"],
)
def test_modules_that_captured_code_compares_are_told_apart(choose: Callable[[Layers, nn.Module], bool]) -> None:
    torch.manual_seed(0)
    model, x = Choosing(choose), torch.randn(SIZE, SIZE)  # type: ignore[arg-type]
    expected = model(x)
    planned = torch.compile(model, backend="planner", options={"budget": "100%", "wait": 0.1})
    assert all(torch.equal(planned(x), expected) for _ in range(2))
