"""Capture of attention as it runs on CUDA, on a machine without a GPU.

``scaled_dot_product_attention`` picks its kernel by the device of its inputs. Captured on the CPU it becomes the CPU's own
fused kernel or, with dropout, matrix products over quadratic tensors, where a GPU would run a fused kernel that saves one
number per row. CUDA's kernels have shapes and gradients for fake tensors on every device, so that it suffices to call them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

from planner.torch_private.core import scoped_library

aten = torch.ops.aten


@contextmanager
def capture_attention_as_on_cuda() -> Iterator[None]:
    """Make fake tensors on the CPU use the attention kernels that CUDA would run.

    Flash attention if possible: bfloat16 or float16, no mask, one head width of at most 256, and as many queries as keys if
    causal; grouped queries are supported. Then memory-efficient attention: also float32, masks, and other widths of the values,
    but head widths a multiple of 16 bytes. Else matrix products. These are the rules of devices of compute capability 8.0 and
    later; recent cuDNN versions put their own kernel first on Hopper, whose tensors have the sizes of flash attention's.

    The captured graph cannot run on the CPU, nor can attention on real tensors inside the context.
    """
    overload = aten.scaled_dot_product_attention.default
    with scoped_library("aten", "IMPL") as library:
        library.impl("scaled_dot_product_attention", _run_attention, "AutogradCPU")
        # The kernel of an earlier capture is cached in Python, where the library does not see it.
        overload._dispatch_cache.clear()
        try:
            yield
        finally:
            overload._dispatch_cache.clear()


def _run_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002  # the signature of the operator
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if _fits_any_kernel(query, key, value):
        if attn_mask is None and fits_flash(query, key, value, is_causal=is_causal, enable_gqa=enable_gqa):
            return _run_flash(query, key, value, dropout_p, is_causal=is_causal, scale=scale)
        if fits_efficient(query, key, value):
            return _run_efficient(query, key, value, attn_mask, dropout_p, is_causal=is_causal, scale=scale)
    written: Tensor = aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]
    return written


def _fits_any_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return True if all fused kernels support the shapes: batch, heads, positions and a dense width, none of them empty."""
    parts = (query, key, value)
    return (
        all(t.dim() == 4 and t.numel() > 0 and (t.stride(3) == 1 or t.shape[3] == 1) for t in parts)
        and len({t.shape[0] for t in parts}) == 1
        and len({t.dtype for t in parts}) == 1
        and query.shape[3] == key.shape[3]
    )


def fits_flash(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, enable_gqa: bool = False) -> bool:
    """Return True if flash attention supports inputs that fused kernels support; with padding, any width."""
    shared_heads = enable_gqa and key.shape[1] == value.shape[1] and query.shape[1] % key.shape[1] == 0
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[3] == value.shape[3] <= 256
        and (query.shape[2] == key.shape[2] or not is_causal)
        and (query.shape[1] == key.shape[1] == value.shape[1] or shared_heads)
    )


def fits_efficient(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return True if memory-efficient attention supports inputs that fused kernels support."""
    alignment = 16 // query.element_size()
    return (
        query.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and query.shape[1] == key.shape[1] == value.shape[1]
        and query.shape[3] % alignment == 0
        and value.shape[3] % alignment == 0
    )


def _run_flash(query: Tensor, key: Tensor, value: Tensor, dropout: float, *, is_causal: bool, scale: float | None) -> Tensor:
    """Call flash attention, with head widths padded to a multiple of 8 and scaled as if they were not."""
    width = query.shape[3]
    if padding := -width % 8:
        query, key, value = (F.pad(t, (0, padding)) for t in (query, key, value))
        scale = width**-0.5 if scale is None else scale
    out: Tensor = aten._scaled_dot_product_flash_attention(query, key, value, dropout, is_causal, scale=scale)[0]
    return out[..., :width] if padding else out


def _run_efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    *,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    bias = None if mask is None else _build_bias(mask, query, key)
    trained = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    out: Tensor = aten._scaled_dot_product_efficient_attention(query, key, value, bias, trained, dropout, is_causal, scale=scale)[
        0
    ]
    return out


def _build_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the bias of the scores: rows start at multiples of 16 elements, and broadcasting is not copied."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), float("-inf"))
    keys = mask.shape[-1]
    if keys > 1 and (padding := -keys % 16):
        mask = F.pad(mask, (0, padding))[..., :keys]
    return mask.expand(*query.shape[:3], key.shape[2])
