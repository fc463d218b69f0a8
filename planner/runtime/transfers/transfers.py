"""Transfers of tensors from one pool to another: the source sends a tensor, the target takes memory, a channel copies the bytes.

The thread that computes at the source calls ``send``, and ``finish`` before the tensor is freed. The thread that computes at
the target calls ``take``, and ``wait_for_arrival`` before the tensor is read or freed. The host computes nothing: the thread of
the device at the other end calls for both. A copy starts once it has both ends, after the earlier copies of its channel; so on
each channel the copies of a pass are made in the order of the schedule. These are the waits in ``planner.graphs.clocks``.

A collective of several processes is a transfer whose ends are in one place. The thread that computes calls ``start``, which takes
all its memory, and ``finish``, which lets go of it. So what a step holds at each point does not depend on when it ends. On a CUDA
stream that has run on a stand-in only, with neither a GPU nor NCCL.

Copies to the host, copies between devices and collectives were mechanisms of their own before. One took their place, in which the
host is a device that computes nothing.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from planner.graphs.errors import CopyError, PlannerError
from planner.graphs.units import format_bytes
from planner.runtime.transfers.host_memory import Copy, HostBytes, HostTensor, StorageLayout
from planner.runtime.transfers.workers import LOOK_S, is_dead


class TransferStoppedError(CopyError):
    """The error that a copy will not be made, since the pass has failed on another thread, which has the reason."""


class PoolMemory(Protocol):
    """The memory of a pool, as transfers take it."""

    def allocate(self, size_bytes: int) -> Any:
        """Return memory for a tensor of `size_bytes`, which is freed when the result dies."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of a device, counted by PyTorch's allocator."""

    device: torch.device

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Return uint8[size_bytes]; see ``PoolMemory.allocate``."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)


class Begins(Protocol):
    """A function that can be called in two parts."""

    def begin(self, given: Any) -> tuple[Any, Callable[[], None]]:
        """Return the memory of the result, and the function that fills it."""


