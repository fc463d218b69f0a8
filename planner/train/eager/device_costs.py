"""Time and memory of ops: on the CPU, and on a CUDA device, where ops return before they are done."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from threading import get_ident
from time import perf_counter

import torch

from planner.capture.lowering.statics import compute_allocated_bytes
from planner.graphs.errors import BudgetError
from planner.graphs.units import format_bytes
from planner.runtime.allocator import get_cuda_bytes
from planner.runtime.libraries import warm_up_libraries
from planner.torch_private.cuda import allocate_raw, free_raw, notify_out_of_memory
from planner.train.eager.operators import Operator
from planner.train.eager.sizes import KnownOp

# By thread and device: bytes of the allocator's last failed request, until it is checked.
unserved: dict[tuple[int, int | None], int] = {}
MEASUREMENTS = 2  # of each signature: in the first, kernels are loaded and libraries choose algorithms
_ENOUGH = 8  # measurements of an operator, to estimate what it takes in other sizes


@cache
def _note_unserved() -> None:
    def note(index: int, asked_bytes: int) -> None:
        unserved[get_ident(), index] = asked_bytes

    notify_out_of_memory(note)


@dataclass(slots=True)
class _Measured:
    """What an operator has taken in its measured executions: sums, and the most workspace with the bytes moved beside it."""

    executions: int = 0
    seconds: float = 0.0
    moved_bytes: int = 0
    workspace_bytes: int = 0
    workspace_of_bytes: int = 1


class OpCosts:
    """What the first executions of each signature take: on the CPU the C++ library measures it.

    Attributes:
        times_each: ops are done when they return, so that each is timed, measured or not.
    """

    times_each = True

    def get_in_use_bytes(self) -> int:
        """Return 0: Python knows of all tensors on the CPU."""
        return 0


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
        self._measured: defaultdict[str, _Measured] = defaultdict(_Measured)  # by the name of the operator
        _note_unserved()

    def get_in_use_bytes(self) -> int:
        """Return the bytes in use on the device, including workspaces that libraries keep."""
        warm_up_libraries(self._device)
        return get_cuda_bytes(self._device)

    def forget_failures(self) -> None:
        """Forget failed requests to the allocator before an op."""
        if unserved:
            unserved.pop((get_ident(), self._device.index), None)

    def find_block(self, size_bytes: int, evict_after: Callable[[Exception], bool]) -> None:
        """Evict until the allocator has a free block of `size_bytes`, or nothing is left to evict.

        This is for ops whose library uses another algorithm if it gets no workspace, and keeps using it from then on. Its results
        may differ in some bits.
        """
        while (error := self.find_missing_block(size_bytes)) is not None and evict_after(error):
            pass

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

    def start(self, known: KnownOp) -> bool:
        """Start an op, and its measurement unless its signature was measured before; return whether it is measured.

        Ops whose sizes depend on more than a signature are measured each time.
        """
        self.forget_failures()
        is_measured = not known.number or known.measurements < MEASUREMENTS
        if is_measured:
            known.measurements += 1
            self.begin()
        return is_measured

    def begin(self) -> None:
        """Begin to measure an op."""
        torch.cuda.synchronize(self._device)
        self._taken = self._get_taken_bytes()
        self._start = perf_counter()

    def stop(self) -> tuple[float, int]:
        """Return the seconds of the op, and the bytes that it has allocated in total, which are at least its peak."""
        torch.cuda.synchronize(self._device)
        seconds = perf_counter() - self._start
        return seconds, compute_allocated_bytes(self._get_taken_bytes() - self._taken, self._device)

    def note(self, operator: Operator, moved_bytes: int, seconds: float, workspace_bytes: int) -> None:
        """Note what an op has taken that was measured, and the bytes that it has read and made."""
        measured = self._measured[operator.name]
        measured.executions += 1
        if measured.executions > MEASUREMENTS:  # the first ones load kernels
            measured.seconds += seconds
            measured.moved_bytes += moved_bytes
        if workspace_bytes > measured.workspace_bytes:
            measured.workspace_bytes, measured.workspace_of_bytes = workspace_bytes, max(moved_bytes, 1)

    def estimate(self, operator: Operator, known: KnownOp, read_bytes: int) -> int:
        """Estimate what an op of a new signature takes that reads `read_bytes`, so that the host need not wait for it.

        Return the most workspace that the operator has taken so far, by which the peak is estimated: what grows with the sizes is
        an upper bound.
        """
        measured = self._measured[operator.name]
        if known.measurements or known.needs_block or measured.executions < _ENOUGH:
            return 0
        moved_bytes = known.out_bytes + read_bytes
        known.measurements = MEASUREMENTS
        known.seconds = measured.seconds / max(measured.moved_bytes, 1) * moved_bytes
        known.workspace_bytes = int(measured.workspace_bytes * max(moved_bytes / measured.workspace_of_bytes, 1.0))
        known.guessed = True
        return measured.workspace_bytes

    def _get_taken_bytes(self) -> int:
        # A counter that only increases: resetting a peak would change the user's statistics. As nested dictionaries they take a
        # tenth of the time of the flat one.
        return int(torch.cuda.memory_stats_as_nested_dict(self._device)["requested_bytes"]["all"]["allocated"])


def create_costs(device: torch.device) -> OpCosts:
    """Return an object that measures the ops of `device`."""
    return DeviceCosts(device) if device.type == "cuda" else OpCosts()
