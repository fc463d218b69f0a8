"""One transfer between two memories of the CPU: its ends, what becomes of it when the pass fails, and buffers on the host."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from planner.graphs.errors import CopyError, OutOfMemoryError
from planner.runtime.transfers.channels import open_channel
from planner.runtime.transfers.host_memory import HostMemory
from planner.runtime.transfers.thread_channels import ThreadChannel
from planner.runtime.transfers.transfers import DeviceMemory, Transfer, TransferStoppedError

CPU = torch.device("cpu")
_LONG_S = 20.0


def channel(name: str = "device_to_cpu:1") -> ThreadChannel:
    return open_channel(name, CPU, CPU, DeviceMemory(CPU))


def in_thread(run: Callable[[], Any]) -> Callable[[], Any]:
    """Call `run` in a thread of its own; a function that waits for it, and returns what it has returned or raised."""
    found: list[Any] = []

    def called() -> None:
        try:
            found.append(run())
        except CopyError as error:
            found.append(error)

    thread = threading.Thread(target=called)
    thread.start()

    def wait() -> Any:
        thread.join(_LONG_S)
        return found[0]

    return wait


@pytest.mark.parametrize("source_first", [True, False])
def test_either_end_may_come_first(source_first: bool) -> None:
    transfer, tensor = channel().transfer(), torch.arange(24.0).view(4, 6).t()
    if source_first:
        transfer.send(tensor)
        assert not transfer.has_ended
        taken = transfer.take(100)
    else:
        taken = transfer.take(100)
        assert not transfer.has_ended
        transfer.send(tensor)
    transfer.finish()
    found = transfer.wait_for_arrival(taken)
    assert torch.equal(found, tensor) and found.stride() == tensor.stride()
    assert found.untyped_storage().data_ptr() == taken.untyped_storage().data_ptr()


def test_tensor_is_forwarded_before_it_arrives() -> None:
    first, second = channel().transfer(), channel("cpu:1_to_host").transfer()
    between = first.take(16)
    second.send(between, first)
    last = second.take(16)
    assert not first.has_ended and not second.has_ended
    first.send(torch.arange(4.0))
    assert torch.equal(second.wait_for_arrival(last), torch.arange(4.0))


@pytest.mark.parametrize("give", [lambda t: t.send(torch.ones(2)), lambda t: t.take(8)], ids=["source", "target"])
def test_failed_pass_releases_waiting_ends_of_a_transfer(give: Callable[[Transfer], object]) -> None:
    transfer, after = channel().transfer(), channel("cpu:1_to_host").transfer()
    give(transfer)
    after.send(torch.empty(8, dtype=torch.uint8), transfer)
    memory = after.take(8)
    waiting = in_thread(transfer.finish), in_thread(lambda: after.wait_for_arrival(memory))
    transfer.stop()
    assert all(isinstance(wait(), TransferStoppedError) for wait in waiting)
    for later in (lambda: transfer.send(torch.ones(2)), lambda: transfer.take(8)):
        with pytest.raises(TransferStoppedError):
            later()


def test_a_copy_that_has_begun_is_not_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(target: Any, source: Any) -> None:
        begun.set()
        go_on.wait(_LONG_S)
        target[:] = source

    monkeypatch.setattr(np, "copyto", slow)
    transfer = channel().transfer()
    transfer.send(torch.ones(2))
    taken = transfer.take(8)
    begun.wait(_LONG_S)
    transfer.stop()
    assert not transfer.has_ended
    go_on.set()
    assert torch.equal(transfer.wait_for_arrival(taken), torch.ones(2))


def test_of_a_larger_storage_the_part_that_the_tensor_covers_is_copied() -> None:
    transfer, whole = channel().transfer(), torch.arange(100.0)
    transfer.send(whole[10:30:2])
    taken = transfer.take(4 * 19)
    found = transfer.wait_for_arrival(taken)
    assert torch.equal(found, whole[10:30:2]) and (found.storage_offset(), found.stride()) == (0, (2,))
    with_gaps = channel().transfer()
    with_gaps.send(whole[10:30:2])
    taken = with_gaps.take(4 * 18)
    for wait in (with_gaps.finish, lambda: with_gaps.wait_for_arrival(taken)):
        with pytest.raises(CopyError, match=r"a tensor float32\[10\] with strides \(2,\) covers 76 B, and 72 B were planned"):
            wait()


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