class Transfer(ABC):
    """A copy of one tensor from one pool to another, or a call. It holds neither the ends nor the pool once it is done.

    Attributes:
        layout: layout of the tensor within the copied bytes; None until it is copied.
        thread: the thread that copies; None if none does, or none yet.
    """

    def __init__(self, name: str, target: PoolMemory, look: Callable[[], object]) -> None:
        """Initialize a transfer to `target`.

        Args:
            name: description of the channel: ``device to host``.
            look: called during long waits; may raise.
        """
        self.layout: StorageLayout | None = None
        self.thread: threading.Thread | None = None
        self._source: torch.Tensor | HostBytes | None = None
        self._target: torch.Tensor | HostBytes | None = None
        self._memory: PoolMemory | None = target
        self._name, self._look = name, look
        self._fill: Callable[[], None] | None = None  # makes the call, and holds its memory
        self._made_by: Transfer | None = None
        self._missing_ends, self._giving = 2, threading.Lock()
        self._known = threading.Event()  # set once the transfer has ended or, on a stream, is launched
        self._error: BaseException | None = None

    def start(self, function: Begins, given: Any) -> Any:
        """Issue the call of `function`; return its result, which is not filled before ``finish``."""
        result, self._fill = function.begin(given)
        self._hold(self._fill, at_target=False)
        self._missing_ends = 0
        self._start((), ())
        return result

    def send(self, tensor: "torch.Tensor | HostTensor", made_by: "Transfer | None" = None) -> None:
        """Provide `tensor` as the source.

        Args:
            made_by: the transfer that makes `tensor`, if it may be under way: `tensor` is then the memory taken for it.

        Raises:
            CopyError: no thread can be started for the copy.
            TransferStoppedError: the pass has failed.
        """
        source = self._source = tensor.bytes if isinstance(tensor, HostTensor) else tensor
        self._made_by = made_by
        self._give(source, at_target=False)

    def take(self, size_bytes: int) -> Any:
        """Allocate and return memory of `size_bytes` for the copy: a tensor on the host, or uint8[size_bytes].

        Raises:
            CopyError: there is no room on the host, or no thread can be started for the copy.
            TransferStoppedError: the pass has failed.
        """
        memory = self._memory
        if memory is None:
            raise TransferStoppedError
        target = memory.allocate(size_bytes)
        self.set_target(target)
        return target

    def set_target(self, target: "torch.Tensor | HostTensor") -> None:
        """Provide existing memory as the target: a tensor on the host, or uint8[n]; see ``take``."""
        end = self._target = target.bytes if isinstance(target, HostTensor) else target
        self._give(end, at_target=True)

    def wait_for_arrival(self, taken: torch.Tensor) -> torch.Tensor:
        """Wait for the copy at the target; return the tensor in the memory that was `taken` for it."""
        self._wait(at_target=True)
        assert self.layout is not None
        return self.layout.view_in(taken)

    def finish(self) -> None:
        """Wait for the copy at the source, or for the call and let go of its memory; raise if it has failed, or the pass."""
        self._wait(at_target=False)
        self._fill = None

    def stop(self) -> None:
        """Release all waiting threads after a failed pass, unless the copy has been started and ends by itself."""
        with self._giving:
            if self._missing_ends > 0 and not self._known.is_set():
                self._fail(TransferStoppedError())

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """True if the copy has ended."""

    @abstractmethod
    def measure_seconds_after(self, earlier: Any) -> float:
        """Return the seconds between the ends of `earlier`, on the same channel, and of this copy; wait for both."""

    @abstractmethod
    def copy(self) -> Copy:
        """Return the copy, for which users of the copied bytes wait; may block until its channel has issued it."""

    @abstractmethod
    def _start(self, after: Sequence[Copy], behind: Sequence[Copy]) -> Copy:
        """Start the copy, and return a handle for users of the copied bytes to wait for.

        Args:
            after: the copies that make the source.
            behind: other copies that use the target.
        """

    @abstractmethod
    def _hold(self, end: torch.Tensor | Callable[[], None], *, at_target: bool) -> None:
        """Note one of the ends on a device, or the call, in the thread that computes there."""

    @abstractmethod
    def _wait(self, *, at_target: bool) -> None:
        """Make the computation at one of the ends wait for the copy."""

    def _give(self, end: torch.Tensor | HostBytes, *, at_target: bool) -> None:
        if isinstance(end, torch.Tensor):
            self._hold(end, at_target=at_target)
        with self._giving:
            if self._known.is_set():  # stopped
                raise TransferStoppedError
            self._missing_ends -= 1
            if self._missing_ends:
                return
        # Of the ends, only memory of the host is held here: the other thread may free its end once the copy has ended.
        source, target = (end if isinstance(end, HostBytes) else None for end in (self._source, self._target))
        after = source.copies[:1] if source is not None else []
        behind = target.users_before if target is not None else ()
        try:
            if self._made_by is not None:
                after = [self._made_by.copy()]
            started = self._start(after, behind)
        except BaseException as error:
            self._fail(error)
            raise
        for host in (source, target):
            if host is not None:
                host.copies.append(started)

    def _run(self, copy: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        """Make the call, or `copy` the bytes to their target."""
        if self._fill is not None:
            self._fill()
        else:
            values, room = self._take_ends()
            copy(room, values)

    def _take_ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the bytes to copy, and where to, and let go of both ends; raise CopyError if the tensor does not fit there."""
        source, target = self._source, self._target
        assert source is not None and target is not None
        if isinstance(source, HostBytes):
            layout, values = source.layout, source.values
        else:
            layout = StorageLayout.of(source) if self._made_by is None else self._made_by.layout
            values = view_storage(source)
        assert layout is not None
        room = target.room if isinstance(target, HostBytes) else target
        self.layout, values = fit_layout(values, layout, len(room))
        room = room[: len(values)]
        if isinstance(target, HostBytes):
            target.layout, target.values = self.layout, room
        self._let_go()
        return values, room

    def _let_go(self) -> None:
        self._source = self._target = self._made_by = self._memory = None

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._let_go()
        self._known.set()

    def _wait_until_known(self) -> None:
        what = f"a {'copy from' if self._fill is None else 'call of'} {self._name}"
        while not self._known.wait(LOOK_S):
            self._look()
            if is_dead(self.thread) and not self._known.is_set():
                raise CopyError(f"{what} was not made: its thread has died; the step can be tried again")
        # A new one each time, without the frames of earlier waiters.
        if isinstance(error := self._error, PlannerError):
            raise type(error)(str(error)) from error
        if error is not None:
            raise CopyError(f"{what} failed: {type(error).__name__}: {error}; the step can be tried again") from error


def copy_tensor(tensor: torch.Tensor, size_bytes: int, device: torch.device) -> torch.Tensor:
    """Return a copy of `tensor` on `device`, as a step makes it; raise CopyError if it does not fit in `size_bytes`."""
    layout, values = fit_layout(view_storage(tensor), StorageLayout.of(tensor), size_bytes)
    target = DeviceMemory(device).allocate(size_bytes)
    target[: len(values)].copy_(values)
    return layout.view_in(target)


def view_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of `tensor` as a uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def fit_layout(whole: torch.Tensor, at: StorageLayout, room_bytes: int) -> tuple[StorageLayout, torch.Tensor]:
    """Return the layout of the tensor within the bytes to copy, and these bytes.

    The bytes are the `whole` storage if it fits, since views may read more than the tensor itself. Kernels of another device may
    have made a larger storage than planned, and an input may be a slice of a data set: then they are the part that the tensor
    covers.
    """
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
    return StorageLayout(at.dtype, 0, at.shape, at.stride), whole[first : first + extent * item_bytes]
