"""Measured time and workspace of each op of a captured step, on the device its model is on."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

import torch

from graphs.capture.program import Call, variable
from graphs.cost.allocator import Mark, segment_peaks
from graphs.cost.replay import RealStep, same_as
from graphs.cost.sensitivity import with_measured_variances
from graphs.ir import Graph, Op
from graphs.options.traced import may_be_exact, settled


def profile(real: RealStep, *, passes: int = 5) -> Graph:
    """The graph of what was captured, with measured times and workspaces.

    The whole step runs op by op, everything kept, `passes` times after one to warm up. An op's time,
    in context and with the views it makes and the frees behind it, is the median over the passes on
    CUDA and the minimum on the CPU, where a process that is interrupted waits for milliseconds; while
    the minima still fall by more than 3% in all, there are up to four times as many passes.
    Parameters, buffers and the random state are afterwards as they were. What optional ops make is compared with what the
    program makes, where they may be exact; how much the gradients change by lossy ones is measured (``graphs.cost.sensitivity``).

    Args:
        real: what was captured, with real sizes (``with_real_sizes``).
        passes: at least 1.
    """
    capture = real.capture
    run = real.compile(look=lambda _: "", at_end=True)
    with real.running():
        run(lambda: None)
        times = _typical_times(run, real.device, passes)
        peaks = segment_peaks(run, real.device)
        equal = _equal(real)
    ops: list[Op] = []
    time_s, peak_bytes = dict(zip(real.order, times, strict=True)), dict(zip(real.order, peaks, strict=False))
    program_op = same_as(capture)
    for op in capture.graph.ops:
        if (same := program_op.get(op.id)) is not None:
            ops.append(replace(op, time_s=ops[same].time_s, workspace_bytes=ops[same].workspace_bytes))
            continue
        outputs = sum(capture.graph.tensors[t].size_bytes for t in op.outputs)
        # After a recomputation, the generator's present state passes through a tensor of its own.
        state = capture.program.calls[op.id].random_state
        swap = 0 if state is None else capture.graph.tensors[state].size_bytes
        measured = replace(op, time_s=time_s[op.id], workspace_bytes=max(0, peak_bytes[op.id] - outputs, swap))
        ops.append(settled(capture, measured, equal[op.id]) if op.id in equal else measured)
    provenance = {
        **capture.graph.provenance,
        "times": "measured",
        "device": torch.cuda.get_device_name(real.device) if real.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "passes": passes,
    }
    measured_graph = Graph(tuple(ops), capture.graph.tensors, capture.graph.kept, provenance)
    return with_measured_variances(real, measured_graph)


def _equal(real: RealStep) -> dict[int, tuple[bool, ...]]:
    """For each optional op that may differ, whether each of its outputs is that of the program, to the last bit."""
    graph, calls = real.capture.graph, real.capture.program.calls
    found: dict[int, tuple[bool, ...]] = {}

    def compare(op: int, made: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
        found[op] = tuple(torch.equal(m, w) for m, w in zip(made, wanted, strict=True))

    def look(op: Op) -> str | None:
        call = calls[op.id]
        if not may_be_exact(op) or not isinstance(call, Call):
            return None
        return f"{op.id}, {call.expression}, ({''.join(f'{variable(t)}, ' for t in op.outputs)})"

    if any(may_be_exact(op) for op in graph.ops if op.optional):
        real.compile(look=look, at_end=False)(compare)
    return found


def _typical_times(run: Callable[[Mark], object], device: torch.device, passes: int) -> list[float]:
    """Seconds of each segment of `run`, typical of at least `passes` passes."""
    times = [_time_ops(run, device) for _ in range(passes)]
    if device.type == "cuda":
        return [median(segment) for segment in zip(*times, strict=True)]
    best, calm = list(map(min, zip(*times, strict=True))), False
    for _ in range(3 * passes):
        if calm:
            break
        better = list(map(min, best, _time_ops(run, device)))
        calm = sum(better) > 0.97 * sum(best)
        best = better
    return best


def _time_ops(run: Callable[[Mark], object], device: torch.device) -> list[float]:
    """Seconds of each segment of `run`."""
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True)]
        torch.cuda.synchronize(device)
        events[0].record()

        def mark() -> None:
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()

        run(mark)
        torch.cuda.synchronize(device)
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]
    ticks = [time.perf_counter()]
    run(lambda: ticks.append(time.perf_counter()))
    return [b - a for a, b in pairwise(ticks)]
