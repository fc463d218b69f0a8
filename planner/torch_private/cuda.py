"""Private names of ``torch.cuda``: the allocator's recording, settings and failures."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# As PYTORCH_CUDA_ALLOC_CONF does, for what is reserved from then on.
set_allocator_settings = torch._C._accelerator_setAllocatorSettings


_CYCLES_PER_S = 2e9  # of a GPU, at most


def occupy_device(seconds: float) -> None:
    """Keep the current stream of the current CUDA device busy for about `seconds`, or longer."""
    torch.cuda._sleep(int(seconds * _CYCLES_PER_S))


def is_recording_memory() -> bool:
    """Return True if the allocator of CUDA devices is recorded, or cannot be."""
    is_enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return is_enabled is None or bool(is_enabled())


@contextmanager
def record_memory(device: torch.device) -> Iterator[list[dict[str, Any]]]:
    """Record the allocator inside; the list that is yielded has the actions on `device` afterwards."""
    trace: list[dict[str, Any]] = []
    torch.cuda.memory._record_memory_history("all", context=None, clear_history=True)
    try:
        yield trace
    finally:
        snapshot = torch.cuda.memory._snapshot(device)
        torch.cuda.memory._record_memory_history(None)
        index = torch.cuda.current_device() if device.index is None else device.index
        trace += snapshot["device_traces"][index]


def notify_out_of_memory(note: Callable[[int, int], object]) -> None:
    """Call ``note(index of the device, bytes asked for)`` from now on whenever the allocator of a CUDA device has no memory.

    This includes requests of libraries that then go on without.
    """
    attach = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]
    attach(lambda index, asked_bytes, *_: note(index, asked_bytes))


def allocate_raw(size_bytes: int, stream: torch.cuda.Stream) -> int:
    """Return the address of a new block of the caching allocator for work on `stream` of the current device."""
    return int(torch._C._cuda_cudaCachingAllocator_raw_alloc(size_bytes, stream.cuda_stream))


def free_raw(address: int) -> None:
    """Free a block from ``allocate_raw``."""
    torch._C._cuda_cudaCachingAllocator_raw_delete(address)
