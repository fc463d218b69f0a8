"""Rooflines: FLOPs and bytes computed by hand, on tensors without memory."""

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from planner.capture.trace import capture
from planner.capture.workload.models import build
from planner.graphs.errors import UsageError
from planner.settings.devices import (
    DEVICES,
    count_op_bytes,
    count_op_flops,
    get_device,
    is_view,
    model_op_time_s,
    model_workspace_bytes,
)

aten = torch.ops.aten
H200 = DEVICES["h200"]


@pytest.fixture(autouse=True)
def _nothing_is_allocated() -> Iterator[None]:
    with FakeTensorMode():
        yield


def half(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def tokens(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64)


def flops(target: Any, *args: Any, **kwargs: Any) -> int:
    return count_op_flops(target, args, kwargs, target(*args, **kwargs))


def moved(target: Any, *args: Any, **kwargs: Any) -> int:
    return count_op_bytes(target, args, kwargs, target(*args, **kwargs))


def time_s(target: Any, *args: Any, device: str = "h200", **kwargs: Any) -> float:
    return model_op_time_s(target, args, kwargs, target(*args, **kwargs), DEVICES[device])


def workspace(target: Any, *args: Any, device: str = "h200", **kwargs: Any) -> int:
    return model_workspace_bytes(target, args, kwargs, target(*args, **kwargs), DEVICES[device])


def attention_backward(query: Tensor, key: Tensor, *, is_causal: bool) -> tuple[Any, ...]:
    batch, heads, seq, _ = query.shape
    statistics = torch.empty(batch, heads, seq)
    seed, offset = torch.empty(2, dtype=torch.uint64), torch.empty((), dtype=torch.uint64)
    lengths = (seq, key.shape[2])
    return (query, query, key, key, query, statistics, None, None, *lengths, 0.0, is_causal, seed, offset)


def convolution(x: Tensor, weight: Tensor, *, stride: int = 1, groups: int = 1, transposed: bool = False) -> tuple[Any, ...]:
    padding = 0 if transposed else weight.shape[2] // 2
    return (x, weight, None, [stride] * 2, [padding] * 2, [1, 1], transposed, [0, 0], groups)


def convolution_backward(
    x: Tensor, weight: Tensor, wanted: list[bool], *, stride: int = 1, groups: int = 1, transposed: bool = False
) -> tuple[Any, ...]:
    forward = convolution(x, weight, stride=stride, groups=groups, transposed=transposed)
    return (aten.convolution.default(*forward), *forward[:2], None, *forward[3:], wanted)


def test_flops_of_matrix_products_are_known() -> None:
    assert flops(aten.mm.default, half(3, 5), half(5, 7)) == 2 * 3 * 5 * 7
    assert flops(aten.addmm.default, half(7), half(3, 5), half(5, 7)) == 2 * 3 * 5 * 7
    assert flops(aten.bmm.default, half(2, 3, 5), half(2, 5, 7)) == 2 * 2 * 3 * 5 * 7
    assert flops(aten.baddbmm.default, half(2, 3, 7), half(2, 3, 5), half(2, 5, 7)) == 2 * 2 * 3 * 5 * 7


def test_flops_of_convolutions_are_known() -> None:
    x, weight = half(2, 6, 8, 8), half(10, 6, 3, 3)
    forward = 2 * 2 * (8 * 8) * 10 * 6 * 9
    assert flops(aten.convolution.default, *convolution(x, weight)) == forward
    assert flops(aten.convolution.default, *convolution(x, weight, stride=2)) == forward // 4
    assert flops(aten.convolution_backward.default, *convolution_backward(x, weight, [True, True, False])) == 2 * forward
    assert flops(aten.convolution_backward.default, *convolution_backward(x, weight, [False, True, False])) == forward
    assert (
        flops(aten.convolution_backward.default, *convolution_backward(x, weight, [True, True, False], stride=2)) == forward // 2
    )


def test_flops_of_grouped_and_transposed_convolutions() -> None:
    x, depthwise = half(2, 6, 8, 8), half(6, 1, 3, 3)
    forward = 2 * 2 * (8 * 8) * 6 * 9
    assert flops(aten.convolution.default, *convolution(x, depthwise, groups=6)) == forward
    backward = convolution_backward(x, depthwise, [True, True, False], groups=6)
    assert flops(aten.convolution_backward.default, *backward) == 2 * forward
    doubling = half(6, 5, 2, 2)
    forward = 2 * 2 * (8 * 8) * 6 * 5 * 4
    assert flops(aten.convolution.default, *convolution(x, doubling, stride=2, transposed=True)) == forward
    backward = convolution_backward(x, doubling, [True, True, False], stride=2, transposed=True)
    assert flops(aten.convolution_backward.default, *backward) == 2 * forward


def test_flops_of_attention_are_known() -> None:
    query, key = half(2, 8, 64, 16), half(2, 2, 64, 16)
    forward = 2 * (2 * 2 * 8 * 64 * 64 * 16)
    for target in (aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default):
        assert flops(target, query, query, query) == forward
        assert flops(target, query, query, query, 0.0, True) == forward // 2
    assert flops(aten._scaled_dot_product_flash_attention.default, query, key, key) == forward
    assert flops(aten._scaled_dot_product_efficient_attention.default, query, query, query, None, True) == forward
    backward = aten._scaled_dot_product_flash_attention_backward.default
    assert flops(backward, *attention_backward(query, query, is_causal=False)) == forward * 5 // 2
    assert flops(backward, *attention_backward(query, query, is_causal=True)) == forward * 5 // 4
    on_cpu = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    assert flops(on_cpu, query, query, query, query, query, torch.empty(2, 8, 64), 0.0, False) == forward * 5 // 2


def test_other_ops_are_bound_by_bandwidth() -> None:
    x = half(4, 6)
    assert flops(aten.native_layer_norm.default, x, [6], None, None, 1e-5) == 0
    assert flops(aten.gelu.default, x) == 0
    assert moved(aten.gelu.default, x) == 2 * 4 * 6 * 2


def test_bytes_of_an_input_read_twice_or_expanded_count_once() -> None:
    x = torch.empty(100, 1)
    assert moved(aten.mul.Tensor, x, x) == 2 * 400
    wide = x.expand(100, 50)
    assert moved(aten.clone.default, wide) == 400 + wide.numel() * 4
    assert moved(aten.cat.default, [x, torch.empty(100, 2)], 1) == 2 * 100 * 3 * 4


@pytest.mark.parametrize("rows", [1000, 100_000])
def test_lookups_do_not_count_the_table(rows: int) -> None:
    table, picked = torch.empty(rows, 8), tokens(3, 5)
    expected = 2 * (3 * 5 * 8 * 4) + 3 * 5 * 8
    assert moved(aten.embedding.default, table, picked) == expected
    assert moved(aten.index.Tensor, table, [picked]) == expected
    assert moved(aten.index_select.default, table, 0, tokens(15)) == expected
    assert moved(aten.gather.default, table, 1, tokens(3, 5)) == 2 * (3 * 5 * 4) + 3 * 5 * 8


def test_loss_reads_one_score_per_row_and_its_gradient_none() -> None:
    scores, classes = torch.empty(16, 50_000), tokens(16)
    assert moved(aten.nll_loss_forward.default, scores, classes, None, 1, -100) == 16 * 8 + 16 * 4 + 2 * 4
    total, loss = torch.empty(()), torch.empty(())
    backward = moved(aten.nll_loss_backward.default, loss, scores, classes, None, 1, -100, total)
    assert backward == scores.numel() * 4 + 16 * 8 + 2 * 4


def test_batch_norm_reads_its_input_twice() -> None:
    x, channel = torch.empty(4, 3, 8, 8), torch.empty(3)
    out = 4 * 3 * 8 * 8 * 4
    args = (x, channel, channel, True, 0.1, 1e-5)
    assert moved(aten._native_batch_norm_legit.no_stats, *args) == 2 * (out + 12) + out + 2 * 12


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.view.default, ([-1],)),
        (aten.transpose.int, (0, 1)),
        (aten.expand.default, ([5, 8, 8],)),
        (aten.split.Tensor, (2,)),
        (aten.detach.default, ()),
        (aten._unsafe_view.default, ([64],)),
    ],
)
def test_views_cost_nothing(target: Any, args: tuple[Any, ...]) -> None:
    assert is_view(target)
    assert time_s(target, torch.empty(8, 8), *args) == 0.0


