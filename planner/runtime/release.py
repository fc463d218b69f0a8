"""Return of freed memory to the system: what planning has allocated does not stay with the process."""

import ctypes
import gc
from collections.abc import Callable
from functools import cache

import torch


def release_unused(device: torch.device) -> None:
    """Give memory that is freed, but held by an allocator, back to the system: that of the C library, and of CUDA's cache."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Return glibc's ``malloc_trim``; None where the C library is another."""
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    return trim
