"""Attention by other kernels: matrix products, with probabilities recomputed in the backward pass, and CUDA's other fused kernel.

The parts for CUDA have not been tested on a GPU.

Recomputing the probabilities from query and key alone is FlashAttention's idea (Dao et al., NeurIPS 2022), here with one matrix
of them in memory. With dropout there is no alternative, since fused kernels do not save their mask.
"""

from collections.abc import Callable, Iterator
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import fx

from planner.capture.options.kernels.alternative import Alternative, Bundle, MadeTensor, Own, ReplaceableOp
from planner.capture.rewrites.cuda_attention import fits_efficient, fits_flash
from planner.capture.rewrites.outputs import get_fake

aten = torch.ops.aten

_HALF = (torch.bfloat16, torch.float16)
_TILE = 32  # tile that the rows of the memory-efficient kernel's logsumexp are padded to

# The ops, and the name of each one's mask argument.
_FORWARD = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: "attn_mask",
    aten._scaled_dot_product_flash_attention.default: None,
    aten._scaled_dot_product_efficient_attention.default: "attn_bias",
}
_BACKWARD = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: "attn_mask",
    aten._scaled_dot_product_flash_attention_backward.default: None,
    aten._scaled_dot_product_efficient_attention_backward.default: "attn_bias",
}


def iterate_alternatives(op: ReplaceableOp) -> Iterator[Bundle]:
    """Yield the alternatives for a pass of a fused attention kernel."""
    if op.node.target in _FORWARD:
        yield from _forward_alternatives(op)
    elif op.node.target in _BACKWARD:
        yield from _iterate_backward_alternatives(op)


def _forward_alternatives(op: ReplaceableOp) -> Iterator[Bundle]:
    query, key, value, mask = _read(op, _FORWARD)
    if _has_math(op, query, key):
        compute = partial(_compute_forward, causal=op.get_named("is_causal"), scale=_scale(op, query))
        out = tuple(result for result in op.results if result.path == (0,))
        reads = (query, key, value) if mask is None else (query, key, value, mask)
        yield (Alternative("math", (op.node,), reads, out, compute),)


def _iterate_backward_alternatives(op: ReplaceableOp) -> Iterator[Bundle]:
    """Yield the alternatives for a backward pass, with its forward pass if that must save something else."""
    query, key, value, mask = _read(op, _BACKWARD)
    if _has_math(op, query, key) and _is_without_mask_gradient(op):
        compute = partial(_compute_backward, causal=op.get_named("is_causal"), scale=_scale(op, query))
        reads = (op[0], query, key, value) if mask is None else (op[0], query, key, value, mask)
        yield (Alternative("math", (op.node,), reads, op.results, compute),)
    before = op.calls.find_producer(op.get_named("out"))
    if op.node.target is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return  # a CPU has one fused kernel
    if before is None or op.get_named("dropout_p") or not _is_without_mask_gradient(op):
        return
    values = tuple(map(get_fake, (query, key, value)))
    if op.node.target is aten._scaled_dot_product_flash_attention_backward.default:
        if fits_efficient(*values):
            yield _build_efficient(op, before)
    elif mask is None and values[0].shape[3] % 8 == 0 and fits_flash(*values, is_causal=op.get_named("is_causal")):
        yield _build_flash(op, before)


def _read(op: ReplaceableOp, masks: dict[Any, str | None]) -> tuple[Any, Any, Any, Any]:
    mask = masks[op.node.target]
    return (*(op.get_named(name) for name in ("query", "key", "value")), None if mask is None else op.get_named(mask))


def _has_math(op: ReplaceableOp, query: fx.Node, key: fx.Node) -> bool:
    """Return True if the op has no dropout, whose mask the fused kernels do not save, and one key head per query head."""
    return not op.get_named("dropout_p") and get_fake(query).dim() == 4 and get_fake(query).shape[:2] == get_fake(key).shape[:2]


def _is_without_mask_gradient(op: ReplaceableOp) -> bool:
    return all(result.path in ((0,), (1,), (2,)) for result in op.results) and len(op.results) == 3


def _scale(op: ReplaceableOp, query: fx.Node) -> float:
    scale = op.get_named("scale")
    return 1 / sqrt(get_fake(query).shape[-1]) if scale is None else float(scale)


def _compute_probabilities(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, *, causal: bool, scale: float
) -> torch.Tensor:
    """Return the probabilities as one quadratic tensor, in float32 at least; fully masked rows are 0, as in the fused kernels."""
    scores = torch.matmul(query, key.transpose(-2, -1))
    scores = scores.float() if scores.dtype in _HALF else scores
    scores.mul_(scale)
    if causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(above, float("-inf"))
    if mask is not None and mask.dtype == torch.bool:
        scores.masked_fill_(mask.logical_not(), float("-inf"))
    elif mask is not None:
        scores.add_(mask)
    highest = scores.amax(-1, keepdim=True)
    scores.sub_(highest.masked_fill_(highest == float("-inf"), 0.0)).exp_()
    total = scores.sum(-1, keepdim=True)
    return scores.div_(total.masked_fill_(total == 0.0, 1.0))


