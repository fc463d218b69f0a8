"""Host memory for transfers: buffers that are reused between steps, counted, and limited; and tensors in them.

Page-locked memory that is allocated for each copy takes about 3 ms, and lowered the rate to 11 GB/s on an H100 with PCIe 5, where
copies reach 50 to 54 GB/s alone. Therefore buffers stay, and are used again for the same size only. Known weakness: a step with
many sizes keeps a buffer for each, up to the limit.
"""

import math
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol

import numpy as np
import torch

from planner.graphs.errors import CopyError, OutOfMemoryError
from planner.graphs.units import format_bytes

_PAGE_BYTES = 4096


class Copy(Protocol):
    """A copy that was issued, and may be under way."""

    def finish(self) -> None:
        """Wait until the copy has ended; raise CopyError if it has failed."""


@dataclass(frozen=True, slots=True)
class StorageLayout:
    """The layout of a tensor in its storage, in elements."""

    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "StorageLayout":
        """Return the layout of `tensor`."""
        return cls(tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def view_in(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor with this layout in `memory`."""
        tensor = torch.empty(0, dtype=self.dtype, device=memory.device)
        return tensor.set_(memory.untyped_storage(), self.offset, self.shape, self.stride)


@dataclass(slots=True)
class HostBuffer:
    """Bytes on the host.

    Attributes:
        size_bytes: requested size.
        values: uint8[size_bytes].
        used_by: copies issued with it.
    """

    size_bytes: int
    values: torch.Tensor
    used_by: Sequence[Copy] = ()


class HostMemory:
    """Buffers on the host, taken in the order in which copies are issued.

    A returned buffer stays allocated for the next request of its size: allocating page-locked memory takes milliseconds. It is
    freed when another size needs the room.

    Attributes:
        peak_bytes: peak of the buffers in use.
        allocated_bytes: bytes of all buffers, in use or not.
    """

    def __init__(
        self, capacity_bytes: int | None = None, *, lock: Callable[[int, int], Callable[[], object]] | None = None
    ) -> None:
        """Initialize with at most `capacity_bytes`; None for no limit.

        Args:
            lock: page-locks memory given by address and size, and returns the function that unlocks it before it is freed.
        """
        self.capacity_bytes = math.inf if capacity_bytes is None else capacity_bytes
        self.peak_bytes = self.allocated_bytes = self._used_bytes = 0
        self._lock = lock
        self._stay = False
        self._taking = Lock()
        self._unused: defaultdict[int, list[HostBuffer]] = defaultdict(list)
        # Tensors return their buffers when they die, in any thread and at any point: no lock is taken there.
        self._returned: deque[HostBuffer] = deque()

    @property
    def used_bytes(self) -> int:
        """The bytes of buffers in use."""
        with self._taking:
            self._collect()
            return self._used_bytes

    def allocate(self, size_bytes: int) -> "HostTensor":
        """Return a tensor of `size_bytes` that nothing is copied to yet; see ``take``."""
        return HostTensor(self, self.take(size_bytes))

    def take(self, size_bytes: int) -> HostBuffer:
        """Return a buffer; copies of its previous use may still be under way.

        Raises:
            OutOfMemoryError: the host has no such memory.
            CopyError: the limit of the step is exceeded.
        """
        with self._taking:
            self._collect()
            unused = self._unused[size_bytes]
            buffer = unused.pop() if unused else self._allocate_buffer(size_bytes)
            self._used_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self._used_bytes)
            return buffer

    def give_back(self, buffer: HostBuffer) -> None:
        """Return `buffer` for reuse; callable from any thread."""
        self._returned.append(buffer)

    def let_stay(self) -> None:
        """Keep all buffers taken from now on allocated, for recordings that use them.

        Unused buffers are freed first.
        """
        with self._taking:
            self._collect()
            self._stay = False
            self._release(math.inf)
            self._stay = True

    def _collect(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            self._used_bytes -= buffer.size_bytes
            self._unused[buffer.size_bytes].append(buffer)

    def _allocate_buffer(self, size_bytes: int) -> HostBuffer:
        if self.allocated_bytes + size_bytes > self.capacity_bytes:
            self._release(self.allocated_bytes + size_bytes - self.capacity_bytes)
        if self.allocated_bytes + size_bytes > self.capacity_bytes:
            there, what_else = self._used_bytes, "call backward() before the next forward pass, or "
            if self._stay:
                there, what_else = self.allocated_bytes, "a CUDA graph keeps memory for copies of each size; "
            raise CopyError(
                f"a copy of {format_bytes(size_bytes)} does not fit: {format_bytes(there)} of the host's memory are in use, "
                f"and the step may use {format_bytes(int(self.capacity_bytes))} of it: {what_else}raise host_budget="
            )
        try:
            values = self._allocate_new(size_bytes)
        except (MemoryError, RuntimeError):
            self._release(math.inf)
            try:
                values = self._allocate_new(size_bytes)
            except (MemoryError, RuntimeError) as error:
                raise OutOfMemoryError(
                    f"the host has no memory for a copy of {format_bytes(size_bytes)}, beside {format_bytes(self._used_bytes)} "
                    f"that the step already uses there ({error}): free some, or lower host_budget=",
                    asked_bytes=size_bytes,
                ) from error
        self.allocated_bytes += size_bytes
        return HostBuffer(size_bytes, values)

    def _allocate_new(self, size_bytes: int) -> torch.Tensor:
        # Not from PyTorch's allocator, which on the CPU is that of the device. Whole pages, which can be locked one by one.
        pages_bytes = -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
        whole = np.empty(pages_bytes + _PAGE_BYTES, dtype=np.uint8)
        start = -whole.ctypes.data % _PAGE_BYTES
        if self._lock is not None:
            weakref.finalize(whole, self._lock(whole.ctypes.data + start, pages_bytes))
        return torch.from_numpy(whole[start : start + size_bytes])

    def _release(self, size_bytes: float) -> None:
        """Free unused buffers, the largest first, until `size_bytes` are free; do nothing if buffers must stay."""
        if self._stay:
            return
        for size in sorted(self._unused, reverse=True):
            buffers = self._unused[size]
            while buffers and size_bytes > 0:
                for copy in buffers.pop().used_by:
                    wait_for_end(copy)
                self.allocated_bytes -= size
                size_bytes -= size
            if not buffers:
                del self._unused[size]


@dataclass(slots=True)
class HostBytes:
    """The bytes of a tensor on the host, as copies use them. They may outlive the tensor by the copies under way.

    Attributes:
        room: the memory of the tensor, uint8.
        users_before: copies issued with that memory for earlier tensors.
        copies: copies issued with it, the one that fills it first.
        values: the part that is filled; known once that copy has been made.
        layout: the tensor's layout within `values`; known likewise.
    """

    room: torch.Tensor
    users_before: tuple[Copy, ...]
    copies: list[Copy] = field(default_factory=list)
    values: torch.Tensor = field(init=False)
    layout: StorageLayout | None = None


class HostTensor:
    """A tensor on the host. Its buffer is returned when it dies."""

    __slots__ = ("_buffer", "_memory", "bytes")

    def __init__(self, memory: HostMemory, buffer: HostBuffer) -> None:
        self._memory, self._buffer = memory, buffer
        self.bytes = HostBytes(buffer.values, tuple(buffer.used_by))

    def __del__(self) -> None:
        self._buffer.used_by = self.bytes.copies
        self._memory.give_back(self._buffer)


def wait_for_end(copy: Copy) -> None:
    """Wait for `copy`, and ignore its failure: the reader of its result raises."""
    try:
        copy.finish()
    except CopyError:
        return
