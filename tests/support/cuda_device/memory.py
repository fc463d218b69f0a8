"""Memory of a device: slabs of the host, handed out by the caching allocator's rules, and overwritten when it is freed."""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from planner.graphs.allocators.caching import DEFAULT_POOL, Block, CachingAllocator, DeviceFullError, PoolId, Segment
from tests.support.cuda_device.streams import BYTES_PER_S, LAUNCH_S, Point, Stream, Work

if TYPE_CHECKING:
    from tests.support.cuda_device.machine import Machine

WORKSPACE_BYTES = 32 * 2**20  # of cuBLAS on Hopper
BIASED_WORKSPACE_BYTES = 2**20  # of cuBLASLt
LIBRARY_BYTES = 2 * (WORKSPACE_BYTES + BIASED_WORKSPACE_BYTES)  # of both passes
_MOST_FILLED_BYTES = 24 * 2**20
_FREED = 0xFF  # NaN in any floating point type, -1 in any integer type


@dataclass(eq=False, slots=True)
class Held:
    """Memory that was handed out.

    Attributes:
        block: of the allocator.
        address: of its first byte.
        stream: that it was allocated for.
        is_gone: True once the stream has come to where it was freed: others have it from there on.
        used_by: further streams that it was noted for (``record_stream``).
    """

    block: Block
    address: int
    stream: Stream
    is_gone: bool = False
    used_by: set[Stream] = field(default_factory=set)


@dataclass(eq=False)
class _Seeds:
    tensors: tuple[torch.Tensor, torch.Tensor]


