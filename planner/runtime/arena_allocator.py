"""The CPU allocator of arenas: recordings of the requests of steps, and slabs that serve them.

Its C++ side is ``planner/native/arena_allocator.cpp``.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from planner.graphs.errors import OutOfMemoryError, PlannerError
from planner.graphs.units import format_bytes
from planner.memory.arena_rules import LEAST_BYTES
from planner.native.library import find_library, wait_for_library


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request for memory in a recorded step.

    Attributes:
        end: number of requests that came before it was freed; None if it was not.
    """

    size_bytes: int
    end: int | None
    address: int


@dataclass(frozen=True, slots=True)
class Missed:
    """Bytes of requests that were to be in the slab and are not.

    Attributes:
        unmatched_bytes: no request of this size was recorded there.
        occupied_bytes: a tensor in use overlaps its address.
    """

    unmatched_bytes: int = 0
    occupied_bytes: int = 0

    def __add__(self, other: "Missed") -> "Missed":
        return Missed(self.unmatched_bytes + other.unmatched_bytes, self.occupied_bytes + other.occupied_bytes)


class Recording:
    """The requests of one thread while it is active."""

    def __init__(self) -> None:
        self._library = _load_library()
        self._handle = self._library.arena_new_recording()

    def start(self) -> None:
        """Record the requests of this thread from here on."""
        self._library.arena_record(self._handle)

    @property
    def length(self) -> int:
        """The number of requests so far."""
        return int(self._library.arena_requests(self._handle))

    def list_requests(self) -> tuple[RecordedRequest, ...]:
        """Return the requests so far, in order."""
        columns = np.empty((3, self.length), dtype=np.int64)
        self._library.arena_read(self._handle, *map(_get_pointer, columns))
        return tuple(RecordedRequest(size, None if end < 0 else end, address) for size, end, address in columns.T.tolist())

    def __del__(self) -> None:
        self._library.arena_drop_recording(self._handle)


class Addresses:
    """The addresses of the requests of a recorded step, as offsets in a slab.

    Attributes:
        height_bytes: the least size of the slab.
    """

    def __init__(self, height_bytes: int, sizes: Sequence[int], offsets: Sequence[int | None]) -> None:
        """Place requests of `sizes`, each ``LEAST_BYTES`` or more, at `offsets`; those at None are outside of the slab."""
        self.height_bytes = height_bytes
        self._library = _load_library()
        columns = np.array([sizes, [-1 if offset is None else offset for offset in offsets]], dtype=np.int64)
        self._handle = self._library.arena_new_addresses(height_bytes, len(sizes), *map(_get_pointer, columns))

    def start(self, slab: "Slab", requests: range) -> None:
        """Serve the requests of this thread from `slab` from here on, of which those with these numbers are expected."""
        assert self.height_bytes <= slab.size_bytes
        slab.serve(self._handle, requests)

    def __del__(self) -> None:
        self._library.arena_drop_addresses(self._handle)


class Slab:
    """Memory that serves the requests of recorded steps; it is kept until neither this object nor a tensor needs it.

    Attributes:
        address: address of its first byte.
    """

    def __init__(self, size_bytes: int, most_bytes: int = 0) -> None:
        """Take `size_bytes`, where it may grow to `most_bytes`; raise OutOfMemoryError if there is no such memory."""
        self.size_bytes = size_bytes
        self._library = _load_library()
        self._handle = self._library.arena_new_slab(size_bytes, max(size_bytes, most_bytes))
        if not self._handle:
            raise OutOfMemoryError(f"there is no memory for an arena of {format_bytes(size_bytes)}")
        self.address = int(self._library.arena_base(self._handle))

    def grow(self, size_bytes: int) -> bool:
        """Take more memory behind the present one, up to `size_bytes`; return False if there are no such addresses or memory."""
        if self.size_bytes < size_bytes and self._library.arena_grow_slab(self._handle, size_bytes):
            self.size_bytes = size_bytes
        return self.size_bytes >= size_bytes

    def keep_within(self, budget_bytes: int) -> None:
        """Set the bytes that its pages may take, with what is requested beside it while it serves nobody.

        Pages that exceed them are given back to the system before such a request, and those behind them at once; never where
        tensors are.
        """
        self._library.arena_set_budget(self._handle, budget_bytes)

    def serve(self, addresses: Any, requests: range) -> None:
        """Serve the requests of this thread at `addresses`, a handle of the allocator.

        Raises:
            OutOfMemoryError: pages were given back for what ran between steps, and there is no memory for them now.
        """
        if not self._library.arena_serve(self._handle, addresses, requests.start, requests.stop):
            raise OutOfMemoryError(
                f"there is no memory for the pages of an arena of {format_bytes(self.size_bytes)} that were given back between "
                "steps: free what was allocated there, or leave the arena out (arena=False)"
            )

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.arena_drop_slab(self._handle)


def stop() -> Missed:
    """End recording or serving in this thread."""
    missed = (ctypes.c_int64 * 2)()
    _load_library().arena_stop(missed)
    return Missed(*missed)


@contextmanager
def keep_idle_pages() -> Iterator[None]:
    """Keep idle pages of slabs inside the context: steps that take turns then need as long as by themselves."""
    if not _load_library.cache_info().currsize:  # there are none
        yield
        return
    _load_library().arena_keep_pages(True)
    try:
        yield
    finally:
        _load_library().arena_keep_pages(False)


def install() -> None:
    """Put the allocator in place, before the present one; raise PlannerError if it cannot be compiled, or not be in front."""
    _load_library()


def install_if_compiled() -> bool:
    """Put the allocator in place and return True; return False if its library is not compiled yet, or it is impossible."""
    try:
        return find_library() is not None and bool(_load_library())
    except PlannerError:
        return False


def use_large_pages() -> None:
    """Ask the system for large pages for what is requested outside of slabs, from now on, if the library is compiled."""
    if install_if_compiled():
        _load_library().arena_use_large_pages()


@cache
def _load_library() -> ctypes.CDLL:
    handle, number = ctypes.c_void_p, ctypes.c_int64
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "install": (ctypes.c_bool, [number]),
        "new_recording": (handle, []),
        "drop_recording": (None, [handle]),
        "requests": (number, [handle]),
        "read": (None, [handle, handle, handle, handle]),
        "record": (None, [handle]),
        "new_slab": (handle, [number, number]),
        "grow_slab": (ctypes.c_bool, [handle, number]),
        "drop_slab": (None, [handle]),
        "set_budget": (None, [handle, number]),
        "keep_pages": (None, [ctypes.c_bool]),
        "use_large_pages": (None, []),
        "base": (number, [handle]),
        "new_addresses": (handle, [number, number, handle, handle]),
        "drop_addresses": (None, [handle]),
        "serve": (ctypes.c_bool, [handle, handle, number, number]),
        "stop": (None, [handle]),
    }
    try:
        library = wait_for_library().declare("arena", signatures)
    except PlannerError as error:
        raise PlannerError(f"arena=True needs a C++ compiler: {error}, or leave arena=True out") from error
    if not library.arena_install(LEAST_BYTES):
        raise PlannerError(
            "arena=True needs PyTorch's own CPU allocator, and another one is in place that cannot be behind it: leave "
            "arena=True out"
        )
    return library


def _get_pointer(column: "np.ndarray[Any, np.dtype[np.int64]]") -> int:
    return int(column.ctypes.data)
