"""What ops cost on a CUDA device, where they return before they are done, and libraries take memory while they run."""

from time import perf_counter

import torch

from planner.capture.lowering.statics import allocated_bytes
from planner.profiling.allocator import cuda_bytes
from planner.runtime.libraries import warm_up_libraries

_EXECUTIONS = 2  # measured of each signature: the first loads kernels and lets libraries choose


class DeviceCosts:
    """Measures the first executions of each signature, for which the host waits for the device.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._executions: dict[int, int] = {}
        self._taken = 0
        self._start = 0.0

    def in_use_bytes(self) -> int:
        """Return the bytes in use on the device, with workspaces that libraries keep."""
        warm_up_libraries(self._device)
        return cuda_bytes(self._device)

    def start(self, number: int) -> bool:
        """Begin to measure an op whose signature has this number, unless it has been measured; return whether it is.

        Ops without a number, which is 0 then, are measured each time.
        """
        executions = self._executions.get(number, 0)
        if number and executions == _EXECUTIONS:
            return False
        self._executions[number] = executions + 1
        torch.cuda.synchronize(self._device)
        self._taken = self._taken_so_far()
        self._start = perf_counter()
        return True

    def stop(self) -> tuple[float, int]:
        """Return the seconds of the op, and the bytes that it has allocated: at least what it had at once."""
        torch.cuda.synchronize(self._device)
        seconds = perf_counter() - self._start
        return seconds, allocated_bytes(self._taken_so_far() - self._taken, self._device)

    def _taken_so_far(self) -> int:
        # Counts upwards, so that no peak has to be reset, which may be the user's.
        return int(torch.cuda.memory_stats(self._device)["requested_bytes.all.allocated"])
