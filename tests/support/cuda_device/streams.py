"""Streams and events: queues of work, done in any order that the events allow."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tests.support.cuda_device.graphs import Recording
    from tests.support.cuda_device.machine import Machine

LAUNCH_S = 2e-6
BYTES_PER_S = 1e11


class Order(StrEnum):
    """In which order streams do what they may do."""

    ALL_LATE = "all late"  # nothing before somebody waits for it
    OTHERS_LATE = "others late"  # the default streams at once, the others only where they are waited for
    OTHERS_FIRST = "others first"  # all but the default streams at once, those where they are waited for
    RANDOM = "random"


@dataclass(slots=True)
class Work:
    """Something that a stream does.

    Attributes:
        run: does it; called with the seed of its random numbers.
        seconds: it takes by the stream's clock.
        generator: that the seed is drawn from when the work is launched; None where it draws nothing.
        host: addresses and sizes of the page-locked memory that it uses.
    """

    run: Callable[[int], object]
    seconds: float = LAUNCH_S
    generator: torch.Generator | None = None
    host: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Point:
    """A place in a stream, which a stream reaches when it has done all before."""

    stream: "Stream"
    place: int
    recording: "Recording | None" = None


@dataclass(slots=True)
class _Queued:
    item: Work | Point
    seed: int = 0


class Stream:
    """A queue of work of one device.

    Attributes:
        device: that it belongs to.
        number, cuda_stream: unique among streams.
        issued, done: pieces of work, so far.
        recording: what records what is launched; None outside of a capture.
    """

    def __init__(self, machine: "Machine", index: int) -> None:
        self.machine, self.device = machine, torch.device("cuda", index)
        self.number = self.cuda_stream = next(machine.numbers)
        self.is_default = all(stream.device != self.device for stream in machine.streams)
        machine.streams.append(self)
        self.issued = self.done = 0
        self.recording: Recording | None = None
        self.times_s = [0.0]
        self.queue: deque[_Queued] = deque()

    def launch(self, work: Work, *, quietly: bool = False) -> None:
        """Queue `work`; `quietly` where it may fail nowhere, so that nothing is done now."""
        with self.machine.lock:
            if self.recording is not None:
                self.recording.add(self, work)
                return
            self.queue.append(_Queued(work, 0 if work.generator is None else drawn(work.generator)))
            self.issued += 1
            if not quietly:
                self.machine.look()

    def wait_event(self, event: "Event") -> None:
        if event.point is not None:
            self.wait_point(event.point)

    def wait_point(self, point: Point) -> None:
        with self.machine.lock:
            if point.recording is not None and not point.recording.over and self.recording is None:
                self.recording = point.recording  # it joins the capture
            if self.recording is not point.recording:
                raise RuntimeError("CUDA error: dependency created on uncaptured work in another stream")
            if self.recording is not None:
                self.recording.wait(self, point)
                return
            self.queue.append(_Queued(point))
            self.issued += 1
            self.machine.look()

    def wait_stream(self, other: "Stream") -> None:
        self.wait_point(other.here())

    def here(self) -> Point:
        if self.recording is not None:
            return Point(self, self.recording.length(self), self.recording)
        return Point(self, self.issued)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = Event() if event is None else event
        event.point = self.here()
        return event

    def synchronize(self) -> None:
        self.machine.check_may_wait()
        self.run_to(self.issued)

    def query(self) -> bool:
        return self.done >= self.issued

    def run_to(self, place: int) -> None:
        """Do all up to `place`, and elsewhere what that waits for."""
        with self.machine.lock:
            while self.done < place:
                self.machine.meddle(self)
                if self.done < place and not self.advance():
                    head = self.queue[0].item
                    assert isinstance(head, Point)
                    head.stream.run_to(head.place)

    def advance(self) -> bool:
        """Do one piece of work, if there is one that waits for nothing; False if not."""
        if not self.queue:
            return False
        head = self.queue[0].item
        if isinstance(head, Point) and head.stream.done < head.place:
            return False
        self._do()
        return True

    def _do(self) -> None:
        queued = self.queue.popleft()
        self.done += 1
        before = self.times_s[-1]
        if isinstance(queued.item, Point):
            self.times_s.append(max(before, queued.item.stream.times_s[queued.item.place]))
            return
        self.times_s.append(before + queued.item.seconds)
        queued.item.run(queued.seed)


@dataclass(eq=False)
class Event:
    """A point of a stream, recorded on the current one of the current device unless a stream is given."""

    enable_timing: bool = False
    blocking: bool = False
    interprocess: bool = False
    point: Point | None = field(default=None, init=False)

    def record(self, stream: Stream | None = None) -> None:
        (torch.cuda.current_stream() if stream is None else stream).record_event(self)

    def wait(self, stream: Stream | None = None) -> None:
        (torch.cuda.current_stream() if stream is None else stream).wait_event(self)

    def synchronize(self) -> None:
        if self.point is not None:
            self._outside(self.point)
            self.point.stream.run_to(self.point.place)

    def query(self) -> bool:
        """Meanwhile the stream has done one thing more."""
        if self.point is None:
            return True
        self._outside(self.point)
        stream, place = self.point.stream, self.point.place
        stream.run_to(min(stream.done + 1, place))
        return stream.done >= place

    def elapsed_time(self, later: "Event") -> float:
        assert self.enable_timing and later.enable_timing, "both events must be made with enable_timing=True"
        first, last = self.point, later.point
        assert first is not None and last is not None, "both events must be recorded"
        if first.stream.device != last.stream.device:
            raise RuntimeError("CUDA error: invalid resource handle: the events are of different devices")
        if not (first.stream.done >= first.place and last.stream.done >= last.place):
            raise RuntimeError("CUDA error: device not ready")
        return 1e3 * (last.stream.times_s[last.place] - first.stream.times_s[first.place])

    def _outside(self, point: Point) -> None:
        point.stream.machine.check_may_wait()
        if point.recording is not None:
            raise RuntimeError("CUDA error: operation not permitted on an event last recorded in a capturing stream")


def drawn(generator: torch.Generator) -> int:
    """A seed that is the next number of `generator`."""
    return int(torch.randint(2**62, (1,), generator=generator))
