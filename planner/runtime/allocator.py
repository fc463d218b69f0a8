"""Memory that the allocator provides while a function runs: tensors and workspaces, on the CPU and on CUDA.

Python's collector of cycles waits while memory is measured. It gave back what earlier measurements had left, and in one of a
hundred plans of a small net the peak came out a few bytes too low. On CUDA bytes count as they were asked for: the allocator's
own count has up to 1 MiB more for a block that was not split.
"""

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.autograd.profiler import profile, record_function

from planner.graphs.requests import WORKSPACE, MemoryRequest
from planner.torch_private.core import list_profiled
from planner.torch_private.cuda import is_recording_memory, record_memory

# Called by the measured function where one segment ends and the next begins.
Mark = Callable[[], None]

_MARK = "planner::mark"


@dataclass(frozen=True, slots=True)
class Allocation:
    """One event of an allocator: bytes allocated (positive) or freed (negative), and their address."""

    time_ns: int
    size_bytes: int
    address: int


def _mark() -> None:
    with record_function(_MARK):
        pass


def record_cpu_segments(run: Callable[[Mark], object]) -> list[list[Allocation]]:
    """Return all events of PyTorch's CPU allocator while `run` runs, in order: those before the first mark that it sets, ..."""
    with _silence_kineto(), disable_collection(), profile(profile_memory=True, use_kineto=True) as profiler:
        run(_mark)
    found: list[list[Allocation]] = [[]]
    for time_ns, name, size_bytes, address in list_profiled(profiler):
        if name == _MARK:
            found.append([])
        elif not name:
            found[-1].append(Allocation(time_ns, size_bytes, address))
    return found


def record_cpu_allocations(run: Callable[[], object]) -> list[Allocation]:
    """Return all events of PyTorch's CPU allocator while `run` runs, in order."""
    (found,) = record_cpu_segments(lambda _: run())
    return found


@dataclass(frozen=True, slots=True)
class MemoryRise:
    """The memory in use during a run, above what was in use when it began.

    Attributes:
        peak_bytes: the most.
        end_bytes: at the end.
        timeline: (seconds, bytes) after each event of the CPU allocator; empty on CUDA.
    """

    peak_bytes: int
    end_bytes: int
    timeline: tuple[tuple[float, int], ...] = ()


def measure_memory_rise(run: Callable[[], object], device: torch.device) -> MemoryRise:
    """Run `run`, and return the rise of the memory in use on `device`: its peak, end and, on the CPU, timeline."""
    if device.type == "cuda":
        with disable_collection():
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = get_cuda_bytes(device)
            run()
            torch.cuda.synchronize(device)
            return MemoryRise(get_cuda_peak_bytes(device) - before, get_cuda_bytes(device) - before)
    events = record_cpu_allocations(run)
    levels = list(accumulate((event.size_bytes for event in events), initial=0))
    seconds = ((event.time_ns - events[0].time_ns) / 1e9 for event in events)
    return MemoryRise(max(levels), levels[-1], tuple(zip(seconds, levels[1:], strict=True)))


@contextmanager
def disable_collection() -> Iterator[None]:
    """Disable Python's collection of cycles, whose memory would be freed at any moment."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _silence_kineto() -> Iterator[None]:
    """Keep the profiler from writing its log to stderr; it reads its log level when first used."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "6")  # above every level
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


def get_cuda_bytes(device: torch.device) -> int:
    """Return the bytes that are in use on a CUDA device, as they were asked for.

    ``torch.cuda.memory_allocated`` counts whole blocks: what it says of the same tensors depends on which blocks were free, since
    up to 1 MiB of a block is not split off.
    """
    return int(torch.cuda.memory_stats(device)["requested_bytes.all.current"])


def measure_cuda_context_bytes(device: torch.device) -> int:
    """Return the bytes of a CUDA device that PyTorch's allocator cannot have: its context, loaded kernels, other processes."""
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device))


