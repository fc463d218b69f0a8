"""What ops return, without computing it: found out on meta tensors, and remembered."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from tests.support.cuda_device.tensors import OnDevice

UNKNOWN: Any = object()


_known: dict[Any, Any] = {}


def forms(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What `func` returns, as meta tensors; UNKNOWN where that depends on values."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    key = (func, spec, tuple(map(_described, leaves)))
    if key not in _known:
        try:
            with _disable_current_modes():
                made = func(*pytree.tree_map(meta, args), **{**pytree.tree_map(meta, kwargs), **_on_meta(kwargs)})
        except (NotImplementedError, RuntimeError):
            made = UNKNOWN
        if any(not isinstance(leaf, torch.Tensor | type(None)) for leaf in pytree.tree_leaves(made)):
            made = UNKNOWN
        _known[key] = made
    return _known[key]


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.size(), value.stride(), value.is_cuda)
    return None if isinstance(value, torch.Generator) else (type(value), value)


def meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, OnDevice) and value.dim() == 0:
        return value  # a number
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.device("meta") if name == "device" else None for name in ("device", "generator") if name in kwargs}
