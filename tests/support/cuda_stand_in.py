"""What CUDA's streams and events do, on the CPU: each keeps what was launched on it until somebody waits.

Work on a stream other than the present one is done as late as it may be, so that a wait that is missing shows in the numbers.
What a capture refuses is refused here: to wait for what was launched outside, to leave a stream behind, to lock memory.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


class Event:
    """Behind what its stream had to do when it was recorded."""

    stream: "Stream"
    place: int
    capture: object

    def __init__(self, enable_timing: bool = False) -> None:
        self.timed = enable_timing

    def synchronize(self) -> None:
        assert self.stream.cuda.capture is None, "the host cannot wait while it captures"
        self.reached()

    def reached(self) -> None:
        self.stream.run_to(self.place)

    def query(self) -> bool:
        """Meanwhile the stream has done one thing more."""
        self.stream.run_to(min(self.stream.done + 1, self.place))
        return self.stream.done >= self.place

    def elapsed_time(self, later: "Event") -> float:
        assert self.timed and later.timed and max(later.stream.done - later.place, self.stream.done - self.place) >= 0
        return 1e3 * (later.stream.done_s[later.place] - self.stream.done_s[self.place])


class Stream:
    """Does what was launched on it when it must, in order."""

    def __init__(self, cuda: "Cuda", device: object = None) -> None:
        self.cuda, self.device = cuda, device
        self.issued = self.done = 0
        self.done_s = {0: time.perf_counter()}
        self._work: list[Callable[[], object]] = []

    def launch(self, work: Callable[[], object]) -> None:
        self._work.append(work)
        self.issued += 1

    def run_to(self, place: int) -> None:
        while self.done < place:
            work = self._work.pop(0)
            self.done += 1
            work()
            self.done_s[self.done] = time.perf_counter()

    def wait_event(self, event: Event) -> None:
        assert event.capture is self.cuda.capture, "a dependency crosses the border of a capture"
        self.launch(event.reached)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.stream, event.place, event.capture = self, self.issued, self.cuda.capture
        return event


class Present(Stream):
    """The one that computes: at once, in the order of the program."""

    def launch(self, work: Callable[[], object]) -> None:
        super().launch(work)
        self.run_to(self.issued)


class Cuda:
    """Stands for ``torch.cuda``, with the page-locked memory that it has been asked for."""

    Event = Event

    def __init__(self) -> None:
        self.capture: object = None
        self.streams: list[Stream] = []
        self.present = Present(self)
        self.current: Stream = self.present
        self.locked: dict[int, int] = {}

    def Stream(self, device: object = None) -> Stream:  # noqa: N802
        self.streams.append(Stream(self, device))
        return self.streams[-1]

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Inside, what is launched is captured."""
        assert self.all_done(), "work from before the capture is under way"
        self.capture = object()
        yield
        assert self.all_done(), "a stream was not joined"
        self.capture = None

    def all_done(self) -> bool:
        return all(stream.done == stream.issued for stream in self.streams)

    def current_stream(self, device: object = None) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def synchronize(self, device: object = None) -> None:
        pass

    def cudart(self) -> "Cuda":
        return self

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        assert self.capture is None, "no memory is locked in a capture"
        assert address % 4096 == size_bytes % 4096 == 0 and address not in self.locked
        self.locked[address] = size_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        assert self.capture is None, "no memory is unlocked in a capture"
        del self.locked[address]
        return 0

    def check_error(self, result: int) -> None:
        assert result == 0


@contextmanager
def cuda_stand_in() -> Iterator[Cuda]:
    """Inside, ``planner.runtime.cuda_channels`` has this in place of ``torch.cuda``."""
    cuda = Cuda()

    class Torch:
        """The module torch with another ``cuda``."""

        def __init__(self) -> None:
            self.cuda = cuda

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    copy = torch.Tensor.copy_

    def launched(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not non_blocking:
            return copy(self, source)
        cuda.current.launch(lambda: copy(self, source))
        return self

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("planner.runtime.cuda_channels.torch", Torch())
        patch.setattr(torch.Tensor, "copy_", launched)
        yield cuda
