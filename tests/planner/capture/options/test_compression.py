"""What keeps tensors in few bits, how much it changes them, and gradients from bits and results, whatever they hold."""

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from torch import nn

from benchmarks.all_compressed import compress_all
from benchmarks.models.parts import FunctionModule
from planner.capture.options import apply_options, check_options, check_traced
from planner.capture.options.compress.codec import DenseLayout, Keep, Restore
from planner.capture.options.compress.find import list_kept_tensors
from planner.capture.options.compress.forms import FORMS, GROUP
from planner.capture.options.pack import bits, finder
from planner.capture.options.pack.comparisons import COMPARISONS, Compared
from planner.capture.options.traced import add_traced
from planner.capture.trace import capture
from planner.capture.workload.models import Workload, build
from planner.graphs.errors import GraphError, ScheduleError, TraceError, UsageError
from planner.graphs.io.graph_document import build_from_dict, convert_to_dict
from planner.graphs.ir import Graph, Phase
from planner.graphs.options import remove_options
from planner.graphs.options.compress import KEEP, RESTORE, VARIANCE, predict_variance
from planner.graphs.simulate import simulate
from planner.measure.roofline import model_times
from planner.settings.devices import get_device
from planner.torch_private.core import FakeTensorMode
from tests.support.models.packed import mixed


def restored(value: torch.Tensor, form: str, number: int = 0) -> torch.Tensor:
    layout = DenseLayout(value, FORMS[form])
    (kept,) = Keep(layout, number)(value)
    assert kept.untyped_storage().nbytes() == layout.kept_bytes
    (made,) = Restore(layout)(kept)
    assert (made.shape, made.stride(), made.dtype) == (value.shape, value.stride(), value.dtype)
    assert made.untyped_storage().nbytes() == value.untyped_storage().nbytes()
    return made


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_rounding_is_unbiased_with_the_variance_of_its_steps(bits: int) -> None:
    value = normal(20, GROUP)
    draws = 400
    errors = torch.stack([restored(value, str(bits), number) - value for number in range(draws)]).double()
    length = (value.amax(1, keepdim=True) - value.amin(1, keepdim=True)).double() / (2**bits - 1)
    part = (value - value.amin(1, keepdim=True)).double() / length
    part -= part.floor()
    expected = length**2 * part * (1 - part)
    # The mean over the draws is within 5 standard errors everywhere, but for arithmetic in float32.
    assert (errors.mean(0).abs() <= 5 * (expected / draws).sqrt() + 1e-5).all()
    assert errors.pow(2).mean().item() == pytest.approx(expected.mean().item(), rel=0.02)
    assert (errors.abs() <= length * (1 + 1e-4) + 1e-6).all()


def test_compression_keeps_group_extremes_and_constant_groups() -> None:
    value = torch.cat([normal(3 * GROUP), torch.full((GROUP,), 0.1), torch.full((5,), -7.3)])
    for form in ("1", "2", "4", "8"):
        made = restored(value, form)
        for group, of_made in zip(value.split(GROUP), made.split(GROUP), strict=True):
            assert of_made[group.argmin()] == group.min() and of_made[group.argmax()] == group.max()
        assert torch.equal(made[3 * GROUP :], value[3 * GROUP :])


@pytest.mark.parametrize("form", FORMS)
def test_nonfinite_values_affect_their_own_group_only(form: str) -> None:
    for bad in (float("nan"), float("inf"), float("-inf")):
        value = normal(3 * GROUP)
        value[GROUP + 7] = bad
        made = restored(value, form)
        groups = made.view(3, GROUP)
        assert groups[1].isnan().all() if form != "float8" else groups[1].isnan().any()
        assert groups[0].isfinite().all() and groups[2].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("elements", [1, 255, 257, 70000])
def test_sizes_and_types_of_all_kinds(elements: int, dtype: torch.dtype) -> None:
    value = normal(elements, dtype=dtype)
    for form in FORMS:
        made = restored(value, form)
        largest = value.abs().max().item()
        assert (made - value).abs().max().item() <= largest * (2.1 if form == "1" else 1.0)


def test_float8_is_within_half_a_step() -> None:
    value = normal(64, GROUP)
    error = (restored(value, "float8") - value).abs()
    smallest = value.abs().amax(1, keepdim=True) / 448 * 2**-9
    assert (error <= value.abs() / 16 + smallest).all()


