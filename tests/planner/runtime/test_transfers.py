"""One transfer between two memories of the CPU: its two ends, and what becomes of it when the pass fails."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from graphs.errors import CopyError
from planner.runtime.transfers.channels import open_channel
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