def _compute_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor]:
    """Return softmax(Q K' scale) V, without the logsumexp that the fused backward pass reads."""
    probabilities = _compute_probabilities(query, key, mask, causal=causal, scale=scale)
    return (torch.matmul(probabilities.to(value.dtype), value),)


def _compute_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value, computed from these alone.

    With P the probabilities and O = P V: dV = P' dO; dP = dO V'; dS = P (dP - rowsum(P dP)); dQ = dS K scale; dK = dS' Q scale.
    """
    probabilities = _compute_probabilities(query, key, mask, causal=causal, scale=scale)
    of_value = torch.matmul(probabilities.to(value.dtype).transpose(-2, -1), gradient)
    of_scores = torch.matmul(gradient, value.transpose(-2, -1)).to(probabilities.dtype).mul_(probabilities)
    of_scores.addcmul_(probabilities, of_scores.sum(-1, keepdim=True), value=-1).mul_(scale)
    del probabilities
    of_scores = of_scores.to(query.dtype)
    return torch.matmul(of_scores, key), torch.matmul(of_scores.transpose(-2, -1), query), of_value


def _build_efficient(op: ReplaceableOp, before: ReplaceableOp) -> Bundle:
    """Return both passes by the memory-efficient kernel, which saves the logsumexp with rows padded to a tile."""
    causal, scale = op.get_named("is_causal"), op.get_named("scale")
    rows = get_fake(op.get_named("query")).shape[2]
    forward, backward = partial(_run_efficient, causal, scale), partial(_run_efficient_backward, causal, scale)
    return _build_both(op, before, "efficient", -(-rows // _TILE) * _TILE, forward, backward)


def _run_efficient(causal: Any, scale: Any, *given: torch.Tensor) -> Any:
    return aten._scaled_dot_product_efficient_attention.default(*given, None, True, 0.0, causal, scale=scale)


def _run_efficient_backward(causal: Any, scale: Any, *given: torch.Tensor) -> Any:
    *saved, out, kept, seed = given
    return aten._scaled_dot_product_efficient_attention_backward.default(
        *saved, None, out, kept, seed, seed, 0.0, [True, True, True, False], causal, scale=scale
    )


def _build_flash(op: ReplaceableOp, before: ReplaceableOp) -> Bundle:
    """Return both passes by flash attention, which saves one logsumexp per row."""
    causal, scale = op.get_named("is_causal"), op.get_named("scale")
    rows, keys = (get_fake(op.get_named(name)).shape[2] for name in ("query", "key"))
    forward, backward = partial(_run_flash, causal, scale), partial(_run_flash_backward, rows, keys, causal, scale)
    return _build_both(op, before, "flash", rows, forward, backward)


def _run_flash(causal: Any, scale: Any, *given: torch.Tensor) -> Any:
    return aten._scaled_dot_product_flash_attention.default(*given, 0.0, causal, scale=scale)


def _run_flash_backward(rows: int, keys: int, causal: Any, scale: Any, *given: torch.Tensor) -> Any:
    *saved, seed = given
    return aten._scaled_dot_product_flash_attention_backward.default(
        *saved, None, None, rows, keys, 0.0, causal, seed, seed, scale=scale
    )


def _build_both(op: ReplaceableOp, before: ReplaceableOp, name: str, rows: int, forward: Any, backward: Any) -> Bundle:
    """Return both passes by a kernel that saves `rows` logarithms per head."""
    query, key, value, _ = _read(op, _BACKWARD)
    logarithms = Own("logsumexp", get_fake(query).new_empty((*get_fake(query).shape[:2], rows), dtype=torch.float32))
    makes = (MadeTensor(before.node, (0,)), logarithms)
    return (
        Alternative(name, (before.node,), (query, key, value), makes, partial(_take_results, forward)),
        Alternative(
            name,
            (op.node,),
            (op[0], query, key, value, op.get_named("out"), logarithms),
            op.results,
            partial(_take_gradients, backward),
            repeatable=False,  # gradients are accumulated in no fixed order
        ),
    )


def _take_results(forward: Callable[..., Any], *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(forward(*given)[:2])


def _take_gradients(backward: Callable[..., Any], *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    seed = torch.zeros((), dtype=torch.long, device=given[0].device)  # no dropout
    return tuple(backward(*given, seed)[:3])
