"""Synthetic tensors: inputs for an op that is measured alone."""

from dataclasses import dataclass
from functools import cache
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

# Ops whose integer inputs are pivots, which count from 1, or conditions.
_FROM_ONE = {
    "aten.linalg_lu_solve.default",
    "aten.linalg_ldl_solve.default",
    "aten.lu_unpack.default",
    "aten._assert_async.default",
    "aten._assert_async.msg",
}
# Ops that list what a mask selects, in memory that grows with it. It differs from batch to batch: all of it counts.
_LISTING = {"aten.masked_scatter_backward.default", "aten.index_put.default", "aten._unsafe_index_put.default"}
_BLOCK_ELEMENTS = 2**16  # random numbers in a block; larger tensors repeat it: each copy doubles the filled part


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The layout of a tensor.

    Attributes:
        shape, stride, offset: in elements of its storage, as in PyTorch.
        elements: number of elements of its storage.
        dtype, device: as in PyTorch.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    elements: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def make_smallest(cls, value: torch.Tensor) -> Self:
        """Return the layout of `value` in the smallest storage that holds it."""
        shape, stride = tuple(value.shape), value.stride()
        extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        return cls(shape, stride, 0, 0 if 0 in shape else extent, value.dtype, value.device)

    @classmethod
    def of(cls, value: torch.Tensor) -> Self:
        """Return the layout of `value` in a storage of its own size: ops may read other parts of it through views."""
        elements = value.untyped_storage().nbytes() // value.element_size()
        return cls(tuple(value.shape), value.stride(), int(value.storage_offset()), elements, value.dtype, value.device)

    def make(self, target: str) -> torch.Tensor:
        """Return a tensor of this layout with numbers between 1/4 and 3/4, for an op that calls `target`.

        Probabilities, variances and arguments of logarithms lie in that range. Integers are 0, which is a valid index
        (or 1). Masks are false, or true where that takes more memory. Nothing but the tensor itself is allocated.
        """
        if not self.dtype.is_floating_point:
            one = target in _FROM_ONE or is_taken_whole(target, self.dtype)
            flat = torch.full((self.elements,), int(one), dtype=self.dtype, device=self.device)
            return flat.as_strided(self.shape, self.stride, self.offset)
        flat = torch.empty(self.elements, dtype=self.dtype, device=self.device)
        block = torch.from_numpy(_build_random_block())
        done = min(self.elements, _BLOCK_ELEMENTS)
        flat[:done].copy_(block[:done])
        while done < self.elements:
            more = min(done, self.elements - done)
            flat[done : done + more].copy_(flat[:more])
            done += more
        return flat.as_strided(self.shape, self.stride, self.offset)


def is_taken_whole(target: str, dtype: torch.dtype) -> bool:
    """Return True if an input of this type is a mask for an op that calls `target` and takes the more memory the more is true."""
    return dtype == torch.bool and target in _LISTING


@cache
def _build_random_block() -> NDArray[np.float32]:
    """Return the numbers in memory of NumPy's: a tensor that stays would count for the budgets of later steps on the CPU."""
    generator = torch.Generator().manual_seed(0)
    block = torch.empty(_BLOCK_ELEMENTS, dtype=torch.float32, device="cpu")  # whatever the defaults are
    numbers: NDArray[np.float32] = block.uniform_(0.25, 0.75, generator=generator).numpy()
    return numbers.copy()
