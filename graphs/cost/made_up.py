"""Tensors that are made for one op, to look at it by itself."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch

_PASSES = 3
_LONG_S = 0.1  # what takes so long is timed once


@dataclass(frozen=True, slots=True)
class Like:
    """A tensor to be made.

    Attributes:
        shape, stride, offset: in elements of its storage.
        elements: of its storage.
        dtype, device: of the tensor.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    elements: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, value: torch.Tensor) -> Self:
        """Like `value`, in a storage of no more than it needs."""
        shape, stride = tuple(value.shape), value.stride()
        extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        return cls(shape, stride, 0, 0 if 0 in shape else extent, value.dtype, value.device)

    @classmethod
    def whole(cls, value: torch.Tensor) -> Self:
        """Like `value`, in a storage as large as its own: others may read more of it."""
        elements = value.untyped_storage().nbytes() // value.element_size()
        return cls(tuple(value.shape), value.stride(), int(value.storage_offset()), elements, value.dtype, value.device)

    def make(self, generator: torch.Generator) -> torch.Tensor:
        """One with numbers between 1/4 and 3/4: probabilities, variances and arguments of logarithms are among them.

        Whole numbers are 0, which is an index everywhere.
        """
        flat = torch.zeros(self.elements, dtype=self.dtype, device=self.device)
        if self.dtype.is_floating_point and self.device == generator.device:
            flat = flat.float().uniform_(0.25, 0.75, generator=generator).to(self.dtype)
        return flat.as_strided(self.shape, self.stride, self.offset)


def least_time_s(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of `call`: the least of some executions."""
    times: list[float] = []
    while len(times) < _PASSES and sum(times) < _LONG_S:
        times.append(_time_s(call, device))
    return min(times)


def _time_s(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        call()
        last.record()
        torch.cuda.synchronize(device)
        return float(first.elapsed_time(last)) / 1e3
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