def test_memory_to_the_byte_and_other_orders_of_elements() -> None:
    value = normal(4, 16, 16, 8).permute(0, 3, 1, 2)  # channels last
    four = DenseLayout(value, FORMS["4"])
    assert four.kept_bytes == 32 * (128 + 8) and value.numel() * 4 / four.kept_bytes == pytest.approx(7.53, abs=0.01)
    assert (restored(value, "8") - value).abs().max() < 0.05
    with pytest.raises(TraceError, match="strides"):
        Keep(four, 0)(value.contiguous())


def test_the_same_numbers_are_rounded_in_the_same_way_and_no_generator_is_asked() -> None:
    value, before = normal(1000), torch.get_rng_state()
    assert torch.equal(restored(value, "2"), restored(value, "2"))
    assert not torch.equal(restored(value, "2"), restored(value, "2", number=1))
    other = value.clone()
    other[3] += 1e-6
    assert (restored(value, "2") != restored(other, "2")).sum() > 100
    assert torch.equal(torch.get_rng_state(), before)


@cache
def small() -> Graph:
    workload = build("mlp", layers=3, width=64, batch=64)
    return model_times(add_traced(capture(*workload), ["compress"]), get_device("cpu"))


def test_compression_bits_are_parsed_from_option_names() -> None:
    check_traced(["compress"])
    check_traced(["compress:4"])
    for names, said in (
        (["compress:9"], "'9' bits: must be a whole number from 1 to 8, as in 'compress:4'"),
        (["compress:"], "must be a whole number from 1 to 8"),
        (["compress:4.5"], "'4.5' bits"),
        (["chunks:4"], "has no number, but 'chunks:4' was given"),
        (["compress:4", "compress:8"], "named twice"),
        (["press:4"], "no option 'press'"),
    ):
        with pytest.raises(UsageError, match=said):
            check_options(names)
    with pytest.raises(UsageError, match=r"needs a number of bits from 1 to 8, which limits.*'compress:4'"):
        apply_options(small(), ["compress"])


def test_graphs_hold_every_form_and_the_limit_comes_with_the_bits() -> None:
    graph = small()
    assert graph.provenance["sensitivity"] == "modelled"
    assert build_from_dict(convert_to_dict(graph)) == graph
    found = apply_options(graph, ["compress:4"])
    assert build_from_dict(convert_to_dict(found)) == found
    four = sum(op.used(VARIANCE) for op in graph.ops if op.target == f"{RESTORE}.4")
    assert dict(found.limits)[VARIANCE] == pytest.approx(four) and predict_variance(graph, 8) == pytest.approx(four / 17**2)
    assert len(apply_options(graph, ()).ops) == len(graph.program)
    restored_tensors = {t for op in graph.ops if op.target.startswith(RESTORE) for t in op.outputs}
    for op in graph.ops:
        # The forward pass never reads what is lossy, and nothing that is lossy is kept.
        assert restored_tensors.isdisjoint(op.inputs) or (op.phase is Phase.BACKWARD and op.replaces)
        if op.target.startswith(KEEP):
            assert graph.tensors[op.inputs[0]].producers[0] < len(graph.program)


def test_the_judge_counts_each_lossy_op_once() -> None:
    graph = apply_options(small(), ["compress:4"])
    schedule = compress_all(graph, "4")
    assert graph.used(VARIANCE, (*schedule.computed, *schedule.computed)) == pytest.approx(dict(graph.limits)[VARIANCE])
    kept = simulate(graph, schedule)
    assert kept.peak_bytes > 0
    with pytest.raises(ScheduleError, match=r"uses? .* of 'gradient variance' \(limit "):
        simulate(graph, compress_all(graph, "2"))
    assert simulate(replace(graph, limits=()), compress_all(graph, "2")).time_s > 0


@pytest.mark.parametrize("variance", [-1.0, float("nan"), float("inf")])
def test_variances_that_cannot_be_are_refused(variance: float) -> None:
    graph = small()
    last = graph.ops[-1]
    with pytest.raises(GraphError, match="variance"):
        replace(graph, ops=(*graph.ops[:-1], replace(last, uses=((VARIANCE, variance),))))
    with pytest.raises(GraphError, match="uses 'gradient variance', but is not optional"):
        replace(graph, ops=(graph.ops[0].using(VARIANCE, 1.0), *graph.ops[1:]))
    with pytest.raises(GraphError, match=r"the graph allows -1\.0 of 'gradient variance'"):
        replace(graph, limits=((VARIANCE, -1.0),))
    assert remove_options(graph).ops == graph.program


def test_small_models_have_no_compressed_tensors() -> None:
    found = add_traced(capture(*build("mlp", layers=2, width=8, batch=4, classes=10)), ["compress"])
    assert list_kept_tensors(found) == [] and len(found.graph.ops) == len(found.graph.program)


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
