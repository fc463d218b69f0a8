"""Bandwidth of transfers between the device and the host, alone and during a step, measured with the plans' own channels.

Before, one constant of 25 GB/s stood for every machine. Rates are measured by the channels that plans use, alone and beside a
step, which slows them: on an H100 from 50 to 54 GB/s down to 23 to 32 GB/s.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from statistics import mean, median

import torch

from planner.capture.lowering.lower import Capture
from planner.measure.profile import MeasuredOp, find_distinct_ops, isolate_ops
from planner.runtime.transfers.channels import HostChannels
from planner.runtime.transfers.host_memory import HostTensor
from planner.runtime.transfers.transfers import Transfer
from planner.settings.link import LinkProfile, LinkRates

Compute = Callable[[], Iterator[None]]  # computes a step, and yields after each op

LARGE_BYTES, SMALL_BYTES = 2**25, 2**12  # the large copy takes far longer than its start, the small one hardly
_LEAST_COPIES, _MOST_COPIES, _SMALL_COPIES = 8, 256, 32  # consecutive copies
_LONGEST_S = 1.0


def link_during_step(capture: Capture, static: Sequence[torch.Tensor], step_s: float) -> LinkProfile:
    """Return the rates of the link between the host and the device of a step, alone and during the step.

    In each direction, copies of ``LARGE_BYTES`` run for about the time of the step, a second at most. For the second measurement,
    the step's ops are executed one at a time, as in profiling, until the copies have ended. Small copies then give the latency:
    their time beyond that of their bytes.
    """
    device = static[0].device
    channels = HostChannels(device, timed=True)
    compute = partial(_compute_step, find_distinct_ops(capture, static))
    large, small = (_Copies(channels, device, size_bytes) for size_bytes in (LARGE_BYTES, SMALL_BYTES))
    with isolate_ops(device):
        large.time_copies(2, out=True, back=True)  # first touch of the memory
        each_s = mean(large.time_copies(_LEAST_COPIES, out=True, back=False)[0])
        count = int(min(max(_LEAST_COPIES, min(step_s, _LONGEST_S) / each_s), _MOST_COPIES))
        alone, beside = (_compute_rates(large, count, computing) for computing in (None, compute))
        # The median of many: an interrupted copy takes milliseconds.
        out_s, in_s = (
            median(small.time_copies(_SMALL_COPIES, out=out, back=not out, compute=compute)[0]) for out in (True, False)
        )
    latency_s = max(0.0, out_s - SMALL_BYTES / beside.out_bytes_per_s, in_s - SMALL_BYTES / beside.in_bytes_per_s)
    return LinkProfile(alone, beside, latency_s)


def _compute_step(ops: Sequence[tuple[MeasuredOp, Sequence[int]]]) -> Iterator[None]:
    for measured, equal in ops:
        arguments = measured.build_arguments()
        for _ in equal:
            measured.run(*arguments)
            yield


def link_alone(device: torch.device) -> LinkRates:
    """Return the rates of the link between the host and `device` while nothing is computed."""
    large = _Copies(HostChannels(device, timed=True), device, LARGE_BYTES)
    with isolate_ops(device):
        large.time_copies(2, out=True, back=True)  # first touch of the memory
        return _compute_rates(large, _LEAST_COPIES, None)


def _compute_rates(large: "_Copies", count: int, compute: Compute | None) -> LinkRates:
    out, back, both = (
        LARGE_BYTES / max(map(mean, large.time_copies(count, out=to_host, back=to_device, compute=compute)))
        for to_host, to_device in ((True, False), (False, True), (True, True))
    )
    return LinkRates(out, back, both)


class _Copies:
    """Copies of one size in both directions, each with its own memory on the device and on the host."""

    def __init__(self, channels: HostChannels, device: torch.device, size_bytes: int) -> None:
        self._channels = channels
        self._sides = {out: self._allocate_both_sides(device, size_bytes) for out in (True, False)}

    def _allocate_both_sides(self, device: torch.device, size_bytes: int) -> tuple[torch.Tensor, HostTensor]:
        tensor = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
        host, copy = self._channels.offload(tensor)
        copy.finish()
        return tensor, host

    def time_copies(self, count: int, *, out: bool, back: bool, compute: Compute | None = None) -> list[list[float]]:
        """Return, for each direction, the seconds of `count` copies out, back, or both at once, during which `compute` runs."""
        copies: dict[bool, list[Transfer]] = {direction: [] for direction in (True, False) if (out, back)[not direction]}
        for _ in range(count + 1):
            for direction, issued in copies.items():
                issued.append(self._channels.copy_again(*self._sides[direction], out=direction))
        if compute is not None:
            _compute_until(compute, lambda: all(issued[-1].has_ended for issued in copies.values()))
        found = [[copy.measure_seconds_after(before) for before, copy in pairwise(issued)] for issued in copies.values()]
        for direction, issued in copies.items():
            for copy in issued:
                copy.finish() if direction else copy.wait_for_arrival(self._sides[direction][0])
        for _, host in self._sides.values():
            del host.bytes.copies[1:]
        return found


def _compute_until(compute: Compute, done: Callable[[], bool]) -> None:
    """Compute steps until, after an op, `done` returns True."""
    while True:
        for _ in compute():
            if done():
                return
