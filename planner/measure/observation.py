"""Measurements in real training steps: op times in context, and the peak of a step. Bits do not change.

Times are taken by a clock on the CPU, and by events on CUDA: no step waits for the device, and events are on the stream of the
model's device. Libraries are warmed up before peaks are measured: workspaces of cuBLAS belong to a thread and a stream, and those
of the first backward pass were in the measured peak and not in the prediction. Known weakness: events of short kernels include
the time to launch them.
"""

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch

from planner.measure.timing import compute_typical
from planner.memory.reserved import needs_libraries
from planner.runtime.allocator import MemoryRise, measure_memory_rise
from planner.runtime.code import Backward, Forward, Returned
from planner.runtime.executor import Executor
from planner.runtime.libraries import warm_up_libraries
from planner.torch_private.core import profiler_enabled

T = TypeVar("T")
_Mark = float | torch.cuda.Event


class _Marks:
    """Times between the ops of passes. Passes in C++ hold this object, which therefore knows nothing of the executor.

    Attributes:
        passes: for each pass the ops with the times at which they ended; -1 begins.
    """

    def __init__(self, device: torch.device) -> None:
        self.passes: list[list[tuple[int, _Mark]]] = []
        self._device = device

    def record(self, op: int) -> None:
        """Record that an op has ended."""
        if self._device.type == "cuda":
            mark: _Mark = torch.cuda.Event(enable_timing=True)
            mark.record(torch.cuda.current_stream(self._device))  # type: ignore[union-attr]  # of the model's device
        else:
            mark = time.perf_counter()
        self.passes[-1].append((op, mark))


class OpTimer:
    """A timer of the ops of an executor in its next steps, without synchronizing the device; then the executor is restored.

    If the graph has host times, one more step follows without marks between ops, for the host's time of both passes.

    Attributes:
        done: True once all steps have been timed.
    """

    def __init__(self, executor: Executor, *, steps: int) -> None:
        self.done = False
        self._executor, self._device, self._left = executor, executor.device, steps
        self._marks = _Marks(executor.device)
        self._most_passes = 4 * steps  # some forward passes have no backward pass
        self._marks_ops, self._host_s = True, 0.0
        executor.observe(self, self._marks.record)

    def compute_times_s(self) -> dict[int, float]:
        """Return the typical seconds of each op, which sum to those of the passes."""
        found: dict[int, list[float]] = {}
        totals: dict[tuple[int, ...], list[float]] = {}  # of passes, by their ops
        for marks in self._marks.passes:
            seconds = [_compute_seconds(before, after) for (_, before), (_, after) in pairwise(marks)]
            ops = tuple(op for op, _ in marks[1:])
            totals.setdefault(ops, []).append(math.fsum(seconds))
            for op, each in zip(ops, seconds, strict=True):
                found.setdefault(op, []).append(each)
        times_s = {op: compute_typical(seconds, self._device) for op, seconds in found.items()}
        # An op is at its fastest in one step and another op in another: no pass is as fast as all at their fastest.
        sum_s = math.fsum(times_s[op] for ops in totals for op in ops)
        passes_s = math.fsum(compute_typical(seconds, self._device) for seconds in totals.values())
        scale = passes_s / sum_s if sum_s > 0 else 1.0
        return {op: seconds * scale for op, seconds in times_s.items()}

    def compute_host_scale(self) -> float:
        """Return the host's time of both passes as a multiple of what the ops' host times sum to; 1 if it was not measured."""
        ops = self._executor.graph.ops
        known_s = math.fsum(ops[op].host_s for op in self._executor.schedule.computed)
        return self._host_s / known_s if self._host_s and known_s else 1.0

    def stop(self) -> None:
        """Time no more steps."""
        self._executor.stop_observing(self)

    def run_forward(self, run: Forward, static: Sequence[Any]) -> Returned:
        """Run the forward pass, timed."""
        if not self._marks_ops:
            self._host_s = 0.0
            return self._time_host(lambda: run(static))
        self._begin()
        return run(static)

    def run_backward(self, run: Backward, static: Sequence[Any], saved: list[Any]) -> tuple[Any, ...]:
        """Run the backward pass, timed."""
        if not self._marks_ops:
            self.stop()
            self.done = True
            return self._time_host(lambda: run(static, saved))
        self._begin()
        gradients = run(static, saved)
        self._left -= 1
        if self._left == 0:
            self.stop()
            self.done = not self._executor.graph.has_host_times
            if not self.done:
                self._marks_ops = False
                self._executor.observe(self)
        return gradients

    def _time_host(self, run: Callable[[], T]) -> T:
        start = time.perf_counter()
        returned = run()
        self._host_s += time.perf_counter() - start
        return returned

    def _begin(self) -> None:
        if len(self._marks.passes) == self._most_passes:
            self.stop()
            self.done = True
        self._marks.passes.append([])
        self._marks.record(-1)


def _compute_seconds(before: _Mark, after: _Mark) -> float:
    if isinstance(before, float) or isinstance(after, float):
        assert isinstance(before, float) and isinstance(after, float)
        return after - before
    after.synchronize()
    return float(before.elapsed_time(after)) / 1e3


class PeakWatch:
    """A measurement of the peak of an executor's next step; then the executor is restored.

    Attributes:
        peak_bytes: the peak, static memory included; None until the step is over, and if the user's profiler runs.
        done: True once the measurement is over.
    """

    def __init__(self, executor: Executor) -> None:
        self.peak_bytes: int | None = None
        self.done = False
        self._executor, self._device = executor, executor.device
        self._forward_rise: MemoryRise | None = None
        executor.observe(self)

    def stop(self) -> None:
        """Measure no more."""
        self._executor.stop_observing(self)
        self.done = True

    def run_forward(self, run: Forward, static: Sequence[Any]) -> Returned:
        """Run the forward pass, measured if it is the first."""
        if self._forward_rise is not None:
            return run(static)
        if self._device.type == "cpu" and profiler_enabled():  # only one can run
            self.stop()
            return run(static)
        returned: list[Returned] = []
        if needs_libraries(self._executor.graph):
            warm_up_libraries(self._device)
        self._forward_rise = measure_memory_rise(lambda: returned.append(run(static)), self._device)
        return returned[0]

    def run_backward(self, run: Backward, static: Sequence[Any], saved: list[Any]) -> tuple[Any, ...]:
        """Run the backward pass, measured; the measurement is then over."""
        self.stop()
        if self._forward_rise is None or (self._device.type == "cpu" and profiler_enabled()):
            return run(static, saved)
        returned: list[tuple[Any, ...]] = []
        rise = measure_memory_rise(lambda: returned.append(run(static, saved)), self._device)
        self.peak_bytes = self._compute_peak(self._forward_rise, rise)
        return returned[0]

    def _compute_peak(self, forward: MemoryRise, backward: MemoryRise) -> int:
        """Return the peak of a step by the rises of its passes, or by the arena that it runs in."""
        arena = self._executor.arena
        taken_bytes = None if arena is None else arena.step_bytes
        if taken_bytes is None:
            taken_bytes = max(forward.peak_bytes, forward.end_bytes + backward.peak_bytes)
        return self._executor.graph.static_bytes + taken_bytes