class DeviceMemory:
    """Memory of one device.

    Attributes:
        allocator: says where blocks lie.
        held: by address.
        workspaces: of libraries, by thread, stream and size.
        shared_pools: those of ``torch.cuda.MemPool``.
        last_pools: of them those whose free memory serves requests for which the device has no other.
        pools: of threads inside ``torch.cuda.use_mem_pool``.
        raw: memory that was asked for without a tensor, by address.
    """

    def __init__(self, machine: "Machine", index: int, capacity_bytes: int | None) -> None:
        self.machine, self.index = machine, index
        self.capacity_bytes = 2**40 if capacity_bytes is None else capacity_bytes
        self.allocator = CachingAllocator(self.capacity_bytes, released=self._released)
        self.held: dict[int, Held] = {}
        self.workspaces: dict[tuple[int, Stream, int], torch.Tensor] = {}
        self.shared_pools: set[PoolId] = set()
        self.last_pools: set[PoolId] = set()
        self.pools: dict[int, PoolId] = {}
        self.raw: dict[int, torch.Tensor] = {}
        self._seeds: Callable[[], _Seeds | None] = lambda: None
        self._slabs: dict[int, np.ndarray] = {}
        self._freed: deque[Held] = deque()
        self._waiting: list[tuple[Held, list[Point]]] = []
        self._open = False

    def take(self, size_bytes: int, stream: Stream) -> torch.Tensor:
        """Memory for work on `stream`: uint8[size_bytes] of the host, which is freed when its storage dies."""
        with self.machine.lock:
            self.settle()
            recording = stream.recording
            if self.machine.capturing and recording is None:
                self.machine.wrong.append("memory was allocated in a capture for a stream that is not part of it")
            self._open = True
            try:
                pool = self.pools.get(threading.get_ident(), DEFAULT_POOL) if recording is None else recording.pool
                block = self._block(size_bytes, stream.number, pool)
            except DeviceFullError as error:
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {size_bytes / 2**20:.2f} MiB. GPU {self.index} has a total capacity "
                    f"of {self.capacity_bytes / 2**30:.2f} GiB"
                ) from error
            finally:
                self._open = False
            slab = self._slab(block.segment)
            values = slab[block.offset : block.offset + size_bytes]
            held = Held(block, values.ctypes.data, stream)
            self.held[held.address] = held
            weakref.finalize(values, self._free_later, held).atexit = False
            return torch.from_numpy(values)

    def _block(self, size_bytes: int, stream: int, pool: PoolId) -> Block:
        """A block of `pool`, else a free one of the last pools (the end of ``DeviceCachingAllocator::malloc``)."""
        try:
            return self.allocator.allocate(size_bytes, stream, pool)
        except DeviceFullError:
            for other in self.last_pools if pool == DEFAULT_POOL else ():
                if self.allocator.find_fitting_block(size_bytes, stream, other) is not None:
                    return self.allocator.allocate(size_bytes, stream, other)
            raise

    def bytes_at(self, address: int, size_bytes: int) -> np.ndarray:
        """The bytes of handed out memory, which this does not hold."""
        held = self.held[address]
        return self.bytes_of(held, size_bytes)

    def bytes_of(self, held: Held, size_bytes: int) -> np.ndarray:
        offset = held.address - self._slabs[held.block.segment.number].ctypes.data
        return self._slabs[held.block.segment.number][offset : offset + size_bytes]

    def settle(self) -> None:
        """Free what has died, and what other streams have used until now."""
        while self._freed:
            self._free(self._freed.popleft())
        if not self.machine.capturing:
            waiting, self._waiting = self._waiting, []
            for held, points in waiting:
                if all(point.stream.done >= point.place for point in points):
                    self._give_back(held)
                else:
                    self._waiting.append((held, points))

    def workspace(self, stream: Stream, *, biased: bool) -> None:
        """What libraries do where this thread first multiplies matrices on `stream`, and first adds a bias."""
        for size_bytes in (WORKSPACE_BYTES, BIASED_WORKSPACE_BYTES) if biased else (WORKSPACE_BYTES,):
            key = (threading.get_ident(), stream, size_bytes)
            if key not in self.workspaces:
                self.workspaces[key] = self.take(size_bytes, stream)

    def seeds_of_graphs(self, stream: Stream) -> "_Seeds":
        """Seed and offset of the random generator: all graphs share those that were made on the stream of the first one."""
        seeds = self._seeds()
        if seeds is None:
            seeds = _Seeds((self.take(8, stream), self.take(8, stream)))
            self._seeds = weakref.ref(seeds)
        return seeds

    def raw_alloc(self, size_bytes: int, stream: Stream) -> int:
        """As ``torch.cuda.caching_allocator_alloc``."""
        memory = self.take(size_bytes, stream)
        self.raw[memory.data_ptr()] = memory
        return memory.data_ptr()

    def release_unused(self) -> None:
        """As ``torch.cuda.empty_cache``: waits for the device where there is anything to be returned."""
        with self.machine.lock:
            self.settle()
            self.machine.synchronize(self.index)
            self.settle()
            self._open = True
            try:
                self.allocator.release_unused()
            finally:
                self._open = False

    def _free_later(self, held: Held) -> None:
        """Called wherever a storage dies: also while this is at work, which goes on first."""
        self._freed.append(held)
        if not self._open and self.machine.lock.acquire(blocking=False):
            try:
                if not self._open:
                    self.settle()
            finally:
                self.machine.lock.release()

    def _free(self, held: Held) -> None:
        del self.held[held.address]
        points = [stream.here() for stream in held.used_by if stream is not held.stream]
        if points:
            self._waiting.append((held, points))
        else:
            self._give_back(held)

    def _give_back(self, held: Held) -> None:
        size_bytes = held.block.size_bytes
        recorded = held.stream.recording is not None
        # The memory of a graph is nobody else's: it may be used again by captures into the same pool, and is so there.
        pool = held.block.segment.pool
        shared = pool == DEFAULT_POOL or pool in self.shared_pools or recorded
        if size_bytes <= _MOST_FILLED_BYTES and shared:
            values = self.bytes_of(held, size_bytes)

            def overwrite(_: int) -> None:
                values.fill(_FREED)
                held.is_gone = held.is_gone or not recorded

            held.stream.launch(Work(overwrite, seconds=0.0), quietly=True)
        self.allocator.free(held.block)

    def _slab(self, segment: Segment) -> np.ndarray:
        if segment.number not in self._slabs:
            whole = np.empty(segment.size_bytes + 4096, dtype=np.uint8)
            start = -whole.ctypes.data % 4096
            slab = self._slabs[segment.number] = whole[start : start + segment.size_bytes]
            if segment.size_bytes <= _MOST_FILLED_BYTES:
                slab.fill(_FREED)
        return self._slabs[segment.number]

    def _released(self, segment: Segment) -> None:
        if segment.number in self._slabs:
            self.machine.synchronize(self.index)
            del self._slabs[segment.number]


def seconds(size_bytes: int) -> float:
    """What a kernel takes that reads and writes so many bytes, by the clock of its stream."""
    return LAUNCH_S + size_bytes / BYTES_PER_S