def test_items_of_a_tuple_are_views_and_kernels_are_not() -> None:
    assert model_op_time_s(operator.getitem, ((half(2), half(3)), 1), {}, half(3), H200) == 0.0
    assert not is_view(aten.relu.default)
    assert not is_view(aten.relu_.default)
    assert not is_view(aten.copy_.default)


def test_time_of_a_large_matrix_product_is_its_flops_at_the_reached_peak() -> None:
    x = half(8192, 8192)
    expected = 4e-6 + 2 * 8192**3 / (989.5e12 * 0.75)
    assert time_s(aten.mm.default, x, x) == pytest.approx(expected)
    single = torch.empty(8192, 8192)
    assert time_s(aten.mm.default, single, single) == pytest.approx(4e-6 + 2 * 8192**3 / (67e12 * 0.75))


def test_time_of_a_pointwise_op_is_its_bytes_at_the_reached_bandwidth() -> None:
    x = half(1 << 28)
    assert time_s(aten.relu.default, x) == pytest.approx(4e-6 + 2 * (1 << 29) / (4.8e12 * 0.85))


def test_matrix_times_vector_is_bound_by_reading_the_matrix() -> None:
    assert time_s(aten.mm.default, half(1, 8192), half(8192, 8192)) == pytest.approx(
        4e-6 + 8192**2 * 2 / (4.8e12 * 0.85), rel=1e-3
    )


