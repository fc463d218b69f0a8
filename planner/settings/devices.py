"""Rooflines: the time of an op on a device that need not be present, from its FLOPs and the bytes that it moves.

An op takes a fixed time plus the longer of computing and moving: ``launch + max(flops / peak, bytes / bandwidth)``, where both
limits are lowered to what good kernels reach. Peaks are dense (no structured sparsity). Like memory and bandwidth, they are
from public documents:

- gh200: NVIDIA GH200 Grace Hopper Superchip datasheet, with 96 GB of HBM3
- h200, h100: NVIDIA H200 and H100 Tensor Core GPU datasheets, SXM5 modules
- a100: NVIDIA A100 Tensor Core GPU datasheet, 80 GB SXM4 module
- l4: NVIDIA L4 Tensor Core GPU datasheet
- rtx4090: NVIDIA Ada GPU architecture whitepaper, appendix A (half precision with float32 accumulation)
- cpu: no product, but round numbers of a desktop: eight cores with AVX2 at 3.5 GHz, two channels of DDR4-3200

The efficiencies are not from documents: they are round values of what cuBLAS, cuDNN and FlashAttention-2 kernels commonly
reach at large sizes. Torch is imported only when an op is modelled.

Known weakness: one efficiency stands for all shapes, so that small ops are modelled too fast, and times of the host are not
modelled but for the launch.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from planner.graphs.errors import UsageError

if TYPE_CHECKING:
    import torch


USUAL_CONTEXT_BYTES = 800 * 10**6  # measured on an H100, with the kernels that training loads


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """The peak rates of a device, and the fraction of them that kernels reach.

    Attributes:
        bandwidth_bytes_per_s: bandwidth of its main memory.
        half_flops: peak per second in bfloat16 and float16.
        tf32_flops: peak per second of float32 convolutions, for which torch enables tensor cores by default.
        float32_flops: peak per second of other float32 operations, and of grouped convolutions.
        launch_s: time of an empty kernel.
        context_bytes: bytes of CUDA's context; those of an H100, if nothing else is known.
        matmul_efficiency, convolution_efficiency, attention_efficiency: fraction of the peak that is reached.
        bandwidth_efficiency: fraction of the bandwidth that is reached.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    half_flops: float
    tf32_flops: float
    float32_flops: float
    launch_s: float
    matmul_efficiency: float
    convolution_efficiency: float
    attention_efficiency: float
    bandwidth_efficiency: float
    context_bytes: int = USUAL_CONTEXT_BYTES


_ALL = (
    DeviceSpec("gh200", 96 * 10**9, 4.0e12, 989.5e12, 494.7e12, 67e12, 4e-6, 0.75, 0.55, 0.40, 0.85),
    DeviceSpec("h200", 141 * 10**9, 4.8e12, 989.5e12, 494.7e12, 67e12, 4e-6, 0.75, 0.55, 0.40, 0.85),
    DeviceSpec("h100", 80 * 10**9, 3.35e12, 989.5e12, 494.7e12, 67e12, 4e-6, 0.75, 0.55, 0.40, 0.85),
    DeviceSpec("a100", 80 * 10**9, 2.039e12, 312e12, 156e12, 19.5e12, 5e-6, 0.80, 0.60, 0.60, 0.85),
    DeviceSpec("l4", 24 * 10**9, 0.3e12, 121e12, 60e12, 30.3e12, 5e-6, 0.60, 0.50, 0.50, 0.85),
    DeviceSpec("rtx4090", 24 * 10**9, 1.008e12, 165.2e12, 82.6e12, 82.6e12, 4e-6, 0.80, 0.60, 0.60, 0.85),
    DeviceSpec("cpu", 32 * 10**9, 51.2e9, 0.9e12, 0.9e12, 0.9e12, 2e-6, 0.70, 0.50, 0.40, 0.70, context_bytes=0),
)
DEVICES: dict[str, DeviceSpec] = {device.name: device for device in _ALL}


def get_device(name: str) -> DeviceSpec:
    """Return the device `name`.

    Raises:
        UsageError: there is none; lists the devices.
    """
    if name not in DEVICES:
        raise UsageError(f"unknown device {name!r}: choose from {', '.join(DEVICES)}")
    return DEVICES[name]


def find_device(product: str) -> DeviceSpec | None:
    """Return the device that its driver calls `product`, such as ``NVIDIA H100 80GB HBM3``; None if it is unknown."""
    words = re.findall(r"[a-z0-9]+", product.lower().replace("rtx ", "rtx"))
    return next((device for device in DEVICES.values() if device.name in words), None)


