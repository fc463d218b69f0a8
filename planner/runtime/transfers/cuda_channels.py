"""Transfers from and to CUDA devices: a stream for each channel, events, and page-locked memory of the host.

A copy is launched by the thread that gives its second end. The device memory of either end is held until the
computation there waits for the copy: the allocator thus never reuses memory that is still read or written, and no
``record_stream`` is needed.

What the host's memory knows of a copy holds nothing on the device: when it held the copy itself, tensors of a step that was
dropped half way stayed on the device until their buffer on the host was used again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from planner.runtime.transfers.host_memory import Copy, HostMemory
from planner.runtime.transfers.transfers import PoolMemory, Transfer


class StreamChannel:
    """A channel with a stream. Copies start after the work already issued on the current stream of either end.

    Attributes:
        part: the CUDA graph that copies are captured in, or what is launched outside.
    """

    def __init__(self, name: str, device: torch.device, target: PoolMemory, *, timed: bool = False) -> None:
        """Initialize a channel called `name` to the memory `target`, with a stream of `device`; if `timed`, copies record when
        they end.
        """
        self._name, self._target, self.timed = name, target, timed
        self.stream, self.part = torch.cuda.Stream(device), _LaunchedCopies()

    def transfer(self, look: Callable[[], object] = lambda: None) -> "StreamTransfer":
        """Return a transfer that is not started; long waits for it call `look`, which may raise."""
        return StreamTransfer(self._name, self._target, look, self)


@contextmanager
def capture_copies(channels: Sequence[StreamChannel]) -> Iterator[None]:
    """Collect the copies of a CUDA graph capture: they start inside the context, and are joined at its end.

    A capture may not wait for work launched before it, and the streams that it uses must be joined to the capturing stream.
    Copies made inside need no waiting outside.
    """
    part = _LaunchedCopies()
    for channel in channels:
        channel.part = part
    try:
        yield
    finally:
        for channel in channels:
            channel.part = _LaunchedCopies()
            if channel.stream in part.reached:
                computing = torch.cuda.current_stream(channel.stream.device)
                computing.wait_stream(channel.stream)
        part.over = True


class _LaunchedCopies:
    """Copies launched outside a CUDA graph, or within one.

    Attributes:
        reached: streams with issued copies.
        over: True if it has ended, and the computation has waited for its copies.
    """

    def __init__(self) -> None:
        self.reached: set[torch.cuda.Stream] = set()
        self.over = False


class _Launched:
    """A copy that was launched, as seen by others; holds nothing on the device."""

    def __init__(self, event: torch.cuda.Event, part: _LaunchedCopies) -> None:
        self.event, self.part = event, part

    def finish(self) -> None:
        """Wait for the copy on the host; see ``Copy.finish``. Captured copies are skipped: the device is synchronized before
        memory is freed.
        """
        if not self.part.over:
            self.event.synchronize()

    def make_wait(self, stream: torch.cuda.Stream) -> None:
        """Make `stream` wait for the copy."""
        if not self.part.over:
            stream.wait_event(self.event)


class StreamTransfer(Transfer):
    """A transfer on a stream.

    Attributes:
        launched: the copy; None until it is launched.
    """

    def __init__(self, name: str, target: PoolMemory, look: Callable[[], object], channel: StreamChannel) -> None:
        """Initialize a transfer on the stream of `channel`; see ``Transfer``."""
        super().__init__(name, target, look)
        self.launched: _Launched | None = None
        self._channel = channel
        # The ends on devices, until the computation there has waited for the copy; and the stream that it is on, for CUDA.
        self._held: dict[bool, tuple[torch.Tensor | Callable[[], None], torch.cuda.Stream | None]] = {}
        self._given: list[torch.cuda.Event] = []

    @property
    def has_ended(self) -> bool:
        """True if the copy has ended."""
        return self.launched is not None and bool(self.launched.event.query())

    def measure_seconds_after(self, earlier: "StreamTransfer") -> float:
        """Return the seconds since the end of `earlier`, for timed channels; see ``Transfer.measure_seconds_after``."""
        before, now = (transfer.copy().event for transfer in (earlier, self))
        before.synchronize()
        now.synchronize()
        return float(before.elapsed_time(now)) / 1e3

    def copy(self) -> _Launched:
        """Return the launched copy; see ``Transfer.copy``."""
        self._wait_until_known()
        assert self.launched is not None
        return self.launched

    def _start(self, after: Sequence[Copy], behind: Sequence[Copy]) -> Copy:
        self.launched = self._launch(after, behind)
        self._known.set()
        return self.launched

    def _launch(self, after: Sequence[Copy], behind: Sequence[Copy]) -> _Launched:
        stream, part = self._channel.stream, self._channel.part
        part.reached.add(stream)
        for event in self._given:
            stream.wait_event(event)
        for copy in (*after, *behind):
            if isinstance(copy, _Launched):
                copy.make_wait(stream)
            else:
                copy.finish()
        with torch.cuda.stream(stream):
            self._run(partial(torch.Tensor.copy_, non_blocking=True))
        event = stream.record_event(torch.cuda.Event(enable_timing=self._channel.timed))
        return _Launched(event, part)

    def _hold(self, end: torch.Tensor | Callable[[], None], *, at_target: bool) -> None:
        device = end.device if isinstance(end, torch.Tensor) else self._channel.stream.device
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        if stream is not None:
            self._given.append(stream.record_event())
        self._held[at_target] = end, stream

    def _wait(self, *, at_target: bool) -> None:
        launched = self.copy()
        end, stream = self._held.pop(at_target, (None, None))
        if stream is not None:
            launched.make_wait(torch.cuda.current_stream(stream.device))
        elif end is not None:
            launched.finish()

    def __del__(self) -> None:
        # For steps that were dropped halfway: their memory must not be reused before the copy ends.
        if self.launched is not None:
            for _, stream in self._held.values():
                if stream is not None:
                    self.launched.make_wait(stream)
                else:
                    self.launched.finish()


def create_host_memory(device: torch.device, capacity_bytes: int | None) -> HostMemory:
    """Return `capacity_bytes` of page-locked host memory for `device`, None for no limit."""
    return HostMemory(capacity_bytes, lock=partial(_lock_pages, device))


def _lock_pages(device: torch.device, address: int, size_bytes: int) -> "partial[None]":
    """Page-lock memory in place, without rounding to a power of two as PyTorch does; return the function that unlocks it."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))
    return partial(_unlock, device, address)


def _unlock(device: torch.device, address: int) -> None:
    torch.cuda.synchronize(device)  # a copy may be under way if a step was dropped
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))
