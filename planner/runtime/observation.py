"""Measurements in real training steps: op times in context, and the peak of a step. Bits do not change."""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from planner.profiling.allocator import MemoryRise, memory_rise
from planner.profiling.timing import typical
from planner.reserved import uses_libraries
from planner.runtime.code import Returned
from planner.runtime.executor import Executor
from planner.runtime.libraries import warm_up_libraries
from planner.torch_private.core import profiler_enabled

_Mark = float | torch.cuda.Event


class OpTimer:
    """A timer of the ops of an executor in its next steps, without synchronizing the device; then the executor is restored.

    Attributes:
        done: True once all steps have been timed.
    """

    def __init__(self, executor: Executor, *, steps: int) -> None:
        self.done = False
        self._executor, self._plain, self._device, self._left = executor, executor.code, executor.device, steps
        self._passes: list[list[tuple[int, _Mark]]] = []
        self._most_passes = 4 * steps  # some forward passes have no backward pass
        self._timed = executor.ticking(self._tick)
        executor.code = replace(self._timed, forward=self._forward, backward=self._backward)

    def times_s(self) -> dict[int, float]:
        """Return the typical seconds of each op."""
        found: dict[int, list[float]] = {}
        for marks in self._passes:
            for (_, before), (op, after) in pairwise(marks):
                found.setdefault(op, []).append(_seconds(before, after))
        return {op: typical(seconds, self._device) for op, seconds in found.items()}

    def stop(self) -> None:
        """Restore the executor."""
        self._executor.code = self._plain

    def _forward(self, static: Sequence[Any]) -> Returned:
        self._begin()
        return self._timed.forward(static)

    def _backward(self, static: Sequence[Any], alive: list[Any]) -> tuple[Any, ...]:
        self._begin()
        gradients = self._timed.backward(static, alive)
        self._left -= 1
        if self._left == 0:
            self.stop()
            self.done = True
        return gradients

    def _begin(self) -> None:
        if len(self._passes) == self._most_passes:
            self.stop()
            self.done = True
        self._passes.append([])
        self._tick(-1)

    def _tick(self, op: int) -> None:
        if self._device.type == "cuda":
            mark: _Mark = torch.cuda.Event(enable_timing=True)
            mark.record(torch.cuda.current_stream(self._device))  # type: ignore[union-attr]  # of the model's device
        else:
            mark = time.perf_counter()
        self._passes[-1].append((op, mark))


def _seconds(before: _Mark, after: _Mark) -> float:
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
        self._executor, self._plain, self._device = executor, executor.code, executor.device
        self._forward_rise = MemoryRise(0, 0)
        executor.code = replace(self._plain, forward=self._forward, backward=self._backward)

    def stop(self) -> None:
        """Restore the executor."""
        self._executor.code = self._plain
        self.done = True

    def _forward(self, static: Sequence[Any]) -> Returned:
        if self._device.type == "cpu" and profiler_enabled():  # only one can run
            self.stop()
            return self._plain.forward(static)
        self._executor.code = replace(self._plain, backward=self._backward)  # a second forward pass is not measured
        returned: list[Returned] = []
        if uses_libraries(self._executor.graph):
            warm_up_libraries(self._device)
        self._forward_rise = memory_rise(lambda: returned.append(self._plain.forward(static)), self._device)
        return returned[0]

    def _backward(self, static: Sequence[Any], alive: list[Any]) -> tuple[Any, ...]:
        self.stop()
        if self._device.type == "cpu" and profiler_enabled():
            return self._plain.backward(static, alive)
        returned: list[tuple[Any, ...]] = []
        rise = memory_rise(lambda: returned.append(self._plain.backward(static, alive)), self._device)
        arena = self._executor.arena
        taken_bytes = None if arena is None else arena.step_bytes
        if taken_bytes is None:
            taken_bytes = max(self._forward_rise.peak_bytes, self._forward_rise.end_bytes + rise.peak_bytes)
        self.peak_bytes = self._executor.graph.static_bytes + taken_bytes
        return returned[0]
