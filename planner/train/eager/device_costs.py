"""Time and memory of ops: on the CPU, and on a CUDA device, where ops return before they are done."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from threading import get_ident
from time import perf_counter

import torch

from graphs.errors import BudgetError
from graphs.units import format_bytes
from planner.capture.lowering.statics import compute_allocated_bytes
from planner.runtime.allocator import get_cuda_bytes
from planner.runtime.libraries import warm_up_libraries
from planner.torch_private.core import begin_allocations, end_allocations, profiler_enabled
from planner.torch_private.cuda import allocate_raw, free_raw, notify_out_of_memory
from planner.train.eager.deferred_log import note_failure
from planner.train.eager.sizes import KnownOp

# By thread and device: bytes of the allocator's last failed request, until it is checked.
unserved: dict[tuple[int, int | None], int] = {}
MEASUREMENTS = 2  # of each signature: in the first, kernels are loaded and libraries choose algorithms


@cache
def _note_unserved() -> None:
    def note(index: int, asked_bytes: int) -> None:
        unserved[get_ident(), index] = asked_bytes
        note_failure(index)

    notify_out_of_memory(note)


class OpCosts(ABC):
    """Measures the first executions of each signature.

    Attributes:
        times_each: ops are done when they return, so that each is timed, measured or not.
    """

    times_each: bool

    def start(self, known: KnownOp) -> bool:
        """Start an op, and its measurement unless its signature was measured before; return whether it is measured.

        Ops whose sizes depend on more than a signature are measured each time.
        """
        self.forget_failures()
        if (known.number and known.measurements == MEASUREMENTS) or not self.begin():
            return False
        known.measurements += 1
        return True

    @abstractmethod
    def begin(self) -> bool:
        """Begin to measure an op, and return True; return False if it cannot be measured."""

    @abstractmethod
    def stop(self) -> tuple[float, int]:
        """Return the seconds of the op, and the most bytes that it has taken, with its outputs."""

    @abstractmethod
    def get_in_use_bytes(self) -> int:
        """Return the bytes in use on the device, including workspaces that libraries keep; 0 if that is not known."""

    @abstractmethod
    def find_missing_block(self, size_bytes: int) -> torch.OutOfMemoryError | None:
        """Return the error of the allocator if it has no free block of `size_bytes`, else None."""

    @abstractmethod
    def forget_failures(self) -> None:
        """Forget failed requests to the allocator before an op."""

    @abstractmethod
    def check_memory(self, function: object) -> None:
        """Raise an error if an op has succeeded although the allocator had no memory for its workspace.

        Raises:
            BudgetError: the library has used another algorithm.
        """

    def find_block(self, size_bytes: int, evict_after: Callable[[Exception], bool]) -> None:
        """Evict until the allocator has a free block of `size_bytes`, or nothing is left to evict.

        This is for ops whose library uses another algorithm if it gets no workspace, and keeps using it from then on. Its results
        may differ in some bits.
        """
        while (error := self.find_missing_block(size_bytes)) is not None and evict_after(error):
            pass


class HostCosts(OpCosts):
    """The memory of ops on the CPU, by the allocator's events. While another profiler runs, it cannot be measured."""

    times_each = True

    def __init__(self) -> None:
        self._start = 0.0

    def begin(self) -> bool:
        """Begin to measure an op, and return True; return False if a profiler runs."""
        if profiler_enabled():
            return False
        begin_allocations()
        self._start = perf_counter()
        return True

    def stop(self) -> tuple[float, int]:
        """Return the seconds of the op, and the most bytes that it has taken, with its outputs."""
        seconds = perf_counter() - self._start
        return seconds, max(accumulate(end_allocations(), initial=0))

    def get_in_use_bytes(self) -> int:
        """Return 0: Python knows of all tensors on the CPU."""
        return 0

    def find_missing_block(self, size_bytes: int) -> None:
        """Return None: kernels on the CPU do not depend on free memory."""

    def forget_failures(self) -> None:
        """Do nothing: an op on the CPU fails if it has no memory."""

    def check_memory(self, function: object) -> None:
        """Do nothing: an op on the CPU fails if it has no memory."""


class DeviceCosts(OpCosts):
    """The costs of ops on a CUDA device. The host waits for the device while they are measured.

    Args:
        device: a CUDA device.
    """

    times_each = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._taken = 0
        self._start = 0.0
        _note_unserved()

    def get_in_use_bytes(self) -> int:
        """Return the bytes in use on the device, including workspaces that libraries keep."""
        warm_up_libraries(self._device)
        return get_cuda_bytes(self._device)

    def forget_failures(self) -> None:
        """Forget failed requests to the allocator before an op."""
        if unserved:
            unserved.pop((get_ident(), self._device.index), None)

    def find_missing_block(self, size_bytes: int) -> torch.OutOfMemoryError | None:
        """Return the error of the allocator if it has no free block of `size_bytes`, else None."""
        try:
            with torch.cuda.device(self._device):  # a tensor would be filled under deterministic algorithms
                free_raw(allocate_raw(size_bytes, torch.cuda.current_stream()))
        except torch.OutOfMemoryError as error:
            return error
        return None

    def check_memory(self, function: object) -> None:
        """Raise an error if an op has succeeded although the allocator had no memory for its workspace.

        Raises:
            BudgetError: the library has used another algorithm.
        """
        if unserved:
            size_bytes = unserved.pop((get_ident(), self._device.index), None)
            if size_bytes is not None:
                raise BudgetError(
                    f"{function} had no memory for a workspace of {format_bytes(size_bytes)}, so its library used another "
                    "algorithm, whose results may differ in some bits: raise the budget, or let it count only tensors with "
                    "memory='allocated'"
                )

    def begin(self) -> bool:
        """Begin to measure an op, and return True."""
        torch.cuda.synchronize(self._device)
        self._taken = self._get_taken_bytes()
        self._start = perf_counter()
        return True

    def stop(self) -> tuple[float, int]:
        """Return the seconds of the op, and the bytes that it has allocated in total, which are at least its peak."""
        torch.cuda.synchronize(self._device)
        seconds = perf_counter() - self._start
        return seconds, compute_allocated_bytes(self._get_taken_bytes() - self._taken, self._device)

    def _get_taken_bytes(self) -> int:
        # A counter that only increases: resetting a peak would change the user's statistics. As nested dictionaries they take a
        # tenth of the time of the flat one.
        return int(torch.cuda.memory_stats_as_nested_dict(self._device)["requested_bytes"]["all"]["allocated"])


def create_costs(device: torch.device) -> OpCosts:
    """Return an object that measures the ops of `device`."""
    return DeviceCosts(device) if device.type == "cuda" else HostCosts()
