"""The machine that the stand-in stands for: its devices, streams, threads, and what it has found wrong."""

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from random import Random

import numpy as np
import torch

from planner.graphs.allocators.caching import PoolId
from tests.support.cuda_device.memory import DeviceMemory
from tests.support.cuda_device.streams import Order, Stream, Work


class Generator(torch.Generator):
    """Of a device: its state cannot be looked at in a capture."""

    machine: "Machine"

    def get_state(self) -> torch.Tensor:
        self.machine.check_may_wait("reading the state of a generator")
        return super().get_state()

    def set_state(self, state: torch.Tensor) -> "Generator":
        self.machine.check_may_wait("setting the state of a generator")
        super().set_state(state)
        return self


class Machine:
    """Devices whose work is done in `order`.

    Attributes:
        lock: held by whoever changes or runs anything of it.
        streams: of all devices, those that are current by default first.
        memories, generators: of each device.
        locked: memory of the host that was page-locked where it was: sizes by address.
        pinned: page-locked memory of PyTorch's own: likewise.
        wrong: what was done that would be undefined on CUDA.
        passes: threads that backward passes ran in.
    """

    def __init__(self, devices: int, order: Order, seed: int, capacity_bytes: int | None) -> None:
        self.order, self.random = order, Random(seed)
        self.lock = threading.RLock()
        self.numbers, self._pools = count(), count(1)
        self.streams: list[Stream] = []
        self.defaults = [Stream(self, index) for index in range(devices)]
        self.memories = [DeviceMemory(self, index, capacity_bytes) for index in range(devices)]
        self.generators = [Generator() for _ in range(devices)]
        for generator in self.generators:
            generator.machine = self
            generator.manual_seed(0)
        self.locked: dict[int, int] = {}
        self.pinned: dict[int, int] = {}
        self.wrong: list[str] = []
        self.passes: set[int] = set()
        self._here = threading.local()
        self._running = False

    @property
    def device(self) -> int:
        """The current device of this thread."""
        return getattr(self._here, "device", 0)

    @device.setter
    def device(self, index: int) -> None:
        self._here.device = index

    @property
    def capturing(self) -> bool:
        """True if this thread captures."""
        return getattr(self._here, "capturing", False)

    @capturing.setter
    def capturing(self, value: bool) -> None:
        self._here.capturing = value

    def current(self, index: int) -> Stream:
        """The current stream of a device in this thread."""
        return self._currents().get(index, self.defaults[index])

    def currents(self) -> dict[int, Stream]:
        """The streams that were made current in this thread."""
        return dict(self._currents())

    @contextmanager
    def made_current(self, stream: Stream | None) -> Iterator[None]:
        """Inside, `stream` is the current one of its device, and that device the current one."""
        if stream is None:
            yield
            return
        device, before = self.device, self.current(stream.device.index)
        self.make_current(stream)
        try:
            yield
        finally:
            self.make_current(before)
            self.device = device

    def make_current(self, stream: Stream) -> None:
        """Make `stream` the current one of its device, and that device the current one."""
        self.device = stream.device.index
        self._currents()[self.device] = stream

    def check_may_wait(self, what: str = "waiting for the device") -> None:
        """Refuse what a capture refuses."""
        if self.capturing:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")

    def new_pool(self) -> PoolId:
        """A pool of memory for graphs."""
        return (0, next(self._pools))

    def forget_ended(self, streams: Iterable[Stream]) -> None:
        """Forget those of `streams` that have nothing left to do."""
        with self.lock:
            ended = {stream for stream in streams if not stream.queue}
            self.streams = [stream for stream in self.streams if stream not in ended]

    def is_locked(self, tensor: torch.Tensor) -> bool:
        """True if the host memory of `tensor` was page-locked where it was: nobody keeps it for a copy."""
        return _is_within(tensor, self.locked)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """True if the host memory of `tensor` is page-locked memory of PyTorch's own, which keeps it for a copy."""
        return _is_within(tensor, self.pinned)

    def pinned_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor like one of the host, in page-locked memory."""
        self.check_may_wait("page-locking memory")
        values = np.empty(tensor.untyped_storage().nbytes(), dtype=np.uint8)
        self.pinned[values.ctypes.data] = values.nbytes
        weakref.finalize(values, self.pinned.pop, values.ctypes.data).atexit = False
        made = torch.from_numpy(values).untyped_storage()
        return tensor.set_(made, 0, tensor.size(), tensor.stride())

    def lock_memory(self, address: int, size_bytes: int) -> None:
        """Page-lock memory of the host."""
        self.check_may_wait("page-locking memory")
        assert address % 4096 == size_bytes % 4096 == 0 and address not in self.locked
        self.locked[address] = size_bytes

    def unlock_memory(self, address: int) -> None:
        """Let memory of the host be paged again: nothing that was launched may use it."""
        self.check_may_wait("unlocking memory")
        end = address + self.locked[address]
        for stream in self.streams:
            for queued in list(stream.queue):
                used = queued.item.host if isinstance(queued.item, Work) else ()
                if any(first < end and address < first + size for first, size in used):
                    self.wrong.append("memory of the host was unlocked while a copy uses it")
        self.synchronize()  # it goes now
        del self.locked[address]

    def synchronize(self, index: int | None = None) -> None:
        """Do all that was launched, on one device or on all."""
        for stream in list(self.streams):
            if index is None or stream.device.index == index:
                stream.run_to(stream.issued)

    def look(self) -> None:
        """Let streams go on that do so without being waited for."""
        if self._running:
            return
        self._running = True
        try:
            self._go_on()
        finally:
            self._running = False

    def meddle(self, wanted: Stream) -> None:
        """Let others go on before `wanted` does the next piece of work."""
        if self.order is Order.OTHERS_FIRST:
            self._exhaust(stream for stream in self.streams if stream is not wanted and not stream.is_default)
        elif self.order is Order.RANDOM:
            self._go_on()

    def _go_on(self) -> None:
        if self.order is Order.OTHERS_LATE:
            self._exhaust(iter(self.defaults))
        elif self.order is Order.OTHERS_FIRST:
            self._exhaust(stream for stream in self.streams if not stream.is_default)
        elif self.order is Order.RANDOM:
            while self.random.random() < 0.6:
                self.random.choice(self.streams).advance()

    def _exhaust(self, streams: Iterator[Stream]) -> None:
        waiting = list(streams)
        while any([stream.advance() for stream in waiting]):  # noqa: C419  # all of them, turn by turn
            pass

    def _currents(self) -> dict[int, Stream]:
        if not hasattr(self._here, "currents"):
            self._here.currents = {}
        currents: dict[int, Stream] = self._here.currents
        return currents


def _is_within(tensor: torch.Tensor, known: dict[int, int]) -> bool:
    storage = tensor.untyped_storage()
    begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    return any(address <= begin and end <= address + size for address, size in list(known.items()))