def model_op_time_s(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, device: DeviceSpec) -> float:
    """Return the modelled seconds of one call of `target`; 0 for views, which run no kernel.

    Args:
        target: an aten overload; others, such as ``operator.getitem``, are views or bound by bandwidth.
        args, kwargs, out: arguments and result of the call, with real, fake or meta tensors.
    """
    if is_view(target):
        return 0.0
    moving_s = count_op_bytes(target, args, kwargs, out) / (device.bandwidth_bytes_per_s * device.bandwidth_efficiency)
    flops = count_op_flops(target, args, kwargs, out)
    computing_s = flops / _get_reached_flops(target, args, kwargs, device) if flops else 0.0
    return device.launch_s + max(moving_s, computing_s)


def model_workspace_bytes(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, device: DeviceSpec) -> int:
    """Return the modelled memory of one call in bytes, besides inputs and outputs.

    Only the backward pass of fused attention on GPUs counts: it accumulates the query's gradient in float32 and, where query
    heads share key heads, first computes the shared gradients per query head. All other ops count as 0: cuBLAS keeps one
    workspace for all calls, and that of cuDNN depends on the algorithm it picks.
    """
    name = _name(target)
    if device.name == "cpu" or name not in _ATTENTION_BACKWARD:
        return 0
    query, key, value = (_get_argument(target, args, kwargs, n) for n in ("query", "key", "value"))
    batch, heads, seq, width = query.shape
    padded = -(-seq // 128) * 128
    # The gradient in rows padded to the tile of the kernel, and one float of softmax statistics per row.
    workspace = batch * heads * padded * (-(-width // 32) * 32 + 1) * 4
    if key.shape[1] != heads:
        workspace += batch * heads * (key.shape[2] * key.shape[3] + value.shape[2] * value.shape[3]) * key.element_size()
    return int(workspace)


def is_view(target: Any) -> bool:
    """Return True if `target` only returns a view of its input: no kernel, no memory."""
    if target is operator.getitem or _name(target) in _HIDDEN_VIEWS:
        return True
    schema = getattr(target, "_schema", None)
    returns = schema.returns if schema is not None else ()
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def count_op_flops(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the floating-point operations of one call, with a multiply-add as two; 0 for ops bound by bandwidth.

    These are torch's own formulas, except that the causal half of attention is left out, that attention on the CPU is covered,
    and that the gradients of a grouped convolution cost no more than its forward pass each.
    """
    from torch.utils.flop_counter import flop_registry

    name = _name(target)
    if name in _ATTENTION_FORWARD or name in _ATTENTION_BACKWARD:
        return _count_attention_flops(target, args, kwargs, backward=name in _ATTENTION_BACKWARD)
    if name == "aten.convolution_backward":
        grad_out, x, weight, *_, transposed, _padding, _groups, wanted = args
        points = x if transposed else grad_out
        return int(2 * prod(points.shape[2:]) * x.shape[0] * weight.numel() * sum(wanted[:2]))
    formula: Callable[..., int] | None = flop_registry.get(getattr(target, "overloadpacket", None))
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0


def count_op_bytes(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the bytes that one call reads and writes in main memory.

    Counts every input and output once, an expanded tensor before its expansion, of a table the rows that are looked up, and
    nothing of inputs that only give their shape. Normalizations over more than a row read twice.
    """
    from planner.capture.rewrites.outputs import list_tensors

    name = _name(target)
    written = sum(map(_count_distinct_bytes, list_tensors(out)))
    if name in _ALLOCATES_ONLY:
        return 0
    if name in _LOOKUPS:
        # The rows read have the size of the output; the indices are read as well.
        table, *rest = list_tensors((args, kwargs))
        return min(written, _count_distinct_bytes(table)) + written + sum(map(_count_distinct_bytes, rest))
    if name in _PICKS_ONE_PER_ROW:
        scores, target_classes, *_ = args
        return _count_distinct_bytes(target_classes) + int(target_classes.numel() * scores.element_size()) + written
    unread = _get_argument(target, args, kwargs, _SHAPE_ONLY[name]) if name in _SHAPE_ONLY else None
    inputs = {id(t): t for t in list_tensors((args, kwargs)) if t is not unread}
    read = sum(map(_count_distinct_bytes, inputs.values()))
    return written + (2 * read if name in _READS_TWICE else read)


_HIDDEN_VIEWS = frozenset({"aten._unsafe_view", "aten.lift_fresh"})
_ALLOCATES_ONLY = frozenset({"aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.empty_permuted"})
_LOOKUPS = frozenset({"aten.embedding", "aten.gather", "aten.index_select", "aten.index", "aten.take"})
_PICKS_ONE_PER_ROW = frozenset({"aten.nll_loss_forward", "aten.nll_loss2d_forward"})
_READS_TWICE = frozenset(
    {
        "aten.native_batch_norm",
        "aten.cudnn_batch_norm",
        "aten._native_batch_norm_legit",
        "aten._native_batch_norm_legit_functional",
        "aten._batch_norm_with_update",
        "aten._batch_norm_with_update_functional",
        "aten.native_batch_norm_backward",
        "aten.batch_norm_backward",
        "aten.cudnn_batch_norm_backward",
        "aten.native_group_norm",
        "aten.native_group_norm_backward",
    }
)
# Inputs, by their name in the schema, whose elements the kernel does not read.
_SHAPE_ONLY = {
    "aten.copy_": "self",
    "aten.nll_loss_backward": "self",
    "aten.nll_loss2d_backward": "self",
    "aten.max_pool2d_with_indices_backward": "self",
    "aten.avg_pool2d_backward": "self",
    "aten._adaptive_avg_pool2d_backward": "self",
    "aten.full_like": "self",
    "aten.zeros_like": "self",
    "aten.ones_like": "self",
    "aten.rand_like": "self",
    "aten.randn_like": "self",
    "aten.new_zeros": "self",
    "aten.new_ones": "self",
    "aten.new_full": "self",
}
_ATTENTION_FORWARD = frozenset(
    f"aten._scaled_dot_product_{kernel}"
    for kernel in (
        "flash_attention",
        "flash_attention_for_cpu",
        "efficient_attention",
        "cudnn_attention",
        "fused_attention_overrideable",
    )
)
_ATTENTION_BACKWARD = frozenset(f"{name}_backward" for name in _ATTENTION_FORWARD)
_CONVOLUTIONS = frozenset(
    {
        *("aten.convolution", "aten._convolution", "aten.cudnn_convolution", "aten.convolution_overrideable"),
        *("aten._slow_conv2d_forward", "aten.convolution_backward"),
    }
)


def _name(target: Any) -> str:
    """Return the name of the packet, such as ``aten.mm`` for the overload ``aten.mm.default``."""
    return str(getattr(target, "overloadpacket", target))


def _get_reached_flops(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: DeviceSpec) -> float:
    """Return the FLOPs per second that kernels of this kind reach in the precision of the first matrix."""
    import torch

    from planner.capture.rewrites.outputs import list_tensors

    name = _name(target)
    # The first tensor of addmm and baddbmm is the summand.
    matrices = [t for t in list_tensors(args) if t.dim() >= 2 and t.is_floating_point()]
    dtype = matrices[0].dtype if matrices else torch.float32
    is_convolution = name in _CONVOLUTIONS
    if is_convolution and _get_argument(target, args, kwargs, "groups") not in (None, 1):
        # Tensor cores are of no use where few channels meet.
        return device.float32_flops * device.convolution_efficiency
    if dtype in (torch.bfloat16, torch.float16):
        peak = device.half_flops
    elif dtype == torch.float32:
        peak = device.tf32_flops if is_convolution else device.float32_flops
    else:
        peak = device.float32_flops / 2
    if is_convolution:
        return peak * device.convolution_efficiency
    if name in _ATTENTION_FORWARD or name in _ATTENTION_BACKWARD:
        return peak * device.attention_efficiency
    return peak * device.matmul_efficiency


def _count_attention_flops(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, backward: bool) -> int:
    """Return the FLOPs of two matrix products forward, of five backward, which recomputes the scores; half if causal."""
    query, key, value = (_get_argument(target, args, kwargs, n) for n in ("query", "key", "value"))
    batch, heads, queries, width = query.shape
    keys, value_width = key.shape[2], value.shape[3]
    per_pair = 3 * width + 2 * value_width if backward else width + value_width
    flops = 2 * batch * heads * queries * keys * per_pair
    return int(flops // 2 if _get_argument(target, args, kwargs, "is_causal") else flops)


def _get_argument(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """Return the argument that the schema of `target` calls `name`, or its default; None if there is none."""
    if name in kwargs:
        return kwargs[name]
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == name:
            return args[position] if position < len(args) else argument.default_value
    return None


def _count_distinct_bytes(tensor: "torch.Tensor") -> int:
    """Return the bytes of the distinct elements of `tensor`: a dimension of stride 0 counts once."""
    count = prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0 or size == 0)
    return min(int(count) * tensor.element_size(), int(tensor.untyped_storage().nbytes()))
