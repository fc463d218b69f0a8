"""Seconds of one execution of an op, and those of a typical one."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TypeVar

import torch

T = TypeVar("T")


def time_call(run: Callable[..., T], arguments: Sequence[torch.Tensor], device: torch.device) -> tuple[float, float, T]:
    """Return the seconds of one execution on `device`, those in which the host issued it (0 on the CPU), and its results."""
    if device.type == "cuda":
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(device)  # else an event is recorded on the current device's stream
        first.record(stream)
        start = time.perf_counter()
        made = run(*arguments)
        issued_s = time.perf_counter() - start
        last.record(stream)
        torch.cuda.synchronize(device)
        return float(first.elapsed_time(last)) / 1e3, issued_s, made
    start = time.perf_counter()
    made = run(*arguments)
    return time.perf_counter() - start, 0.0, made


def compute_typical(times_s: Sequence[float], device: torch.device) -> float:
    """Return the typical one of several times: the minimum on the CPU, where interruptions only add, and the median on CUDA."""
    return median(times_s) if device.type == "cuda" else min(times_s)
