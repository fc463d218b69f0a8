"""Frozen weights that are made of other tensors, or have them as attributes: they are constants of the step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import planner
from planner.graphs.errors import TraceError
from planner.graphs.ir import Kind
from planner.measure.steps import StepOutcome
from planner.torch_private.core import list_parts, pytree
from tests.support.marks import slow
from tests.support.models.as_eager import check_trains_as_eager


class Quantized(torch.Tensor):
    """A weight in 8 bits with a scale for each row."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> "Quantized":
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.values_of, self.scale = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values_of", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], _meta: None, _size: Any, _stride: Any) -> "Quantized":
        return cls(parts["values_of"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(func(args[0].values_of), func(args[0].scale))
        dense = pytree.tree_map_only(cls, lambda weight: weight.values_of * weight.scale, (args, kwargs or {}))
        return func(*dense[0], **dense[1])

    @staticmethod
    def of(weight: torch.Tensor) -> "Quantized":
        scale = weight.abs().amax(1, keepdim=True) / 127
        return Quantized((weight / scale).round().to(torch.int8), scale)


class Dequantized(torch.autograd.Function):
    """The product with a weight whose scale is an argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.weight, ctx.scale = weight, scale
        return x @ (weight.detach() * (2 * scale)).t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient @ (ctx.weight.detach() * (2 * ctx.scale)), None, None


class Scaled(nn.Parameter):
    """A parameter that holds its scale as an attribute."""

    scale: torch.Tensor


class Adapted(nn.Module):
    """A frozen quantized layer with a trained adapter of low rank."""

    def __init__(self, sizes: tuple[int, int], quantize: Callable[[torch.Tensor], nn.Parameter]) -> None:
        super().__init__()
        inner, outer = sizes
        self.weight = quantize(torch.randn(outer, inner) / inner**0.5)
        self.down, self.up = nn.Linear(inner, 2), nn.Linear(2, outer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = self.weight
        frozen = Dequantized.apply(x, held, held.scale) if isinstance(held, Scaled) else F.linear(x, held)
        return frozen + self.up(self.down(x))


def of_parts(weight: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(Quantized.of(weight), requires_grad=False)


def with_attribute(weight: torch.Tensor) -> nn.Parameter:
    parameter = Scaled(weight, requires_grad=False)
    parameter.scale = weight.abs().amax(1, keepdim=True)
    return parameter


def perceptron(quantize: Callable[[torch.Tensor], nn.Parameter]) -> nn.Module:
    layers = [(Adapted((32, 64), quantize), nn.GELU(), Adapted((64, 32), quantize)) for _ in range(3)]
    return nn.Sequential(*(each for block in layers for each in block))


def batch_of(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(96, 32, generator=generator), torch.randn(96, 32, generator=generator)


@pytest.mark.parametrize("quantize", [of_parts, with_attribute])
def test_adapters_of_frozen_quantized_weights_train_as_in_eager_mode(quantize: Callable[[torch.Tensor], nn.Parameter]) -> None:
    check_trains_as_eager(lambda: perceptron(quantize), F.mse_loss, batch_of)


def test_a_step_with_quantized_weights_runs_inside_a_mode() -> None:
    torch.manual_seed(0)
    step = planner.compile(perceptron(of_parts), F.mse_loss, batch_of(0), budget="100%", wait=0.1, on_progress=False)
    with FlopCounterMode(display=False) as counter:
        step(*batch_of(1)).backward()
    assert counter.get_total_flops() > 0


def test_attributes_of_weights_are_not_overwritten() -> None:
    model = perceptron(with_attribute)
    before = [layer.weight.scale.clone() for layer in model if isinstance(layer, Adapted)]
    step = planner.compile(model, F.mse_loss, batch_of(0), budget="100%", passes=1, wait=0)
    step(*batch_of(0)).backward()
    scales = [layer.weight.scale for layer in model if isinstance(layer, Adapted)]
    assert all(map(torch.equal, scales, before))


def test_quantized_weights_count_with_their_own_bytes() -> None:
    graph = planner.trace(perceptron(of_parts), F.mse_loss, batch_of(0), passes=1)
    quantized = {t.name: t.size_bytes for t in graph.tensors if t.kind is Kind.PARAMETER and ".weight." in t.name}
    assert quantized["model.0.weight.values_of"] == 64 * 32
    assert quantized["model.0.weight.scale"] == 64 * 4


def test_a_replaced_quantized_weight_is_read_anew() -> None:
    model = perceptron(of_parts)
    step = planner.compile(model, F.mse_loss, batch_of(0), budget="100%", passes=1, wait=0)
    model[0].weight = of_parts(torch.ones(64, 32))
    assert torch.equal(step(*batch_of(0)), F.mse_loss(model(batch_of(0)[0]), batch_of(0)[1]))


def test_a_trained_quantized_weight_is_refused() -> None:
    model = perceptron(lambda weight: nn.Parameter(Quantized.of(weight)))
    with pytest.raises(TraceError, match="quantized"):
        planner.trace(model, F.mse_loss, batch_of(0))


class WithoutEqual(Quantized):
    """Does not implement torch.equal, as most subclasses do not."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten.equal.default
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_quantized_weights_are_compared_by_their_parts() -> None:
    values, scale = torch.randint(-9, 9, (4, 4), dtype=torch.int8), torch.rand(4, 1)
    before = StepOutcome({"weight": WithoutEqual(values, scale)})
    assert before.list_differences(StepOutcome({"weight": WithoutEqual(values.clone(), scale.clone())})) == ()
    for other in (WithoutEqual(values, scale + 1), WithoutEqual(values + 1, scale), values * scale):
        assert before.list_differences(StepOutcome({"weight": other})) == ("weight",)


class Assigning(nn.Module):
    """A frozen layer that assigns its weight the memory that it has already, as those of bitsandbytes with 8 bits do."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(16, 16)
        self.weight = nn.Parameter(torch.randint(-9, 9, (16, 16), dtype=torch.int8), requires_grad=False)
        self.held = self.weight.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.held
        return F.relu(self.before(x)) @ self.weight.float() * 0.1


@pytest.mark.parametrize("front_end", ["compile", "backend", *slow("checkpoint")])
def test_a_weight_may_be_assigned_its_own_memory(front_end: str) -> None:
    model, x = Assigning(), torch.randn(8, 16)
    model(x).sum().backward()
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    if front_end == "compile":
        step = planner.compile(model, lambda y, _: y.sum(), (x, x), budget="100%", passes=1, wait=0)
        step(x, x).backward()
    elif front_end == "checkpoint":
        planner.checkpoint(model, budget="100%")(x).sum().backward()
    else:
        torch.compile(model, backend="planner", options={"budget": "100%"})(x).sum().backward()
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert parameter.grad is gradient is None or torch.equal(parameter.grad, gradient)


def test_only_tensors_are_parts() -> None:
    class Meshed(Quantized):
        mesh = "what a DTensor lists among its parts"

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["values_of", "mesh", "scale"], None

    values, scale = torch.ones(2, 2, dtype=torch.int8), torch.ones(2, 1)
    assert [id(part) for part in list_parts(Meshed(values, scale))] == [id(values), id(scale)]
