"""Convolutions by other libraries, algorithms and memory formats, and with separate gradients.

The parts for CUDA have not been tested on a GPU.

That an alternative is exact is not declared but verified on the tensors of profiling: the same library rounds alike for one
geometry and not for another. An algorithm that is chosen by timing may differ from one execution to the next, and so cannot be
recomputed.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from planner.capture.options.kernels.alternative import Alternative, Bundle, ReplaceableOp, list_reads, make_call
from planner.capture.rewrites.outputs import get_fake
from planner.torch_private.core import FakeTensor

aten = torch.ops.aten

_NATIVE_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
_INPUT, _MASK = (0,), 10
_STRIDE, _PADDING, _DILATION, _TRANSPOSED, _OUTPUT_PADDING, _GROUPS = range(6)  # positions after the tensors


def iterate_alternatives(op: ReplaceableOp) -> Iterator[Bundle]:
    """Yield the alternatives for a convolution or its backward pass."""
    if op.node.target is aten.convolution.default:
        yield from _forward_alternatives(op)
    elif op.node.target is aten.convolution_backward.default:
        yield from _iterate_backward_alternatives(op)


def _forward_alternatives(op: ReplaceableOp) -> Iterator[Bundle]:
    x, weight, bias, *geometry = (op[i] for i in range(9))
    stride, padding, dilation, groups = (geometry[i] for i in (_STRIDE, _PADDING, _DILATION, _GROUPS))
    transposed = geometry[_TRANSPOSED]
    if _has_native(x, weight, geometry):
        yield (op.build_alternative("native", _run_native, x, weight, _get_kernel_size(weight), bias, stride, padding),)
    if op.device == "cpu" and not transposed and get_fake(x).dtype == torch.float32:
        yield (op.build_alternative("onednn", _run_onednn, x, weight, bias, padding, stride, dilation, groups),)
    if get_fake(x).dim() == 4:
        target = partial(_run_in_format, _choose_other_format(get_fake(x)), aten.convolution.default)
        yield (op.build_alternative(_format_name(get_fake(x)), target, x, weight, bias, *geometry),)
    if op.device == "cuda":
        for name, setting in _CUDNN.items():
            call = partial(_run_with_cudnn, setting, aten.convolution.default)
            yield (op.build_alternative(name, call, x, weight, bias, *geometry, repeatable=name in _REPEATABLE),)


def _iterate_backward_alternatives(op: ReplaceableOp) -> Iterator[Bundle]:
    gradient, x, weight, bias_sizes, *geometry = (op[i] for i in range(_MASK))
    mask = op[_MASK]
    given = (gradient, x, weight, bias_sizes, *geometry)
    # Some algorithms of cuDNN accumulate in no fixed order.
    repeatable = op.device != "cuda" or torch.backends.cudnn.deterministic
    if mask[0] and mask[1]:
        yield _build_one_at_a_time(op, given, mask, repeatable=repeatable)
    if _has_native(x, weight, geometry):
        arguments = (gradient, x, weight, _get_kernel_size(weight), geometry[_STRIDE], geometry[_PADDING], mask)
        yield (op.build_alternative("native", _run_native_backward, *arguments, repeatable=repeatable),)
    if get_fake(x).dim() == 4:
        target = partial(_run_in_format, _choose_other_format(get_fake(x)), aten.convolution_backward.default)
        yield (op.build_alternative(_format_name(get_fake(x)), target, *given, mask, repeatable=repeatable),)
    if op.device == "cuda":
        for name, setting in _CUDNN.items():
            call = partial(_run_with_cudnn, setting, aten.convolution_backward.default)
            yield (op.build_alternative(name, call, *given, mask, repeatable=repeatable and name in _REPEATABLE),)


def _build_one_at_a_time(op: ReplaceableOp, given: tuple[Any, ...], mask: list[bool], *, repeatable: bool) -> Bundle:
    """Return one op for the input's gradient, which does not read the input, and another one for the other gradients."""
    gradient, x, weight, bias_sizes, *geometry = given
    of_input = tuple(result for result in op.results if result.path == _INPUT)
    others = tuple(result for result in op.results if result.path != _INPUT)
    compute_input_gradient = partial(_compute_input_gradient, get_fake(x).shape, (bias_sizes, *geometry))
    rest = (*given, [False, *mask[1:]])
    return (
        Alternative("input", (op.node,), (gradient, weight), of_input, compute_input_gradient, repeatable, helper=True),
        Alternative(
            "weight",
            (op.node,),
            list_reads(rest),
            others,
            make_call(aten.convolution_backward.default, rest, others),
            repeatable,
        ),
    )


