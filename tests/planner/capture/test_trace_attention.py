"""CUDA's attention kernels, captured on the CPU."""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from planner.capture.rewrites.cuda_attention import capture_attention_as_on_cuda

FLASH, EFFICIENT = "flash", "efficient"
KERNELS = {
    FLASH: {
        "aten._scaled_dot_product_flash_attention.default": 1,
        "aten._scaled_dot_product_flash_attention_backward.default": 1,
    },
    EFFICIENT: {
        "aten._scaled_dot_product_efficient_attention.default": 1,
        "aten._scaled_dot_product_efficient_attention_backward.default": 1,
    },
    # Two products forward, four backward.
    "written out": {"aten.bmm.default": 6},
    "cpu": {
        "aten._scaled_dot_product_flash_attention_for_cpu.default": 1,
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": 1,
    },
}


def joint(dtype: torch.dtype, **options: object) -> fx.Graph:
    """Forward and backward of attention on fake tensors, 64 queries of 4 heads unless told otherwise."""
    batch, heads, width = 2, 4, options.pop("width", 32)
    kv_heads, keys, value_width = options.pop("kv_heads", heads), options.pop("keys", 64), options.pop("value_width", width)
    mask = options.pop("mask", None)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        bias = None if mask is None else torch.ones(64, keys, dtype=mask)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, **options)
        assert out.shape == (batch, heads, 64, value_width)
        return list(torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))

    with FakeTensorMode():
        q = torch.empty(batch, heads, 64, width, dtype=dtype, requires_grad=True)
        k = torch.empty(batch, kv_heads, keys, width, dtype=dtype, requires_grad=True)
        v = torch.empty(batch, kv_heads, keys, value_width, dtype=dtype, requires_grad=True)
        return make_fx(attention)(q, k, v).graph


def kernels(graph: fx.Graph) -> dict[str, int]:
    targets = (str(node.target) for node in graph.nodes)
    return dict(Counter(t for t in targets if "dot_product" in t or "bmm" in t))


@pytest.mark.parametrize(
    ("dtype", "options", "kernel"),
    [
        (torch.bfloat16, {}, FLASH),
        (torch.float16, {"dropout_p": 0.1, "is_causal": True}, FLASH),
        (torch.bfloat16, {"kv_heads": 2, "enable_gqa": True}, FLASH),
        (torch.bfloat16, {"width": 20}, FLASH),
        (torch.bfloat16, {"width": 256}, FLASH),
        (torch.bfloat16, {"width": 264}, EFFICIENT),
        (torch.bfloat16, {"value_width": 16}, EFFICIENT),
        (torch.bfloat16, {"mask": torch.bool}, EFFICIENT),
        (torch.bfloat16, {"mask": torch.bfloat16, "keys": 50}, EFFICIENT),
        (torch.bfloat16, {"is_causal": True, "keys": 50}, EFFICIENT),
        (torch.float32, {"dropout_p": 0.1, "is_causal": True}, EFFICIENT),
        (torch.bfloat16, {"width": 20, "mask": torch.bool}, "written out"),
        (torch.float32, {"width": 6}, "written out"),
        (torch.float32, {"kv_heads": 2, "enable_gqa": True}, "written out"),
        (torch.float64, {}, "written out"),
    ],
)
def test_captured_kernel_is_the_one_cuda_runs(dtype: torch.dtype, options: dict[str, object], kernel: str) -> None:
    with capture_attention_as_on_cuda():
        graph = joint(dtype, **options)
    assert kernels(graph) == KERNELS[kernel]


def test_flash_attention_saves_no_quadratic_tensor() -> None:
    with capture_attention_as_on_cuda():
        graph = joint(torch.bfloat16, dropout_p=0.1, is_causal=True)
    values = [node.meta["val"] for node in graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    assert max(t.numel() for t in values) == 2 * 4 * 64 * 32


def test_padding_keeps_the_scale_of_the_unpadded_width() -> None:
    with capture_attention_as_on_cuda():
        graph = joint(torch.bfloat16, width=20)
    [forward] = [n for n in graph.nodes if n.target is torch.ops.aten._scaled_dot_product_flash_attention.default]
    assert forward.args[0].meta["val"].shape == (2, 4, 64, 24)
    assert forward.kwargs["scale"] == pytest.approx(20**-0.5)


class Attention(nn.Module):
    def forward(self, q: Tensor) -> tuple[Tensor]:
        return (F.scaled_dot_product_attention(q, q, q).float().sum(),)


def test_context_ends_and_can_be_entered_again() -> None:
    """Through Dynamo and AOTAutograd, which look kernels up in a memory of their own."""

    def captured() -> dict[str, int]:
        with FakeTensorMode(), ExitStack() as stack:
            q = torch.empty(2, 4, 64, 32, dtype=torch.bfloat16, requires_grad=True)
            module = dynamo_graph_capture_for_export(Attention())(q)
            stack.enter_context(tracing(TracingContext(module.meta["fake_mode"])))
            return kernels(aot_export_joint_with_descriptors(stack, module, (q,)).graph_module.graph)

    assert captured() == KERNELS["cpu"]
    for _ in range(2):
        with capture_attention_as_on_cuda():
            assert captured() == KERNELS[FLASH]
        assert captured() == KERNELS["cpu"]


def test_context_ends_when_capture_fails() -> None:
    def fail() -> None:
        with capture_attention_as_on_cuda():
            raise ValueError("wrong model")

    with pytest.raises(ValueError, match="wrong model"):
        fail()
    q = torch.randn(1, 1, 4, 8)
    torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q), by_hand(q, q, q, lambda s: s))


def by_hand(q: Tensor, k: Tensor, v: Tensor, masked: Callable[[Tensor], Tensor]) -> Tensor:
    return masked(q @ k.transpose(-2, -1) * q.size(-1) ** -0.5).softmax(-1) @ v


def test_fallback_computes_attention() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 7, dtype=torch.float64) for _ in range(3))
    with capture_attention_as_on_cuda():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    torch.testing.assert_close(out, by_hand(q, k, v, lambda scores: scores.masked_fill(future, float("-inf"))))
