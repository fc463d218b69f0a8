"""What CUDA's streams and events do, on the CPU: each keeps what was launched on it until somebody waits.

Work on a stream other than the present one is done as late as it may be, so that a wait that is missing shows in the numbers.
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

    def __init__(self, enable_timing: bool = False) -> None:
        self.timed = enable_timing

    def synchronize(self) -> None:
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

    def __init__(self, device: object = None) -> None:
        self.device = device
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
        self.launch(event.synchronize)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.stream, event.place = self, self.issued
        return event


class Present(Stream):
    """The one that computes: at once, in the order of the program."""

    def launch(self, work: Callable[[], object]) -> None:
        super().launch(work)
        self.run_to(self.issued)


class Cuda:
    """Stands for ``torch.cuda``, with the page-locked memory that it has been asked for."""

    Stream = Stream
    Event = Event

    def __init__(self) -> None:
        self.present = Present()
        self.current: Stream = self.present
        self.locked: dict[int, int] = {}

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
        assert address % 4096 == size_bytes % 4096 == 0 and address not in self.locked
        self.locked[address] = size_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
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
