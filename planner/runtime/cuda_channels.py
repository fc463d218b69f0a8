"""Transfers between a CUDA device and the host: a stream for each direction, events, and page-locked memory.

Not tested on a GPU. The device memory of a copy is held until the computation waits for the copy: the allocator thus never reuses
memory that is still read or written, and no ``record_stream`` is needed.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from planner.capture.lowering.statics import allocated_bytes
from planner.runtime.host_memory import Copy, HostMemory
from planner.runtime.host_tensor import HostTensor, storage_bytes


class CudaChannels:
    """Channels of a CUDA device. Copies start after the work already issued on the current stream."""

    def __init__(self, device: torch.device, capacity_bytes: int | None = None, *, timed: bool = False) -> None:
        """Initialize with `capacity_bytes` of host memory, None for no limit; if `timed`, copies record when they end."""
        self.memory = HostMemory(capacity_bytes, lock=partial(_page_locked, device))
        self._device, self._timed = device, timed
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._part = _Part()

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Collect the copies of a CUDA graph capture: they start inside the context, and are joined at its end.

        A capture may not wait for work launched before it, and the streams that it uses must be joined to the capturing stream.
        Copies made inside need no waiting outside.
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
        """Issue a copy to the host; see ``Channels.out``."""
        source = storage_bytes(tensor)
        host = HostTensor(tensor, self.memory, allocated_bytes(len(source), tensor.device))
        events = [copy.event for copy in after if not copy.part.over]
        return host, self._copied(self._out, source, host.values, [*events, *_events(host.waits_for)], host, tensor)

    def back(self, host: HostTensor) -> tuple[torch.Tensor, "StreamCopy"]:
        """Issue a copy to the device; see ``Channels.back``."""
        tensor = host.on_device()
        made = _events(host.copies[:1])
        return tensor, self._copied(self._back, host.values, storage_bytes(tensor), made, host, tensor)

    def again(self, tensor: torch.Tensor, host: HostTensor, *, out: bool) -> "StreamCopy":
        """Issue a copy without allocation; see ``Channels.again``."""
        here, there = storage_bytes(tensor), host.values
        if out:
            return self._copied(self._out, here, there, (), host, tensor)
        return self._copied(self._back, there, here, (), host, tensor)

    def wait(self, copy: "StreamCopy") -> None:
        """Make the current stream wait for `copy`, without blocking the host; see ``Channels.wait``."""
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
    """Copies launched outside a CUDA graph, or within one.

    Attributes:
        reached: streams with issued copies.
        over: True if it has ended, and the computation has waited for its copies.
    """

    def __init__(self) -> None:
        self.reached: dict[torch.cuda.Stream, None] = {}
        self.over = False


class _OnStream:
    """A copy as seen by the host memory; holds nothing on the device."""

    def __init__(self, event: torch.cuda.Event, part: _Part) -> None:
        self.event, self.part = event, part

    def finish(self) -> None:
        """Wait for the copy; see ``Copy.finish``. Captured copies are skipped: the device is synchronized before memory is
        freed.
        """
        if not self.part.over:
            self.event.synchronize()


class StreamCopy:
    """A copy as seen by the computation.

    Attributes:
        event: recorded after the copy.
        tensor: its tensor on the device, held until the copy is waited for.
        part: the part of the pass that it belongs to.
    """

    def __init__(self, event: torch.cuda.Event, tensor: torch.Tensor, computing: torch.cuda.Stream, part: _Part) -> None:
        """Initialize the copy of `tensor`, whose memory returns to the stream `computing`."""
        self.event, self.part = event, part
        self.tensor: torch.Tensor | None = tensor
        self._computing = computing

    def finish(self) -> None:
        """Wait for the copy on the host, for another thread; see ``Copy.finish``. The computation still has to wait for it."""
        self.event.synchronize()

    @property
    def has_ended(self) -> bool:
        """True if the copy has finished; see ``Issued.has_ended``."""
        return bool(self.event.query())

    def seconds_after(self, earlier: "StreamCopy") -> float:
        """Return the seconds since the end of `earlier`, for timed channels; see ``Issued.seconds_after``."""
        earlier.event.synchronize()
        self.event.synchronize()
        return float(earlier.event.elapsed_time(self.event)) / 1e3

    def __del__(self) -> None:
        # For steps that were dropped halfway: their memory must not be reused before the copy ends.
        if self.tensor is not None and not self.part.over:
            self._computing.wait_event(self.event)


def _events(copies: Iterable[Copy]) -> list[torch.cuda.Event]:
    return [copy.event for copy in copies if isinstance(copy, _OnStream) and not copy.part.over]


def _page_locked(device: torch.device, address: int, size_bytes: int) -> "partial[None]":
    """Page-lock memory in place, without rounding to a power of two as PyTorch does; return the function that unlocks it."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))
    return partial(_unlock, device, address)


def _unlock(device: torch.device, address: int) -> None:
    torch.cuda.synchronize(device)  # a copy may be under way if a step was dropped
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))
