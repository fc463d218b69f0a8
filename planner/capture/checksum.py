"""Checksums of the bits of tensors, to detect changes."""

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

_BLOCK_ELEMENTS = 2**16  # at a time, so that a checksum needs a few MB for any tensor
_FACTOR = 6364136223846793005  # odd, so that no bit of an earlier block is lost

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compute_checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number (int64, on the device of `tensor`) that changes with any bit of the elements and with their order.

    For blocks b of elements x with odd weights w: sum(w[i] * x[i]) of each block, added up as s = s * factor + sum(b), mod 2**64.
    Two tensors that differ in few elements have the same checksum with a probability of about 2**-60.
    """
    dense = tensor.detach()
    if dense.is_complex():
        dense = torch.view_as_real(dense.resolve_conj())
    flat = dense.resolve_neg().contiguous().flatten().view(_INTEGERS[dense.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weights = torch.from_numpy(_build_weights()).to(tensor.device)
    for block in flat.split(_BLOCK_ELEMENTS):
        total = total * _FACTOR + torch.mul(block, weights[: block.numel()]).sum()
    return total


@cache
def _build_weights() -> NDArray[np.int64]:
    """Return the weights in memory of NumPy's: a tensor that stays would count for the budgets of later steps."""
    generator = torch.Generator().manual_seed(0)
    halves = torch.randint(-(2**62), 2**62, (_BLOCK_ELEMENTS,), generator=generator)
    weights: NDArray[np.int64] = (2 * halves + 1).numpy()
    return weights.copy()
