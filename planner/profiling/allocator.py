"""Memory that the allocator provides while a function runs: tensors and workspaces, on the CPU and on CUDA."""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.autograd.profiler import profile, record_function

# Called by the measured function where one segment ends and the next begins.
Mark = Callable[[], None]

_MARK = "planner::mark"


@dataclass(frozen=True, slots=True)
class Allocation:
    """One event of the CPU allocator: bytes allocated (positive) or freed (negative), or a mark (None)."""

    time_ns: int
    size_bytes: int | None


def cpu_allocations(run: Callable[[Mark], object]) -> list[Allocation]:
    """Return all events of PyTorch's CPU allocator while `run` runs, in order, with the marks that it sets."""

    def mark() -> None:
        with record_function(_MARK):
            pass

    with _quiet_kineto(), no_collection(), profile(profile_memory=True, use_kineto=True) as profiler:
        run(mark)
    events = []
    for event in profiler.kineto_results.events():
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
            events.append(Allocation(event.start_ns(), event.nbytes()))
        elif event.name() == _MARK:
            events.append(Allocation(event.start_ns(), None))
    return sorted(events, key=lambda event: event.time_ns)


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable Python's collection of cycles, whose memory would be freed at any moment."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Keep the profiler from writing its log to stderr; it reads its log level when first used."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "6")  # above every level
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


def segment_peaks(run: Callable[[Mark], object], device: torch.device) -> list[int]:
    """Return the bytes by which memory rises above its level at the start of each segment of `run`.

    A segment ends at each mark; the last one at the end of the run.
    """
    if device.type == "cuda":
        with no_collection():
            return _cuda_segment_peaks(run, device)
    peaks, level, peak = [], 0, 0
    for event in cpu_allocations(run):
        if event.size_bytes is None:
            peaks.append(peak)
            level = peak = 0
        else:
            level += event.size_bytes
            peak = max(peak, level)
    return [*peaks, peak]


def _cuda_segment_peaks(run: Callable[[Mark], object], device: torch.device) -> list[int]:
    peaks: list[int] = []
    start = 0

    def mark() -> None:
        nonlocal start
        peaks.append(torch.cuda.max_memory_allocated(device) - start)
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)

    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = torch.cuda.memory_allocated(device)
    run(mark)
    mark()
    return peaks
