"""Return of freed memory to the system: what planning has allocated does not stay with the process."""

import ctypes
import gc
from functools import cache

import torch

from planner.runtime.free_memory import free_bytes

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
_LARGE_BYTES = 2**20


def release_unused(device: torch.device) -> None:
    """Give memory that is freed, but held by an allocator, back to the system: that of the C library, and of CUDA's cache."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def save_memory(needed_bytes: int, device: torch.device) -> None:
    """Let the process hold no more of the host's memory than its tensors, if what is free does not suffice to keep everything.

    The C library keeps freed blocks of up to 32 MB for later, in a heap with holes: a process then holds a quarter more than its
    tensors take. From now on each block of 1 MB or more goes back to the system when it is freed. To take it again costs time,
    so this is done only where the memory is needed: a step with everything kept takes `needed_bytes`, and less is free.
    """
    if device.type == "cpu" and needed_bytes > free_bytes(device) and (libc := _glibc()) is not None:
        libc.mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
        libc.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    """Return the C library; None if it is not glibc."""
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):
        return None
    return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") else None
