"""What ops cost on a CUDA device, where they return before they are done, and libraries take memory while they run."""

import ctypes
from collections.abc import Callable
from functools import cache
from time import perf_counter

import torch

from graphs.errors import BudgetError
from graphs.units import format_bytes
from planner.capture.lowering.statics import allocated_bytes
from planner.eager.sizes import KnownOp
from planner.profiling.allocator import cuda_bytes
from planner.runtime.libraries import warm_up_libraries
from planner.torch_private.cuda import on_out_of_memory

_unserved: dict[int, int] = {}  # by device: bytes for which its allocator last had no memory, until somebody asks
FAILURES = ctypes.c_int64(0)  # how often one of the process had none
MEASUREMENTS = 2  # of each signature: the first loads kernels and lets libraries choose


@cache
def _note_unserved() -> None:
    def note(index: int, asked_bytes: int) -> None:
        _unserved[index] = asked_bytes
        FAILURES.value += 1

    on_out_of_memory(note)


class DeviceCosts:
    """Measures the first executions of each signature, for which the host waits for the device.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._taken = 0
        self._start = 0.0
        _note_unserved()

    def in_use_bytes(self) -> int:
        """Return the bytes in use on the device, with workspaces that libraries keep."""
        warm_up_libraries(self._device)
        return cuda_bytes(self._device)

    def forget_failures(self) -> None:
        """Forget that the allocator has had no memory: an op begins."""
        _unserved.clear()

    def find_block(self, size_bytes: int, evict_after: Callable[[Exception], bool]) -> None:
        """Make the allocator have free memory in one piece, as far as evictions go.

        For ops whose library has other algorithms for when it gets no workspace: it keeps to them, and their bits differ.
        """
        while True:
            try:
                torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
            except torch.OutOfMemoryError as error:
                if not evict_after(error):
                    return
            else:
                return

    def check_memory(self, function: object) -> None:
        """Raise if an op has succeeded although the allocator had no memory for a part of it.

        Raises:
            BudgetError: a library has then run another algorithm.
        """
        if _unserved:
            size_bytes = _unserved.pop(self._device.index, None)
            if size_bytes is not None:
                raise BudgetError(
                    f"{function} had no memory for a workspace of {format_bytes(size_bytes)}, and its library has taken another "
                    "algorithm, whose bits can differ: raise the budget, or let it count tensors only, with memory='allocated'"
                )

    def start(self, known: KnownOp) -> bool:
        """Begin an op, and to measure it unless that has been done for its signature; return whether it is measured.

        Ops whose sizes depend on more than a signature are measured each time.
        """
        self.forget_failures()
        if known.number and known.measurements == MEASUREMENTS:
            return False
        known.measurements += 1
        self.begin()
        return True

    def begin(self) -> None:
        """Begin to measure an op."""
        torch.cuda.synchronize(self._device)
        self._taken = self._taken_so_far()
        self._start = perf_counter()

    def stop(self) -> tuple[float, int]:
        """Return the seconds of the op, and the bytes that it has allocated: at least what it had at once."""
        torch.cuda.synchronize(self._device)
        seconds = perf_counter() - self._start
        return seconds, allocated_bytes(self._taken_so_far() - self._taken, self._device)

    def _taken_so_far(self) -> int:
        # Counts upwards, so that no peak has to be reset, which may be the user's.
        return int(torch.cuda.memory_stats(self._device)["requested_bytes.all.allocated"])


def costs_of(device: torch.device) -> DeviceCosts | None:
    """Return what measures the ops of a device that works behind the host's back; None for the CPU."""
    return DeviceCosts(device) if device.type == "cuda" else None
