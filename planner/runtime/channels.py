"""Transfers between the device and the host, concurrent with the computation, one at a time in each direction.

Here the device is a CPU: each direction has a thread, and transfers are real copies into memory that PyTorch's allocator does not
count. On CUDA each direction has a stream (``planner.runtime.cuda_channels``).
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

_LOOK_S = 0.2  # interval at which a waiting thread checks that the copying thread is alive
_OUT, _BACK = "device to host", "host to device"


class Issued(Protocol):
    """A copy that was issued, as seen by the computation."""

    @property
    def has_ended(self) -> bool:
        """True if the copy has finished."""

    def seconds_after(self, earlier: Any) -> float:
        """Return the seconds between the end of `earlier`, of the same channels, and the end of this copy; wait for both.

        Raises:
            CopyError: it has failed.
        """


class Channels(Protocol):
    """The channels of a compiled schedule. Copies run in the order of issue, separately for each direction.

    Attributes:
        memory: the host memory.
    """

    memory: HostMemory

    def out(self, tensor: torch.Tensor, *after: Any) -> tuple[HostTensor, Any]:
        """Issue the copy of `tensor` to the host.

        Args:
            after: the copy that makes `tensor`, if it may be under way.

        Returns:
            The tensor on the host, valid once the copy has ended; and the copy, which must be waited for before `tensor` is
            freed.

        Raises:
            CopyError: there is no room on the host, or no thread to copy.
        """

    def back(self, host: HostTensor) -> tuple[torch.Tensor, Any]:
        """Allocate memory on the device, and issue the copy of `host` into it.

        Returns:
            The tensor, valid once the copy has ended; and the copy, which must be waited for before the tensor is read or freed.

        Raises:
            CopyError: there is no thread to copy.
        """

    def again(self, tensor: torch.Tensor, host: HostTensor, *, out: bool) -> Any:
        """Issue a copy to the host or back whose memory exists on both sides: nothing is allocated.

        Returns:
            The copy, an ``Issued``, which must be waited for before either side is freed.
        """

    def wait(self, copy: Any) -> None:
        """Make the computation wait for `copy`.

        Raises:
            CopyError: it has failed.
        """


class ThreadChannels:
    """Channels of a CPU: a thread for each direction."""

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self._out, self._back = (Worker(name, f"copies from {name}") for name in (_OUT, _BACK))

    def out(self, tensor: torch.Tensor, *after: "ThreadCopy") -> tuple[HostTensor, "ThreadCopy"]:
        """Issue a copy to the host; see ``Channels.out``."""
        source = storage_bytes(tensor)
        host = HostTensor(tensor, self.memory, allocated_bytes(len(source), tensor.device))
        copy = ThreadCopy(_OUT, source, host.values, after, host.waits_for)
        self._out.issue(copy)
        host.copies.append(copy)
        return host, copy

    def back(self, host: HostTensor) -> tuple[torch.Tensor, "ThreadCopy"]:
        """Issue a copy to the device; see ``Channels.back``."""
        tensor = host.on_device()
        copy = ThreadCopy(_BACK, host.values, storage_bytes(tensor), host.copies[:1])
        self._back.issue(copy)
        host.copies.append(copy)
        return tensor, copy

    def again(self, tensor: torch.Tensor, host: HostTensor, *, out: bool) -> "ThreadCopy":
        """Issue a copy without allocation; see ``Channels.again``."""
        here, there = storage_bytes(tensor), host.values
        copy = ThreadCopy(_OUT, here, there) if out else ThreadCopy(_BACK, there, here)
        (self._out if out else self._back).issue(copy)
        host.copies.append(copy)
        return copy

    def wait(self, copy: "ThreadCopy") -> None:
        """Wait for `copy`; see ``Channels.wait``."""
        copy.finish()


class ThreadCopy:
    """A copy by a thread. It holds both sides until it has ended."""

    def __init__(
        self, name: str, source: torch.Tensor, target: torch.Tensor, after: Sequence[Copy] = (), behind: Sequence[Copy] = ()
    ) -> None:
        """Initialize a copy from `source` to `target`, both uint8 and of the same length.

        Args:
            after: the copies that make `source`.
            behind: other copies that use `target`.
        """
        self._name = name
        # As arrays: PyTorch would use several threads for each copy.
        self._source, self._target = source.numpy(), target.numpy()
        self._after, self._behind = after, behind
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self.thread: threading.Thread | None = None

    def make(self) -> None:
        """Execute the copy in the channel's thread."""
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
        """True if the copy has finished; see ``Issued.has_ended``."""
        return self._ended.is_set()

    def seconds_after(self, earlier: "ThreadCopy") -> float:
        """Return the seconds since the end of `earlier`; see ``Issued.seconds_after``."""
        earlier.finish()
        self.finish()
        return self._ended_s - earlier._ended_s

    def finish(self) -> None:
        """Wait for the copy; see ``Copy.finish``."""
        while not self._ended.wait(_LOOK_S):
            if self.thread is not None and not self.thread.is_alive() and not self._ended.is_set():
                raise CopyError(f"a copy from {self._name} was not made: its thread has died; the step can be tried again")
        if (error := self._error) is not None:
            # A new one each time, without the frames of earlier waiters.
            said = f"a copy from {self._name} failed: {type(error).__name__}: {error}"
            raise CopyError(str(error) if isinstance(error, CopyError) else said) from error
