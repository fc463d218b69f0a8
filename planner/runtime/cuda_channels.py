"""Copies between a CUDA device and the host: a stream for each direction, events, page-locked memory.

Written with care, and not run on a GPU. What a copy uses on the device is held until the computation waits for it, so that
the allocator never sees memory that a copy still reads or fills, and no ``record_stream`` is needed.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from planner.capture.lowering.statics import allocated_bytes
from planner.runtime.host_memory import Copy, HostMemory
from planner.runtime.host_tensor import HostTensor, storage_bytes


class CudaChannels:
    """Channels of a CUDA device. Copies start no earlier than the present stream comes to where they are issued."""

    def __init__(self, device: torch.device, capacity_bytes: int | None = None, *, timed: bool = False) -> None:
        """With `capacity_bytes` of the host's memory, None for no limit; if `timed`, copies know when they ended."""
        self.memory = HostMemory(capacity_bytes, lock=partial(_page_locked, device))
        self._device, self._timed = device, timed
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._part = _Part()

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Inside, all is launched that a CUDA graph holds: copies begin in it, and have ended when it ends.

        A capture may wait for nothing that was launched before it, and the streams that it has reached must have come back to
        the one it began on. What was copied inside needs no waiting outside.
        """
        part = self._part = _Part()
        try:
            try:
                yield
            finally:
                present = torch.cuda.current_stream(self._device)
                for stream in part.reached:
                    present.wait_stream(stream)
        finally:
            part.over, self._part = True, _Part()

    def out(self, tensor: torch.Tensor, *after: "StreamCopy") -> tuple[HostTensor, "StreamCopy"]:
        """As ``Channels.out``."""
        source = storage_bytes(tensor)
        host = HostTensor(tensor, self.memory, allocated_bytes(len(source), tensor.device))
        events = [copy.event for copy in after if not copy.part.over]
        return host, self._copied(self._out, source, host.values, [*events, *_events(host.waits_for)], host, tensor)

    def back(self, host: HostTensor) -> tuple[torch.Tensor, "StreamCopy"]:
        """As ``Channels.back``."""
        tensor = host.on_device()
        made = _events(host.copies[:1])
        return tensor, self._copied(self._back, host.values, storage_bytes(tensor), made, host, tensor)

    def again(self, tensor: torch.Tensor, host: HostTensor, *, out: bool) -> "StreamCopy":
        """As ``Channels.again``."""
        here, there = storage_bytes(tensor), host.values
        if out:
            return self._copied(self._out, here, there, (), host, tensor)
        return self._copied(self._back, there, here, (), host, tensor)

    def wait(self, copy: "StreamCopy") -> None:
        """As ``Channels.wait``; the host goes on."""
        if not copy.part.over:
            torch.cuda.current_stream(self._device).wait_event(copy.event)
        copy.tensor = None

    def _copied(
        self,
        stream: torch.cuda.Stream,
        source: torch.Tensor,
        target: torch.Tensor,
        events: Iterable[torch.cuda.Event],
        host: HostTensor,
        tensor: torch.Tensor,
    ) -> "StreamCopy":
        present = torch.cuda.current_stream(self._device)
        stream.wait_stream(present)
        self._part.reached[stream] = None
        for event in events:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        event = stream.record_event(torch.cuda.Event(enable_timing=self._timed))
        host.copies.append(_OnStream(event, self._part))
        return StreamCopy(event, tensor, present, self._part)


class _Part:
    """What is launched without a CUDA graph, or in one.

    Attributes:
        reached: the streams that copies were issued on.
        over: it has ended, and the stream that computes has waited for its copies.
    """

    def __init__(self) -> None:
        self.reached: dict[torch.cuda.Stream, None] = {}
        self.over = False


class _OnStream:
    """A copy as the host's memory knows it, which holds nothing on the device."""

    def __init__(self, event: torch.cuda.Event, part: _Part) -> None:
        self.event, self.part = event, part

    def finish(self) -> None:
        """As ``Copy.finish``. What was captured is not there to be waited for: the device is, before memory goes."""
        if not self.part.over:
            self.event.synchronize()


class StreamCopy:
    """A copy as the computation knows it.

    Attributes:
        event: behind it.
        tensor: what it uses on the device, until somebody has waited for it.
        part: that it belongs to.
    """

    def __init__(self, event: torch.cuda.Event, tensor: torch.Tensor, computing: torch.cuda.Stream, part: _Part) -> None:
        """Of `tensor`, whose memory goes back to the stream `computing`."""
        self.event, self.part = event, part
        self.tensor: torch.Tensor | None = tensor
        self._computing = computing

    def finish(self) -> None:
        """As ``Copy.finish``: another thread needs what it makes. The computation still has to wait for it."""
        self.event.synchronize()

    @property
    def has_ended(self) -> bool:
        """As ``Issued.has_ended``."""
        return bool(self.event.query())

    def seconds_after(self, earlier: "StreamCopy") -> float:
        """As ``Issued.seconds_after``; of channels that are timed."""
        earlier.event.synchronize()
        self.event.synchronize()
        return float(earlier.event.elapsed_time(self.event)) / 1e3

    def __del__(self) -> None:
        # A step that was dropped half way: its memory is not to be used again before.
        if self.tensor is not None and not self.part.over:
            self._computing.wait_event(self.event)


def _events(copies: Iterable[Copy]) -> list[torch.cuda.Event]:
    return [copy.event for copy in copies if isinstance(copy, _OnStream) and not copy.part.over]


def _page_locked(device: torch.device, address: int, size_bytes: int) -> "partial[None]":
    """Page-lock memory, to the byte, which PyTorch's own allocator would round up to a power of two; returns what undoes it."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))
    return partial(_unlock, device, address)


def _unlock(device: torch.device, address: int) -> None:
    torch.cuda.synchronize(device)  # a copy may be under way where a step was dropped
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))
