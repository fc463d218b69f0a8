"""CUDA graphs on the stand-in: what a capture records, and replays."""

import gc
from typing import TYPE_CHECKING, Any

from planner.graphs.allocators.caching import PoolId
from tests.support.cuda_device.streams import Point, Stream, Work

if TYPE_CHECKING:
    from tests.support.cuda_device.machine import Machine


class Recording:
    """What was launched in one capture, by stream.

    Attributes:
        origin: the stream that the capture began on.
        pool: of memory, that what is allocated inside comes from.
        over: True once the capture has ended.
    """

    def __init__(self, origin: Stream, pool: PoolId) -> None:
        self.origin, self.pool, self.over = origin, pool, False
        self._parts: dict[Stream, list[Work | Point]] = {origin: []}
        self._joined: dict[Stream, int] = {}
        self._replayed: list[Stream] = []

    def length(self, stream: Stream) -> int:
        return len(self._parts.setdefault(stream, []))

    def add(self, stream: Stream, work: Work) -> None:
        self._parts.setdefault(stream, []).append(work)

    def wait(self, stream: Stream, point: Point) -> None:
        self._parts.setdefault(stream, []).append(point)
        self._joined[point.stream] = max(point.place, self._joined.get(point.stream, 0))

    def end(self) -> None:
        """End the capture; every stream that it has reached must have come back."""
        self.over = True
        for stream in self._parts:
            stream.recording = None
        left = [s for s, part in self._parts.items() if s is not self.origin and self._joined.get(s, 0) < len(part)]
        if left:
            raise RuntimeError("CUDA error: capturing stream has unjoined work")

    def replay(self, machine: "Machine", launched_on: Stream) -> None:
        """Do it all again, behind what was launched before, on streams of its own."""
        begin = launched_on.here()
        machine.forget_ended(self._replayed)
        own = {stream: Stream(machine, stream.device.index) for stream in self._parts}
        self._replayed = list(own.values())
        for stream in own.values():
            stream.wait_point(begin)
        for stream, part in self._parts.items():
            for item in part:
                if isinstance(item, Work):
                    own[stream].launch(item)
                else:  # behind what the other stream begins with, too
                    own[stream].wait_point(Point(own[item.stream], item.place + 1))
        for stream in own.values():
            launched_on.wait_point(stream.here())


class CUDAGraph:
    """Stands for ``torch.cuda.CUDAGraph``."""

    machine: "Machine"

    def __init__(self, keep_graph: bool = False) -> None:
        self.recording: Recording | None = None

    def capture_begin(self, pool: PoolId, stream: Stream) -> None:
        memory = self.machine.memories[stream.device.index]
        self._seeds = memory.seeds_of_graphs(stream)
        self.recording = Recording(stream, pool)
        stream.recording = self.recording
        self.machine.capturing = True
        memory.allocator.keep_pool(pool)

    def capture_end(self) -> None:
        self.machine.capturing = False
        self.recording.end()

    def replay(self) -> None:
        self.machine.check_may_wait("replaying a graph")
        stream = self.machine.current(self.recording.origin.device.index)
        self.recording.replay(self.machine, stream)

    def pool(self) -> PoolId:
        return self.recording.pool


class graph:  # noqa: N801  # as torch.cuda.graph
    """Stands for ``torch.cuda.graph``."""

    def __init__(
        self, cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global", **_: object
    ) -> None:
        self._graph = cuda_graph
        machine = cuda_graph.machine
        self._pool = machine.new_pool() if pool is None else pool
        self._stream = Stream(machine, machine.device) if stream is None else stream

    def __enter__(self) -> None:
        machine = self._graph.machine
        machine.synchronize()
        gc.collect()
        for memory in machine.memories:
            memory.release_unused()
        self._before = machine.device, machine.current(self._stream.device.index)
        machine.make_current(self._stream)
        self._graph.capture_begin(self._pool, self._stream)

    def __exit__(self, *_: object) -> None:
        # As in PyTorch: a capture that cannot end leaves its stream the current one.
        self._graph.capture_end()
        device, stream = self._before
        self._graph.machine.make_current(stream)
        self._graph.machine.device = device