def test_float32_convolutions_use_tf32_and_depthwise_ones_do_not() -> None:
    x, weight = torch.empty(64, 512, 56, 56), torch.empty(512, 512, 3, 3)
    count = 2 * 64 * 56 * 56 * 512 * 512 * 9
    assert time_s(aten.convolution.default, *convolution(x, weight)) == pytest.approx(4e-6 + count / (494.7e12 * 0.55))
    tiny, depthwise = half(1, 512, 8, 8), half(512, 1, 7, 7)
    args = convolution(tiny, depthwise, groups=512)
    count = 2 * 8 * 8 * 512 * 49
    assert time_s(aten.convolution.default, *args, device="cpu") == pytest.approx(2e-6 + count / (0.9e12 * 0.5))


def test_tiny_ops_take_the_launch_time() -> None:
    for device in DEVICES.values():
        assert time_s(aten.relu.default, half(1), device=device.name) == pytest.approx(device.launch_s, rel=0.01)


@pytest.mark.parametrize("device", DEVICES)
def test_times_grow_with_the_size(device: str) -> None:
    sizes = (64, 256, 1024, 4096)
    products = [time_s(aten.mm.default, half(n, n), half(n, n), device=device) for n in sizes]
    copies = [time_s(aten.clone.default, half(n, n), device=device) for n in sizes]
    flash = aten._scaled_dot_product_flash_attention.default
    attentions = [time_s(flash, *[half(1, 8, n, 64)] * 3, device=device) for n in sizes]
    for times in (products, copies, attentions):
        assert times == sorted(set(times))


def test_newer_devices_are_faster() -> None:
    x = half(4096, 4096)
    products = [time_s(aten.mm.default, x, x, device=name) for name in ("h100", "a100", "rtx4090", "l4", "cpu")]
    copies = [time_s(aten.clone.default, x, device=name) for name in ("h200", "h100", "a100", "rtx4090", "l4", "cpu")]
    assert products == sorted(set(products))
    assert copies == sorted(set(copies))


def test_workspace_of_flash_attention_backward() -> None:
    backward = aten._scaled_dot_product_flash_attention_backward.default
    query, key = half(2, 8, 100, 40), half(2, 4, 100, 40)
    accumulator = 2 * 8 * 128 * (64 + 1) * 4
    assert workspace(backward, *attention_backward(query, query, is_causal=True)) == accumulator
    expanded = 2 * 8 * 100 * 40 * 2 * 2
    assert workspace(backward, *attention_backward(query, key, is_causal=True)) == accumulator + expanded
    assert workspace(backward, *attention_backward(query, query, is_causal=True), device="cpu") == 0


def test_other_ops_have_no_workspace() -> None:
    assert workspace(aten.mm.default, half(64, 64), half(64, 64)) == 0
    query = half(2, 8, 64, 32)
    assert workspace(aten._scaled_dot_product_flash_attention.default, query, query, query) == 0


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_device_rates_are_plausible(device: Any) -> None:
    assert device.half_flops >= device.tf32_flops >= device.float32_flops > 0
    assert 10**9 < device.memory_bytes < 10**12
    for part in (
        device.matmul_efficiency,
        device.convolution_efficiency,
        device.attention_efficiency,
        device.bandwidth_efficiency,
    ):
        assert 0 < part < 1


def test_unknown_device_raises() -> None:
    assert get_device("h200") is H200
    with pytest.raises(UsageError, match="unknown device 'b200': choose from gh200, h200, h100, a100, l4, rtx4090, cpu"):
        get_device("b200")


def test_flops_of_a_whole_training_step() -> None:
    """Forward, gradients of the weights, and gradients of all inputs but the first."""
    batch, layers, width, classes = 16, 3, 32, 8
    step = capture(*build("mlp", batch=batch, layers=layers, width=width, classes=classes), as_on_cuda=True)
    total = 0
    for node in step.nodes:
        if node is not None:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            total += count_op_flops(node.target, args, kwargs, node.meta["val"])
            assert model_op_time_s(node.target, args, kwargs, node.meta["val"], H200) >= H200.launch_s
    first = 2 * batch * width * width
    assert total == 3 * (layers * first + 2 * batch * width * classes) - first
