"""Transfers between memories of the CPU, by a thread for each channel."""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from planner.graphs.errors import CopyError
from planner.runtime.transfers.host_memory import Copy, wait_for_end
from planner.runtime.transfers.transfers import PoolMemory, Transfer
from planner.runtime.transfers.workers import Worker


class ThreadChannel:
    """A channel with a thread."""

    def __init__(self, name: str, target: PoolMemory) -> None:
        """Initialize the channel called `name`, as in ``device to host``, to the memory `target`."""
        self._name, self._target = name, target
        self.worker = Worker(name, f"copies from {name}", CopyError)

    def transfer(self, look: Callable[[], object] = lambda: None) -> "ThreadTransfer":
        """Return a transfer that is not started; long waits for it call `look`, which may raise."""
        return ThreadTransfer(self._name, self._target, look, self.worker)


class ThreadTransfer(Transfer):
    """A transfer by a thread."""

    def __init__(self, name: str, target: PoolMemory, look: Callable[[], object], worker: Worker) -> None:
        """Initialize a transfer by `worker`; see ``Transfer``."""
        super().__init__(name, target, look)
        self.worker: Worker | None = worker

    def make(self) -> None:
        """Execute the copy in the channel's thread."""
        try:
            self._copy()
        except BaseException as error:  # noqa: BLE001  # whoever waits for it hears of it
            self._fail(error)
        else:
            self._known.set()

    @property
    def has_ended(self) -> bool:
        """True if the copy has ended."""
        return self._known.is_set()

    def measure_seconds_after(self, earlier: "ThreadTransfer") -> float:
        """Return the seconds since the end of `earlier`; see ``Transfer.measure_seconds_after``."""
        earlier.finish()
        self.finish()
        return self._ended_s - earlier._ended_s

    def copy(self) -> Copy:
        """Return the transfer itself; see ``Transfer.copy``."""
        return self

    def _start(self, after: Sequence[Copy], behind: Sequence[Copy]) -> Copy:
        assert self.worker is not None
        self._after, self._behind = after, behind
        self.worker.issue(self)
        self.worker = None  # which host memory would hold by its copies
        return self

    def _copy(self) -> None:
        for copy in self._after:
            copy.finish()
        for copy in self._behind:
            wait_for_end(copy)
        self._after = self._behind = ()
        with torch.no_grad():  # and copies as arrays: PyTorch would use several threads for each
            self._run(lambda room, values: np.copyto(room.numpy(), values.numpy()))
        self._ended_s = time.perf_counter()

    def _hold(self, end: torch.Tensor | Callable[[], None], *, at_target: bool) -> None:
        """Do nothing: memory of the CPU is held until the copy has ended, or the call is waited for."""

    def _wait(self, *, at_target: bool) -> None:
        del at_target
        self._wait_until_known()
