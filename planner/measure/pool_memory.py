"""Measured peaks of a step in its device's memory, and of a placed step in that of other devices."""

from collections.abc import Callable
from dataclasses import replace

import torch

from planner.capture.frontend.preserved_state import preserve_training_state
from planner.capture.lowering.lower import Capture
from planner.capture.replay import collect_written_tensors
from planner.capture.signature import Batch
from planner.capture.step import TrainingStep
from planner.graphs.pools import HOST
from planner.measure.steps import Isolated, MemoryUse, Step, measure_memory, run_both
from planner.runtime.allocator import Allocation, compute_rise, measure_memory_rise, record_cpu_allocations
from planner.runtime.executor import Executor


def measure_peak(captured: Capture, executor: Step, step: TrainingStep, batch: Batch) -> MemoryUse:
    """Return the memory of one run of `executor` with real tensors; the captured `step` and `batch` are restored.

    For a step in an arena the run is recorded, and the peak is that of the following steps.
    """
    # Autograd makes the gradient of the loss while the step runs: it is measured.
    tangent = sum(captured.graph.tensors[s.tensor].size_bytes for s in captured.program.sources if s.is_tangent)
    with preserve_training_state(step, batch, written=collect_written_tensors(captured, step, batch)):
        device = next(step.parameters()).device
        isolated = Isolated(executor, step, batch)
        memory = measure_memory(isolated, batch, static_bytes=captured.graph.static_bytes - tangent, device=device)
    arena = executor.arena if isinstance(executor, Executor) else None
    if arena is None or arena.step_bytes is None:
        return memory
    return replace(memory, peak_bytes=captured.graph.static_bytes + arena.step_bytes)


def measure_other_peaks(captured: Capture, executor: Executor, step: TrainingStep, batch: Batch) -> dict[str, int]:
    """Return the peak bytes in a step of each pool except the main device's, by name; empty if there are no others.

    The host memory counts itself. Any other pool is measured in its own run: allocations are seen in the device's thread, by one
    profiler at a time.
    """
    devices, found = executor.devices, dict[str, int]()
    if len(devices.pools) > 1:
        record_cpu_allocations(lambda: None)  # the profiler starts in this thread, or raises
    isolated = Isolated(executor, step, batch)
    with preserve_training_state(step, batch, written=collect_written_tensors(captured, step, batch)):
        for pool in devices.pools[1:]:
            place = devices.places[pool.name]
            measure = _measure_cuda_peak if place.type == "cuda" else _measure_cpu_peak
            found[pool.name] = measure(executor, pool.name, place, lambda: run_both(isolated, batch))
    return found if devices.host is None else {**found, HOST: devices.host.peak_bytes}


def _measure_cpu_peak(executor: Executor, pool: str, place: torch.device, run: Callable[[], object]) -> int:
    del place
    events: list[Allocation] = []
    with executor.devices.watch_pool(pool, lambda part: events.extend(record_cpu_allocations(part))):
        run()
    return compute_rise(events)


def _measure_cuda_peak(executor: Executor, pool: str, place: torch.device, run: Callable[[], object]) -> int:
    del executor, pool
    run()  # libraries allocate their workspaces for the device's thread
    return measure_memory_rise(run, place).peak_bytes
