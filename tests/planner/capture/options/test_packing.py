"""Gradients of activations from bits and from results, whatever they hold; and where they are found."""

from collections import Counter
from itertools import product

import pytest
import torch
from torch import nn

from benchmarks.models.parts import FunctionModule
from graphs.ir import Graph
from graphs.options import remove_options
from planner.capture.options import apply_options
from planner.capture.options.pack import bits, finder
from planner.capture.options.pack.comparisons import COMPARISONS, Compared
from planner.capture.options.traced import add_traced
from planner.capture.trace import capture
from planner.capture.workload.models import Workload
from planner.measure.roofline import model_times
from planner.settings.devices import get_device
from planner.torch_private.core import FakeTensorMode
from tests.support.models.packed import mixed

aten = torch.ops.aten
NAN, INF = float("nan"), float("inf")
_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_identical(made: torch.Tensor | tuple[torch.Tensor, ...], wanted: torch.Tensor) -> None:
    """Bits, strides and storage."""
    (found,) = made if isinstance(made, tuple) else (made,)
    assert (found.dtype, found.shape, found.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
    assert found.untyped_storage().nbytes() == wanted.untyped_storage().nbytes()
    if found.is_floating_point():
        found, wanted = (value.view(_WHOLE[value.element_size()]) for value in (found, wanted))
    assert torch.equal(found, wanted)


_NUMBERS = (NAN, -0.0, 0.0, INF, -INF, 6.0, 7.0, -1.0, 3.0, -3.0, 0.5, -0.5, 1e-30, -1e-30, 2.984375, -2.984375)
_RELU = aten.threshold_backward.default
_KERNELS = [
    (_RELU, (0,)),
    (_RELU, (0.5,)),
    (aten.leaky_relu_backward.default, (0.01, False)),
    (aten.leaky_relu_backward.default, (-0.2, False)),
    (aten.leaky_relu_backward.default, (0.0, False)),
    (aten.hardsigmoid_backward.default, ()),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_from_bits_are_those_of_the_kernels(dtype: torch.dtype) -> None:
    """Of numbers at the borders, infinite ones and none, where kernels compute in vectors and where not."""
    assert {kernel for kernel, _ in _KERNELS} == set(COMPARISONS)
    torch.manual_seed(0)
    numbers = torch.tensor(_NUMBERS, dtype=dtype)
    x = torch.cat([numbers.repeat_interleave(len(numbers)), 4 * torch.randn(701).to(dtype)])
    gradient = torch.cat([numbers.repeat(len(numbers)), torch.randn(701).to(dtype)])
    kernels = [(kernel, also) for kernel, also in _KERNELS if dtype is torch.float32 or kernel is _RELU]
    for (kernel, arguments), count in product(kernels, (0, 1, 17, len(x))):
        given = gradient[:count].clone(), x[:count].clone()
        wanted = kernel(*given, *arguments)
        compared = Compared(COMPARISONS[kernel], arguments, wanted, 64)
        (packed,) = compared.pack_bits(given[1])
        assert packed.numel() == bits.count_bytes(count)
        assert_identical(compared.unpack_bits(given[0], packed), wanted)


@pytest.mark.parametrize(
    ("backward", "forward", "arguments", "also"),
    [
        (aten.hardtanh_backward, aten.hardtanh, (0.0, 6.0), ()),
        (aten.hardtanh_backward, aten.hardtanh, (-1.0, 1.0), ()),
        (aten.leaky_relu_backward, aten.leaky_relu, (0.01,), (False,)),
    ],
)
def test_gradients_from_the_result_equal_gradients_from_the_input(
    backward: object, forward: object, arguments: tuple, also: tuple
) -> None:
    torch.manual_seed(0)
    numbers = torch.tensor(_NUMBERS)
    x = torch.cat([numbers.repeat_interleave(len(numbers)), 4 * torch.randn(701)])
    gradient = torch.cat([numbers.repeat(len(numbers)), torch.randn(701)])
    for count in (1, 17, len(x)):  # by itself and in vectors, where these kernels differ for what is no number
        g, read = gradient[:count].clone(), x[:count].clone()
        assert_identical(backward(g, forward(read, *arguments), *arguments, *also), backward(g, read, *arguments, *also))


def packed(workload: Workload) -> Graph:
    return add_traced(capture(*workload), ["pack"]).graph


def offers(graph: Graph) -> Counter[str]:
    return Counter(op.target.removeprefix("pack.") for op in graph.ops if op.optional)


def test_each_kind_of_packing_is_found() -> None:
    graph = packed(mixed())
    assert offers(graph) == {"to_bits": 3, "from_bits": 3, "from_result": 1}  # ReLU, leaky ReLU, hardsigmoid; ReLU6
    assert all(op.exact for op in graph.ops)
    names = {t.name: t for t in graph.tensors}
    assert names["threshold_backward@bits"].size_bytes == -(-names["relu"].size_bytes // 32)
    assert apply_options(graph, ()).ops == capture(*mixed()).graph.ops
    assert apply_options(graph, ()).fingerprint == remove_options(graph).fingerprint != graph.fingerprint


class Chained(nn.Module):
    """Convolutions that read what activations make."""

    def __init__(self) -> None:
        super().__init__()
        layers = [
            [nn.Conv2d(3, 3, 3), activation] for activation in (nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(), nn.Hardtanh(-0.1, 0.1))
        ]
        self.layers = nn.Sequential(*(layer for pair in layers for layer in pair), nn.Conv2d(3, 3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layers(x)
        return made.square().mean()


def test_tensors_needed_elsewhere_are_not_packed() -> None:
    """The gradient of the next weight needs the result of the activation: signs would only come on top of it.

    No number of float32 is 0.1, so that the clamp might round to it in another way than its gradient.
    """
    graph = packed(Workload(Chained(), None, (torch.randn(2, 3, 16, 16),)))
    assert offers(graph) == {"from_result": 2}
    stood_for = {graph.ops[p].target for op in graph.ops for p in op.replaces}
    assert stood_for == {"aten.hardtanh_backward.default", "aten.leaky_relu_backward.default"}
    assert all(graph.tensors[op.inputs[1]].name in ("hardtanh", "leaky_relu") for op in graph.ops if op.optional)


def summed() -> nn.Module:
    """ReLUs of two inputs, whose results the backward pass does not need."""
    return FunctionModule(
        lambda m, x, y: torch.relu(x + m.weight).cumsum(0).sum() + torch.relu(y + m.weight).cumsum(0).sum(),
        weight=nn.Parameter(torch.ones(())),
    )


def test_of_large_steps_small_tensors_are_left_alone() -> None:
    large = finder.LEAST_BYTES // 4
    assert offers(packed(Workload(summed(), None, (torch.ones(large), torch.ones(large - 1))))) == {"to_bits": 1, "from_bits": 1}
    assert offers(packed(Workload(summed(), None, (torch.ones(64), torch.ones(63))))) == {"to_bits": 2, "from_bits": 2}


def test_a_roofline_gives_times_and_workspaces() -> None:
    with FakeTensorMode():
        found = add_traced(capture(summed(), None, (torch.empty(2**24), torch.empty(2**23))), ["pack"])
    assert offers(found.graph) == {"to_bits": 2, "from_bits": 2}
    graph = model_times(found, get_device("h200"))
    for op in graph.ops[len(graph.program) :]:
        assert op.time_s > 0
        assert op.workspace_bytes <= 3 * 2**24 // 8 * 4 + 512, op  # of an eighth, three at once


def test_batch_norm_has_no_exact_gradient_from_its_output() -> None:
    """So none is offered: shares of the gradient's elements with other bits, by the kernel and by the formula."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(8, 16, 14, 14), torch.rand(16) + 0.5, torch.randn(16)
    gradient, mean, variance = torch.randn_like(x), torch.zeros(16), torch.ones(16)
    y, mean_here, scale = aten.native_batch_norm(x, weight, bias, mean, variance, True, 0.1, 1e-5)

    def differing(found: torch.Tensor) -> float:
        return float((found != of(x)).float().mean())

    def of(given: torch.Tensor) -> torch.Tensor:
        rest = (weight, mean, variance, mean_here, scale, True, 1e-5, [True, False, False])
        made: torch.Tensor = aten.native_batch_norm_backward(gradient, given, *rest)[0]
        return made

    def over_channels(value: torch.Tensor) -> torch.Tensor:
        return value.view(1, -1, 1, 1)

    normal = (y - over_channels(bias)) / over_channels(weight)
    means = [over_channels(value.mean((0, 2, 3))) for value in (gradient, gradient * normal)]
    assert 0.05 < differing(of(normal / over_channels(scale) + over_channels(mean_here))) < 0.2
    assert 0.3 < differing(over_channels(weight * scale) * (gradient - means[0] - normal * means[1])) < 0.6
