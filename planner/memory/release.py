"""Return of freed memory to the system, so that the process does not keep planning's memory."""

import ctypes
import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_ARENA_MAX of malloc.h
_MOST_MMAP_THRESHOLD_BYTES = 2**25  # DEFAULT_MMAP_THRESHOLD_MAX
_LARGE_BYTES = 2**20
_LARGE_BYTES_BESIDE_ARENA = 2**17
_LOG = logging.getLogger(__name__)

_returns_large_blocks = False


def release_unused(device: torch.device) -> None:
    """Return memory that allocators cache to the system: that of the C library, and of CUDA's caching allocator."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if (libc := _load_glibc()) is not None:
        libc.malloc_trim(0)


@contextmanager
def leave_out_present_objects() -> Iterator[None]:
    """Leave the objects of the process out of collections of cycles in the context, as those of Python and its libraries.

    Planning collects what it has left behind four times. Each took 0.3 s with the objects of Transformers, a tenth of planning.
    """
    if gc.get_freeze_count():  # as in some training loops
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def return_large_blocks() -> None:
    """Make the C library return each block of 1 MB or more to the system when it is freed, from now on.

    By default it keeps freed blocks of up to 32 MB in a fragmented heap: a process then holds a quarter more than its tensors
    need. Allocating a block again costs time, so this is only for steps that need the memory. All threads share one heap then:
    those of a solve left 40 MB in heaps of their own, which RLIMIT_DATA counts for as long as the training lasts. The first call
    logs a message, and drops the cycles that a capture has left.
    """
    global _returns_large_blocks  # per process, like the C library's own setting
    if (libc := _load_glibc()) is not None:
        libc.mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
        libc.mallopt(_ARENA_MAX, 1)
        if not _returns_large_blocks:
            gc.collect()
            _LOG.warning(
                "memory is tight: freed memory goes back to the system at once. There is nothing to do if the plan says that the "
                "step runs in an arena; otherwise steps are slower than predicted."
            )
        libc.malloc_trim(0)
    _returns_large_blocks = True


def return_blocks_beside_arena() -> None:
    """Make the C library return smaller blocks too, where it returns large ones, as steps have their memory in an arena.

    A smaller batch that runs by eager PyTorch, with blocks just below the limit, left a heap beside which there was no memory for
    the arena. Steps in no arena would take 10 to 15% longer with this limit.
    """
    if _returns_large_blocks and (libc := _load_glibc()) is not None:
        libc.mallopt(_MMAP_THRESHOLD, _LARGE_BYTES_BESIDE_ARENA)


@contextmanager
def release_large_blocks() -> Iterator[None]:
    """Return large blocks to the system inside the context, so that a step that runs once leaves no fragmented heap."""
    libc = _load_glibc()
    if libc is None or _returns_large_blocks:
        yield
        return
    libc.mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
    libc.malloc_trim(0)
    try:
        yield
    finally:
        libc.malloc_trim(0)
        keep_freed_blocks()


def keep_freed_blocks() -> None:
    """Make the C library keep freed blocks as it does by itself once one of 32 MB was freed, unless memory is tight.

    Until then it returns the end of its heap whenever twice the largest freed block is free there, as after evictions: a sixth of
    the time of a small GPT-2 at 40% of its peak went into pages that were taken again.
    """
    if not _returns_large_blocks and (libc := _load_glibc()) is not None:
        libc.mallopt(_MMAP_THRESHOLD, _MOST_MMAP_THRESHOLD_BYTES)
        libc.mallopt(_TRIM_THRESHOLD, 2 * _MOST_MMAP_THRESHOLD_BYTES)


@cache
def _load_glibc() -> ctypes.CDLL | None:
    """Return the C library; None if it is not glibc."""
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):
        return None
    return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") else None