@contextmanager
def limit_allocator(device: torch.device, size_bytes: int) -> Iterator[None]:
    """Inside, PyTorch's allocator reserves at most `size_bytes` of a CUDA device, or less where the process had less."""
    _, total_bytes = torch.cuda.mem_get_info(device)
    before = torch.cuda.get_per_process_memory_fraction(device)
    if torch.cuda.memory_reserved(device) > size_bytes:
        torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(before, size_bytes / total_bytes), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def get_cuda_peak_bytes(device: torch.device) -> int:
    """Return the most bytes that were in use on a CUDA device since ``torch.cuda.reset_peak_memory_stats``, as asked for."""
    return int(torch.cuda.memory_stats(device)["requested_bytes.all.peak"])


def record_cuda_requests(run: Callable[[], Sequence[torch.Tensor | None]], device: torch.device) -> tuple[MemoryRequest, ...]:
    """Return the requests that `run`, which returns the outputs of an op, makes for memory of a CUDA device, in their order.

    They are empty if somebody records the allocator already, who would lose that, or if PyTorch cannot say.
    """
    if is_recording_memory():
        return ()
    with disable_collection(), record_memory(device) as trace:
        outputs = run()
        torch.cuda.synchronize(device)
    signs = {"alloc": 1, "free_completed": -1}
    events = [Allocation(0, signs[each["action"]] * each["size"], each["addr"]) for each in trace if each["action"] in signs]
    return collect_requests(events, find_addresses(outputs))


def find_addresses(outputs: Iterable[object]) -> dict[int, int]:
    """Return the positions of those of `outputs` that are tensors, by the addresses of their memory; zeros may have none."""
    tensors = ((i, value) for i, value in enumerate(outputs) if isinstance(value, torch.Tensor) and not value._is_zerotensor())
    return {value.untyped_storage().data_ptr(): i for i, value in tensors}


def collect_requests(events: Iterable[Allocation], outputs: Mapping[int, int]) -> tuple[MemoryRequest, ...]:
    """Return the requests of an op from the events of the allocator; `outputs` has positions by address.

    What stays and is no output belongs to a library, which asks for it once.
    """
    found: list[MemoryRequest | None] = []
    held: dict[int, tuple[int, int]] = {}
    for event in events:
        if event.size_bytes > 0:
            held[event.address] = len(found), event.size_bytes
            found.append(None)
        elif event.address in held:
            place, size_bytes = held.pop(event.address)
            found[place] = MemoryRequest(WORKSPACE, size_bytes, len(found))
    for address, (place, _) in held.items():
        if address in outputs:
            found[place] = MemoryRequest(outputs[address])
    kept = [place for place, request in enumerate(found) if request is not None]
    return tuple(
        request._replace(until=sum(place < request.until for place in kept)) if request.output == WORKSPACE else request
        for request in found
        if request is not None
    )


def add_state_requests(requests: Sequence[MemoryRequest], state_bytes: int) -> tuple[MemoryRequest, ...]:
    """Return the `requests` of a random op between two for states of its generator, which recomputation saves and restores."""
    if not state_bytes or not requests:
        return tuple(requests)
    later = (each._replace(until=each.until + (each.output == WORKSPACE)) for each in requests)
    before, after = (MemoryRequest(WORKSPACE, state_bytes, until) for until in (1, len(requests) + 2))
    return (before, *later, after)


def measure_segment_peaks(run: Callable[[Mark], object], device: torch.device) -> list[int]:
    """Return the bytes by which memory rises above its level at the start of each segment of `run`.

    A segment ends at each mark; the last one at the end of the run.
    """
    if device.type == "cuda":
        with disable_collection():
            return _measure_cuda_segment_peaks(run, device)
    return [compute_rise(events) for events in record_cpu_segments(run)]


def compute_rise(events: Iterable[Allocation]) -> int:
    """Return the most bytes in use above those before `events`."""
    return max(accumulate((event.size_bytes for event in events), initial=0))


def _measure_cuda_segment_peaks(run: Callable[[Mark], object], device: torch.device) -> list[int]:
    peaks: list[int] = []
    start = 0

    def mark() -> None:
        nonlocal start
        peaks.append(get_cuda_peak_bytes(device) - start)
        torch.cuda.reset_peak_memory_stats(device)
        start = get_cuda_bytes(device)

    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = get_cuda_bytes(device)
    run(mark)
    mark()
    return peaks
