"""PyTorch's variants of operators that write over an input, and tensors that they may write over."""

import torch

from planner.capture.rewrites.outputs import is_dense
from planner.torch_private.core import DispatchKey, OpOverload


def is_covering(read: torch.Tensor, made: torch.Tensor) -> bool:
    """Return True if `read` covers its storage, each element once, with the layout of `made`.

    A view that is conjugated or negated when it is read does not: what is written over it would be read so too.
    """
    alike = _describe_layout(read) == _describe_layout(made)
    return alike and is_dense(read) and read.untyped_storage().nbytes() == made.untyped_storage().nbytes()


def _describe_layout(value: torch.Tensor) -> tuple[object, ...]:
    return value.dtype, value.shape, value.stride(), value.device, value.is_conj(), value.is_neg()


def find_out_variant(target: OpOverload) -> tuple[OpOverload, str] | None:
    """Return the variant of `target` with an output argument, and that argument's name; None if PyTorch has no such kernel."""
    for name in target.overloadpacket.overloads():
        variant: OpOverload = getattr(target.overloadpacket, name)
        given = [argument for argument in variant._schema.arguments if argument.is_out]
        if len(given) != 1 or not _is_kernel(variant):
            continue
        if _list_arguments(target) == [argument for argument in _list_arguments(variant) if argument[0] != given[0].name]:
            return variant, given[0].name
    return None


def find_in_place_variant(target: OpOverload) -> OpOverload | None:
    """Return the variant of `target` that overwrites its first argument; None if PyTorch has no such kernel."""
    packet = getattr(torch.ops.aten, f"{target.overloadpacket.__name__}_", None)
    variant: OpOverload | None = getattr(packet, target._overloadname, None) if target.namespace == "aten" else None
    if variant is None or not _is_kernel(variant) or _list_arguments(variant) != _list_arguments(target):
        return None
    return variant


def _is_kernel(variant: OpOverload) -> bool:
    """Return True if `variant` has its own kernel.

    PyTorch's generated variants make the output elsewhere and copy it; ``mul_`` by a number rounds the number first, which
    ``mul`` does not.
    """
    return torch.Tag.generated not in variant.tags and variant.has_kernel_for_dispatch_key(DispatchKey.CPU)


def _list_arguments(target: OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in target._schema.arguments]
