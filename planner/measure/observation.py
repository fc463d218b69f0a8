"""Measurements in real training steps: op times in context, and the peak of a step. Bits do not change.

Times are taken by a clock on the CPU, and by events on CUDA: no step waits for the device, and events are on the stream of the
model's device. Libraries are warmed up before peaks are measured: workspaces of cuBLAS belong to a thread and a stream, and those
of the first backward pass were in the measured peak and not in the prediction. Known weakness: events of short kernels include
the time to launch them.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch

from planner.graphs.ir import Graph
from planner.graphs.provenance import Times
from planner.measure.timing import compute_typical
from planner.memory.reserved import needs_libraries
from planner.runtime.allocator import MemoryRise, measure_memory_rise
from planner.runtime.code import Backward, Forward, Returned
from planner.runtime.executor import Executor
from planner.runtime.libraries import warm_up_libraries
from planner.torch_private.core import at_end_of_backward, profiler_enabled

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
        self.passes[-1].append((op, self.make()))

    def make(self) -> _Mark:
        """Return the present time on the model's device."""
        if self._device.type != "cuda":
            return time.perf_counter()
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(torch.cuda.current_stream(self._device))
        return mark


@dataclass(slots=True)
class _TimedStep:
    """The times of a step.

    Attributes:
        passes: for each pass, its first and its last mark.
        host_s: seconds of both by the host's clock.
        around_s: seconds of the host before and after each of them.
    """

    passes: list[tuple[_Mark, _Mark]] = field(default_factory=list)
    host_s: float = 0.0
    around_s: float = 0.0

    @property
    def passes_s(self) -> float:
        """Seconds of both passes."""
        return math.fsum(_compute_seconds(*ends) for ends in self.passes)


class OpTimer:
    """A timer of the ops of an executor in its next steps, without synchronizing the device; then the executor is restored.

    One more step follows without marks between ops, each of which takes a microsecond. The time of the passes, that of the host
    in them, and that around them are those of the fastest step. Known weaknesses: what autograd takes until it reaches the step
    is not seen, and what follows the step in a backward pass counts as its own.

    Attributes:
        done: True once all steps have been timed.
    """

    def __init__(self, executor: Executor, *, steps: int) -> None:
        self.done = False
        self._executor, self._device, self._left = executor, executor.device, steps
        self._marks = _Marks(executor.device)
        self._most_passes = 4 * steps  # some forward passes have no backward pass
        self._step: _TimedStep | None = None  # since its forward pass
        self._steps: list[_TimedStep] = []
        executor.observe(self, self._marks.record)

    def compute_times_s(self) -> dict[int, float]:
        """Return the typical seconds of each op, which sum to those of the passes."""
        found: dict[int, list[float]] = {}
        for marks in self._marks.passes:
            for (_, before), (op, after) in pairwise(marks):
                found.setdefault(op, []).append(_compute_seconds(before, after))
        times_s = {op: compute_typical(seconds, self._device) for op, seconds in found.items()}
        # An op is at its fastest in one step and another op in another: no pass is as fast as all at their fastest.
        sum_s = math.fsum(times_s.get(op, 0.0) for op in self._executor.schedule.computed)
        scale = self._find_fastest().passes_s / sum_s if self._steps and sum_s else 1.0
        return {op: seconds * scale for op, seconds in times_s.items()}

    def correct_costs(self, graph: Graph) -> Graph:
        """Return `graph` with the measured times; those of ops that were not executed are scaled by the same factor."""
        if not self._steps:
            return graph
        ran, fastest = self._executor, self._find_fastest()
        times_s = {ran.graph.ops[op].name: seconds for op, seconds in self.compute_times_s().items()}
        host_s = math.fsum(ran.graph.ops[op].host_s for op in ran.schedule.computed)
        return set_times(graph, times_s, host_scale=fastest.host_s / host_s if host_s else 1.0, around_s=fastest.around_s)

    def _find_fastest(self) -> _TimedStep:
        return min(self._steps, key=lambda step: step.passes_s + step.around_s)

    def stop(self) -> None:
        """Time no more steps."""
        self._executor.stop_observing(self)

    def run_forward(self, run: Forward, static: Sequence[Any]) -> Returned:
        """Run the forward pass, timed."""
        self._step = _TimedStep()
        return self._time(self._step, lambda: run(static))

    def run_backward(self, run: Backward, static: Sequence[Any], saved: list[Any]) -> tuple[Any, ...]:
        """Run the backward pass, timed."""
        step, self._step = self._step, None
        if step is None:  # its forward pass was another step's, or it runs twice
            return run(static, saved)
        step.around_s += self._executor.left_s
        gradients = self._time(step, lambda: run(static, saved))
        at_end_of_backward(partial(self._end_step, step))
        return gradients

    def _time(self, step: _TimedStep, run: Callable[[], T]) -> T:
        if self._left:
            self._begin_marks()
        start_s, first = time.perf_counter(), self._marks.make()
        returned = run()
        step.passes.append((first, self._marks.make()))
        end_s = time.perf_counter()
        step.host_s += end_s - start_s
        step.around_s += start_s - self._executor.entered_s - end_s  # until the step is left, which is added then
        return returned

    def _begin_marks(self) -> None:
        if len(self._marks.passes) == self._most_passes:
            self.stop()
            self.done = True
        self._marks.passes.append([])
        self._marks.record(-1)

    def _end_step(self, step: _TimedStep) -> None:
        step.around_s += time.perf_counter()
        self._steps.append(step)
        self._left -= 1
        if self._left <= 0:
            self.stop()
            self.done |= self._left < 0
        if self._left == 0 and not self.done:
            self._executor.observe(self)


def set_times(graph: Graph, times_s: Mapping[str, float], *, host_scale: float = 1.0, around_s: float = 0.0) -> Graph:
    """Return `graph` with `times_s` by op name; times of ops that were not executed are scaled by the same factor."""
    known_s = math.fsum(op.time_s for op in graph.ops if op.name in times_s)
    scale = math.fsum(times_s.values()) / known_s if known_s > 0 else 1.0
    ops = tuple(replace(op, time_s=times_s.get(op.name, op.time_s * scale), host_s=op.host_s * host_scale) for op in graph.ops)
    provenance = graph.provenance.record(times=Times.IN_STEPS)
    return replace(graph, ops=ops, provenance=provenance, around_s=around_s)


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
