"""Saved tensors that were evicted or overwritten: the C++ library has their handles (``planner/native/op_records.cpp``)."""

from typing import NoReturn

import torch

from planner.train.eager.recompute import Recomputation, get_resident_tensor
from planner.train.eager.storages import Geometry, TrackedStorage, make_alias


def restore_alias(recomputation: Recomputation, storage: TrackedStorage, number: int, expected: int) -> torch.Tensor:
    """Return the alias of a saved tensor, by its number, which was dropped when the storage was evicted.

    Raises:
        RuntimeError: the tensor was modified in place after it was saved, at version `expected`.
    """
    assert storage.evicted_aliases is not None
    version, geometry = storage.evicted_aliases[number]
    if version != expected:
        raise_overwritten(geometry, expected, version)
    with recomputation.run_own_ops():
        source = get_resident_tensor(storage)
        if source is None:
            source = recomputation.recompute(storage)
        alias = storage.aliases[number] = make_alias(geometry.view_of(source))
    del storage.evicted_aliases[number]
    return alias


def raise_overwritten(saved: torch.Tensor | Geometry, expected: int, version: int) -> NoReturn:
    """Raise the error that plain eager PyTorch raises for a saved tensor that was modified in place."""
    kind = f"{saved.dtype}".removeprefix("torch.")
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{kind} {list(saved.shape)}] is at version {version}; expected version {expected} instead. "
        "Hint: torch.autograd.set_detect_anomaly(True) finds the operation that failed to compute its gradient"
    )
