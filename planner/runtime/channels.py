"""Copies between the device and the host beside the computation, one at a time in each direction.

Here the device is a CPU: each direction has a thread, and copies are real, into memory that PyTorch's allocator does not
count. On CUDA each has a stream (``planner.runtime.cuda_channels``).
"""

import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from graphs.errors import CopyError
from planner.capture.lowering.statics import allocated_bytes
from planner.runtime.host_memory import Copy, HostMemory, ended
from planner.runtime.host_tensor import HostTensor, storage_bytes
from planner.runtime.workers import Worker

_LOOK_S = 0.2  # how often a waiting thread looks whether the one that copies is alive
_OUT, _BACK = "device to host", "host to device"


class Issued(Protocol):
    """A copy that was issued, as the computation knows it."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it is left to do."""

    def seconds_after(self, earlier: Any) -> float:
        """From the end of `earlier` of the same channels to the end of this one, waiting for both.

        Raises:
            CopyError: it has failed.
        """


class Channels(Protocol):
    """What a compiled schedule copies by. What it issues is done in the order of issue, apart for each direction.

    Attributes:
        memory: of the host.
    """

    memory: HostMemory

    def out(self, tensor: torch.Tensor, *after: Any) -> tuple[HostTensor, Any]:
        """Issue the copy of `tensor` to the host.

        Args:
            after: the copy that makes `tensor`, if it may be under way.

        Returns:
            What is on the host once the copy has ended; and the copy, which is to be waited for before `tensor` goes.

        Raises:
            CopyError: there is no room on the host, or nothing that copies.
        """

    def back(self, host: HostTensor) -> tuple[torch.Tensor, Any]:
        """Take memory on the device, and issue the copy of `host` into it.

        Returns:
            What is there once the copy has ended; and the copy, which is to be waited for before the tensor is read, or goes.

        Raises:
            CopyError: there is nothing that copies.
        """

    def again(self, tensor: torch.Tensor, host: HostTensor, *, out: bool) -> Any:
        """Issue a copy, to the `host` or back, of bytes that are on both sides already: it takes no memory.

        Returns:
            The copy, an ``Issued``, which is to be waited for before either goes.
        """

    def wait(self, copy: Any) -> None:
        """Let the computation wait for `copy`.

        Raises:
            CopyError: it has failed.
        """


class ThreadChannels:
    """Channels of a CPU: a thread for each direction."""

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self._out, self._back = (Worker(name, f"copies from {name}") for name in (_OUT, _BACK))

    def out(self, tensor: torch.Tensor, *after: "ThreadCopy") -> tuple[HostTensor, "ThreadCopy"]:
        """As ``Channels.out``."""
        source = storage_bytes(tensor)
        host = HostTensor(tensor, self.memory, allocated_bytes(len(source), tensor.device))
        copy = ThreadCopy(_OUT, source, host.values, after, host.waits_for)
        self._out.issue(copy)
        host.copies.append(copy)
        return host, copy

    def back(self, host: HostTensor) -> tuple[torch.Tensor, "ThreadCopy"]:
        """As ``Channels.back``."""
        tensor = host.on_device()
        copy = ThreadCopy(_BACK, host.values, storage_bytes(tensor), host.copies[:1])
        self._back.issue(copy)
        host.copies.append(copy)
        return tensor, copy

    def again(self, tensor: torch.Tensor, host: HostTensor, *, out: bool) -> "ThreadCopy":
        """As ``Channels.again``."""
        here, there = storage_bytes(tensor), host.values
        copy = ThreadCopy(_OUT, here, there) if out else ThreadCopy(_BACK, there, here)
        (self._out if out else self._back).issue(copy)
        host.copies.append(copy)
        return copy

    def wait(self, copy: "ThreadCopy") -> None:
        """As ``Channels.wait``."""
        copy.finish()


class ThreadCopy:
    """A copy that a thread makes. It holds both sides until it has ended, and nothing then."""

    def __init__(
        self, name: str, source: torch.Tensor, target: torch.Tensor, after: Sequence[Copy] = (), behind: Sequence[Copy] = ()
    ) -> None:
        """From `source` to `target`, both uint8 and as long.

        Args:
            after: the copies that make `source`.
            behind: others that use `target`.
        """
        self._name = name
        # As arrays: PyTorch would let a team of threads loose on each copy.
        self._source, self._target = source.numpy(), target.numpy()
        self._after, self._behind = after, behind
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self.thread: threading.Thread | None = None

    def make(self) -> None:
        """Make it, in the channel's thread."""
        try:
            for copy in self._after:
                copy.finish()
            for copy in self._behind:
                ended(copy)
            np.copyto(self._target, self._source)
        except BaseException as error:  # noqa: BLE001  # whoever waits for it hears of it
            self._error = error
        finally:
            self._after = self._behind = ()
            del self._source, self._target
            self._ended_s = time.perf_counter()
            self._ended.set()

    @property
    def has_ended(self) -> bool:
        """As ``Issued.has_ended``."""
        return self._ended.is_set()

    def seconds_after(self, earlier: "ThreadCopy") -> float:
        """As ``Issued.seconds_after``."""
        earlier.finish()
        self.finish()
        return self._ended_s - earlier._ended_s

    def finish(self) -> None:
        """As ``Copy.finish``."""
        while not self._ended.wait(_LOOK_S):
            if self.thread is not None and not self.thread.is_alive() and not self._ended.is_set():
                raise CopyError(f"a copy from {self._name} was not made: its thread has died; the step can be tried again")
        if (error := self._error) is not None:
            # A new one each time, which does not hold the frames of who waited before.
            said = f"a copy from {self._name} failed: {type(error).__name__}: {error}"
            raise CopyError(str(error) if isinstance(error, CopyError) else said) from error