def _compute_input_gradient(
    shape: torch.Size, geometry: tuple[Any, ...], gradient: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor]:
    like = gradient.new_empty(()).expand(shape)  # the kernel reads only its shape
    found = aten.convolution_backward.default(gradient, like, weight, *geometry, [True, False, False])
    return (found[0],)


def _get_kernel_size(weight: Any) -> list[int]:
    return list(get_fake(weight).shape[2:])


def _has_native(x: Any, weight: Any, geometry: list[Any]) -> bool:
    """Return True if PyTorch has a native kernel: rows of all windows, times the weights."""
    plain = not geometry[_TRANSPOSED] and geometry[_GROUPS] == 1 and all(d == 1 for d in geometry[_DILATION])
    return (
        plain and get_fake(x).dim() == 4 and get_fake(x).dtype == get_fake(weight).dtype and get_fake(x).dtype in _NATIVE_DTYPES
    )


def _run_native(x: torch.Tensor, weight: torch.Tensor, kernel: list[int], bias: Any, stride: Any, padding: Any) -> Any:
    """Return ``aten._slow_conv2d_forward``; for fake tensors the convolution op, as PyTorch would run on real zeros."""
    if isinstance(x, FakeTensor):
        return aten.convolution.default(x, weight, bias, stride, padding, [1, 1], False, [0, 0], 1)
    return aten._slow_conv2d_forward.default(x, weight, kernel, bias, stride, padding)


def _run_native_backward(
    gradient: Any, x: Any, weight: Any, kernel: list[int], stride: Any, padding: Any, mask: list[bool]
) -> Any:
    """Return ``aten._slow_conv2d_backward``; for fake tensors the convolution op."""
    if isinstance(x, FakeTensor):
        sizes = [weight.shape[0]] if mask[2] else None
        return aten.convolution_backward.default(gradient, x, weight, sizes, stride, padding, [1, 1], False, [0, 0], 1, mask)
    return aten._slow_conv2d_backward.output_mask(gradient, x, weight, kernel, stride, padding, mask)


def _run_onednn(*arguments: Any) -> torch.Tensor:
    """Return ``aten.mkldnn_convolution``, which has no fake kernel; for fake tensors the convolution op."""
    if isinstance(arguments[0], FakeTensor):
        x, weight, bias, padding, stride, dilation, groups = arguments
        like: torch.Tensor = aten.convolution.default(x, weight, bias, stride, padding, dilation, False, [0, 0], groups)
        return like
    made: torch.Tensor = aten.mkldnn_convolution.default(*arguments)
    return made


def _choose_other_format(x: torch.Tensor) -> torch.memory_format:
    return torch.contiguous_format if x.is_contiguous(memory_format=torch.channels_last) else torch.channels_last


def _format_name(x: torch.Tensor) -> str:
    return "contiguous" if _choose_other_format(x) is torch.contiguous_format else "channels_last"


def _run_in_format(memory_format: torch.memory_format, target: Callable[..., Any], *arguments: Any) -> Any:
    """Call `target` with all images in `memory_format`."""
    return target(*(a.contiguous(memory_format=memory_format) if _is_image(a) else a for a in arguments))


def _is_image(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 4


# Ways in which cuDNN chooses: the fastest algorithm by timing, or a deterministic one.
_CUDNN = {
    "benchmark": {"enabled": True, "benchmark": True, "deterministic": False},
    "deterministic": {"enabled": True, "benchmark": False, "deterministic": True},
}
_REPEATABLE = ("deterministic",)


def _run_with_cudnn(setting: dict[str, bool], target: Callable[..., Any], *arguments: Any) -> Any:
    """Call `target` with cuDNN's `setting`."""
    cudnn = torch.backends.cudnn
    with cudnn.flags(benchmark_limit=cudnn.benchmark_limit, allow_tf32=cudnn.allow_tf32, **setting):
        return target(*arguments)
