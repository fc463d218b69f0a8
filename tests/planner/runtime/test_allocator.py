"""Events of the allocator are those of the measured function alone; its messages are recognized, and their sizes read."""

import errno
import gc

import numpy as np
import pytest
import torch

from planner.graphs.errors import CopyError
from planner.runtime.allocator import measure_cuda_context_bytes, record_cpu_allocations
from planner.runtime.allocator_failure import find_allocator_failure


def test_earlier_garbage_is_not_recorded() -> None:
    def leave() -> None:
        cycle: list[object] = [torch.ones(1000)]  # what no profiler has seen come is not seen to go
        cycle.append(cycle)

    record_cpu_allocations(leave)

    def run() -> None:
        if gc.isenabled():
            gc.collect()  # as it may at any moment
        torch.ones(10)

    assert [event.size_bytes for event in record_cpu_allocations(run)] == [40, -40]
    assert gc.isenabled()


def test_context_is_used_memory_beyond_reserved_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 22)
    assert measure_cuda_context_bytes(torch.device("cuda")) == 8


CPU = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 4194304 "
    "bytes. Error code 12 (Cannot allocate memory)"
)
WINDOWS = "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried to allocate 4000 bytes."
CUDA = "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.19 GiB is free."
RUNTIME = "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"


@pytest.mark.parametrize(
    ("error", "asked_bytes", "message"),
    [
        (RuntimeError(CPU), 4194304, "DefaultCPUAllocator: can't allocate memory"),
        (RuntimeError(WINDOWS), 4000, "DefaultCPUAllocator: not enough memory"),
        (RuntimeError("std::bad_alloc"), None, "std::bad_alloc"),
        (MemoryError(), None, "MemoryError"),
        (MemoryError("std::bad_alloc"), None, "std::bad_alloc"),
        (torch.OutOfMemoryError(CUDA), 3 * 2**29, "CUDA out of memory. Tried to allocate 1.50 GiB"),
        (torch.cuda.OutOfMemoryError("HIP out of memory. Tried to allocate 512.00 MiB."), 2**29, "HIP out of memory."),
        (RuntimeError(CUDA), 3 * 2**29, "CUDA out of memory."),
        (RuntimeError("XPU out of memory. Tried to allocate 20.00 KiB. GPU 0 has"), 20 * 2**10, "XPU out of memory."),
        (RuntimeError(RUNTIME), None, "CUDA error: out of memory"),  # of page-locked memory too
        (torch.AcceleratorError(RUNTIME), None, "CUDA error: out of memory"),
        (RuntimeError("cudaErrorMemoryAllocation: out of memory"), None, "cudaErrorMemoryAllocation"),
        (RuntimeError("out of memory (2)"), None, "out of memory (2)"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), None, "CUBLAS_STATUS_ALLOC"),
        (RuntimeError("could not execute a primitive"), None, "could not execute a primitive"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), None, "Cannot allocate memory"),
    ],
)
def test_a_message_of_an_allocator(error: Exception, asked_bytes: int | None, message: str) -> None:
    found = find_allocator_failure(error)
    assert found.asked_bytes == asked_bytes
    assert found.message.startswith(message)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        RuntimeError("could not create a primitive descriptor for a convolution"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("the plan tried to allocate 5 bytes"),
        ValueError("std::bad_alloc"),
        OSError(errno.ENOSPC, "No space left on device"),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_are_not_allocator_failures(error: BaseException) -> None:
    assert find_allocator_failure(error) is None


def test_failures_of_torch_and_numpy_allocators_are_recognized() -> None:
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(2**58, dtype=torch.uint8)
    found = find_allocator_failure(of_torch.value)
    assert found.asked_bytes == 2**58
    with pytest.raises(MemoryError) as of_numpy:
        np.empty(2**58, dtype=np.uint8)
    found = find_allocator_failure(of_numpy.value)
    assert found.asked_bytes == 2**58


def test_a_cause_is_found_and_a_context_is_none() -> None:
    wrapped = CopyError("a copy failed")
    wrapped.__cause__ = RuntimeError(CPU)
    found = find_allocator_failure(wrapped)
    assert found.asked_bytes == 4194304
    beside = CopyError("a copy failed")
    beside.__context__ = RuntimeError(CPU)
    assert find_allocator_failure(beside) is None
