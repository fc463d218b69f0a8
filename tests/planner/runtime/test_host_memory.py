"""Buffers on the host: kept by size, counted, and let go where another size needs the room."""

import pytest

from graphs.errors import CopyError, OutOfMemoryError
from planner.runtime.transfers.host_memory import HostMemory


class Copying:
    """A copy that has ended once it was waited for."""

    def __init__(self, error: CopyError | None = None) -> None:
        self.ended, self._error = False, error

    def finish(self) -> None:
        self.ended = True
        if self._error is not None:
            raise self._error


def test_returned_buffer_is_reused_for_the_same_size() -> None:
    memory = HostMemory()
    first, second = memory.take(5000), memory.take(5000)
    assert (memory.used_bytes, memory.peak_bytes, memory.allocated_bytes) == (10000, 10000, 10000)
    assert all(len(buffer.values) == 5000 and buffer.values.data_ptr() % 4096 == 0 for buffer in (first, second))
    memory.give_back(first)
    assert memory.take(4000) is not first and memory.take(5000) is first
    assert (memory.used_bytes, memory.allocated_bytes) == (14000, 14000)


def test_unused_buffers_are_released_after_their_copies_end() -> None:
    memory = HostMemory(10000)
    large, small, held = memory.take(6000), memory.take(1000), memory.take(2000)
    copies = large.used_by = [Copying(), Copying(CopyError("somebody else hears of this"))]
    waiting = small.used_by = [Copying()]
    for buffer in (large, small):
        memory.give_back(buffer)
    assert memory.take(1500).size_bytes == 1500
    assert all(copy.ended for copy in copies) and not waiting[0].ended
    assert memory.allocated_bytes == 4500 and memory.used_bytes == 3500
    with pytest.raises(
        CopyError, match=r"a copy of 7.00 kB does not fit: 3.50 kB of the host's memory are in use, .* may use 10.00 kB"
    ):
        memory.take(7000)
    assert waiting[0].ended and memory.used_bytes == memory.allocated_bytes == 3500
    assert memory.peak_bytes == 9000 and held.size_bytes == 2000


def test_unused_buffers_go_where_the_host_has_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = HostMemory()
    memory.give_back(memory.take(3000))
    new, room = HostMemory._allocate_new, 3000

    def limited(self: HostMemory, size_bytes: int) -> object:
        if self.allocated_bytes + size_bytes > room:
            raise MemoryError
        return new(self, size_bytes)

    monkeypatch.setattr(HostMemory, "_allocate_new", limited)
    assert memory.take(2000).size_bytes == memory.allocated_bytes == 2000
    with pytest.raises(OutOfMemoryError, match=r"no memory for a copy of 1.50 kB, beside 2.00 kB"):
        memory.take(1500)


def test_released_buffers_are_unlocked() -> None:
    locked: dict[int, int] = {}

    def lock(address: int, size_bytes: int):
        locked[address] = size_bytes
        return lambda: locked.pop(address)

    memory = HostMemory(8000, lock=lock)
    buffer = memory.take(5000)
    assert locked == {buffer.values.data_ptr(): 8192}
    memory.give_back(buffer)
    del buffer
    other = memory.take(4000)  # for which the first had to go
    assert locked == {other.values.data_ptr(): 4096}
    del memory, other
    assert not locked
