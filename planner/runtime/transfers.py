"""One pass of a step on several devices, and its copies between their memories.

Each device has a thread that computes, each channel one that copies. A copy starts when the source has sent it, the target has
allocated memory, and the channel's earlier copies are done. ``graphs.clocks`` starts copies at the same events.

CUDA work runs in stream order: source and target record events, the channel waits for them, and a copy is done when the channel's
stream is. Not tested on a GPU.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from graphs.errors import CopyError
from graphs.units import format_bytes
from planner.runtime.host_memory import Copy
from planner.runtime.host_tensor import storage_bytes


class StoppedError(Exception):
    """The error that the pass has failed on another thread, which has the reason."""


class Pass:
    """The shared state of the threads of one pass.

    Attributes:
        copies: the copies, in the order of issue.
        error: the first error on any thread.
    """

    def __init__(self, copies: int, look: Callable[[], object]) -> None:
        """Initialize with `copies` copies; long waits call `look`, which may raise."""
        self.copies = tuple(Transfer(self) for _ in range(copies))
        self.error: BaseException | None = None
        self._failing = threading.Lock()
        self._look = look

    def fail(self, error: BaseException) -> None:
        """Record `error`, and stop all waiting threads."""
        with self._failing:
            if self.error is None:
                self.error = error
        for copy in self.copies:
            copy.release()

    def wait(self, event: threading.Event) -> None:
        """Wait for `event`.

        Raises:
            StoppedError: another thread has failed.
        """
        while not event.wait(LOOK_S):
            self._look()
        if self.error is not None:
            raise StoppedError


LOOK_S = 0.2  # interval at which a waiting thread checks that the others are alive


@dataclass(frozen=True, slots=True)
class _Layout:
    """The layout of a tensor in its storage, in elements."""

    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Transfer:
    """A copy of one tensor from one memory to another."""

    def __init__(self, under: Pass) -> None:
        self._under = under
        self._sent, self._taken, self._done = threading.Event(), threading.Event(), threading.Event()
        self._layout: _Layout | None = None
        self._made_by: Copy | None = None
        self._events: list[torch.cuda.Event] = []

    def send(self, tensor: torch.Tensor, made_by: Copy | None = None) -> None:
        """Provide `tensor` as the source of the copy.

        Args:
            made_by: the copy that fills `tensor`, if it may be under way; for a transfer, the one that fills its allocated
                memory.
        """
        self._source, self._made_by = tensor, made_by
        self._note(tensor)
        self._sent.set()

    def take(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        """Return memory for the copy: uint8[size_bytes], to be held until the copy is done."""
        target = self._target = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self._note(target)
        self._taken.set()
        return target

    def arrived(self, taken: torch.Tensor) -> torch.Tensor:
        """Wait for the copy; return the tensor in the memory that was `taken` for it."""
        self.finish()
        assert self._layout is not None
        made, at = torch.empty(0, dtype=self._layout.dtype, device=taken.device), self._layout
        return made.set_(taken.untyped_storage(), at.offset, at.shape, at.stride)

    def finish(self) -> None:
        """Wait for the copy.

        Raises:
            StoppedError: the pass has failed.
        """
        self._under.wait(self._done)

    def release(self) -> None:
        """Release all waiting threads after a failed pass."""
        for event in (self._sent, self._taken, self._done):
            event.set()

    def make(self, channel: "Channel") -> None:
        """Execute the copy in the thread of `channel`.

        Raises:
            CopyError: the tensor does not fit the planned bytes, or its copy from the host has failed.
            StoppedError: the pass has failed.
        """
        self._under.wait(self._sent)
        if self._made_by is not None:
            self._made_by.finish()
        self._under.wait(self._taken)
        source, target = self._source, self._target
        at = self._made_by._layout if isinstance(self._made_by, Transfer) else _layout(source)
        assert at is not None
        self._layout, values = _fitting(source, at, len(target))
        channel.copy(values, target[: len(values)], self._events)
        del self._source, self._target, source, target, values  # released before others continue
        self._done.set()

    def _note(self, tensor: torch.Tensor) -> None:
        if tensor.is_cuda:
            self._events.append(torch.cuda.current_stream(tensor.device).record_event())


class Channel:
    """A channel between two memories, which makes one copy at a time."""

    def __init__(self) -> None:
        self._stream: Any = None

    def copy(self, source: torch.Tensor, target: torch.Tensor, after: "list[torch.cuda.Event]") -> None:
        """Copy uint8[n] to uint8[n], and wait for the end."""
        if not (source.is_cuda or target.is_cuda):
            # As arrays: PyTorch would use several threads for each copy.
            np.copyto(target.numpy(), source.numpy())
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream((source if source.is_cuda else target).device)
        for event in after:
            self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        self._stream.synchronize()


def copied(tensor: torch.Tensor, size_bytes: int, device: torch.device) -> torch.Tensor:
    """Return a copy of `tensor` on `device`, as a step makes it if `size_bytes` are planned for it.

    Raises:
        CopyError: it does not fit.
    """
    at, values = _fitting(tensor, _layout(tensor), size_bytes)
    target = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    target[: len(values)].copy_(values)
    return torch.empty(0, dtype=at.dtype, device=device).set_(target.untyped_storage(), at.offset, at.shape, at.stride)


def _layout(tensor: torch.Tensor) -> _Layout:
    return _Layout(tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


def _fitting(source: torch.Tensor, at: _Layout, room_bytes: int) -> tuple[_Layout, torch.Tensor]:
    """Return the layout of the tensor within the bytes to copy, and these bytes.

    The bytes are the whole storage if it fits, since views may read more than the tensor itself. Kernels of another device may
    have made a larger storage than planned, and an input may be a slice of a data set: then they are the part that the tensor
    covers.
    """
    whole = storage_bytes(source)
    if len(whole) <= room_bytes:
        return at, whole
    item_bytes = at.dtype.itemsize
    extent = 0 if 0 in at.shape else 1 + sum((size - 1) * stride for size, stride in zip(at.shape, at.stride, strict=True))
    if extent * item_bytes > room_bytes:
        raise CopyError(
            f"a tensor {str(at.dtype).removeprefix('torch.')}{list(at.shape)} with strides {at.stride} covers "
            f"{format_bytes(extent * item_bytes)}, and {format_bytes(room_bytes)} were planned for its copy: give the step "
            "inputs without gaps (contiguous()), as it was planned for"
        )
    first = at.offset * item_bytes
    return _Layout(at.dtype, 0, at.shape, at.stride), whole[first : first + extent * item_bytes]
