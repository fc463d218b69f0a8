"""Transfers that are calls, such as collectives of several processes: a thread makes the calls of a channel, in their order.

All memory is taken by the thread that computes, when a call starts, and let go by it when it waits for the call. So what a step
holds at each point does not depend on when the calls end. Known weakness: on CUDA there is no such channel yet.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from graphs.errors import CopyError, DeviceError, PlannerError
from planner.runtime.transfers.workers import ThreadedCall, Worker


class Begins(Protocol):
    """A function that can be called in two parts."""

    def begin(self, given: Any) -> tuple[Any, Callable[[], None]]:
        """Return the memory of the result, and the function that fills it."""


class CallChannel:
    """A channel with a thread that calls."""

    def __init__(self, name: str, device: torch.device) -> None:
        """Initialize the channel called `name`.

        Raises:
            DeviceError: `device` is not the CPU.
        """
        if device.type != "cpu":
            raise DeviceError(
                f"collectives run in parallel with computation on the CPU only, and the step runs on {device}: leave out the "
                "option 'overlap'"
            )
        self._name = name
        self._worker = Worker(name, name, CopyError)

    def transfer(self, look: Callable[[], object] = lambda: None) -> "CallTransfer":
        """Return a transfer that is not started; long waits for it call `look`, which may raise."""
        return CallTransfer(self._name, self._worker, look)


class CallTransfer:
    """A call in the thread of its channel."""

    def __init__(self, name: str, worker: Worker, look: Callable[[], object]) -> None:
        """Initialize a call by `worker`."""
        self._name, self._look = name, look
        self._worker: Worker | None = worker
        self._call: ThreadedCall | None = None
        self._fill: Callable[[], None] | None = None

    def start(self, function: Begins, given: Any) -> Any:
        """Issue the call of `function`; return its result, which is not filled before ``finish``.

        Raises:
            CopyError: no thread can be started for it.
        """
        assert self._worker is not None
        result, self._fill = function.begin(given)
        self._call = ThreadedCall(self._fill)
        self._worker.issue(self._call)
        self._worker = None
        return result

    def finish(self) -> None:
        """Wait for the call, and let go of its memory.

        Raises:
            PlannerError: it has failed; a CopyError if that is not an error of its own.
        """
        if (call := self._call) is None:
            return
        call.wait(lambda: self._check(call))
        self._fill = self._call = None
        if isinstance(error := call.error, PlannerError):
            raise type(error)(str(error)) from error
        if error is not None:
            raise CopyError(f"{self._name} failed: {type(error).__name__}: {error}") from error

    def stop(self) -> None:
        """Do nothing: a call that was issued ends by itself, or by the failure of another process."""

    def _check(self, call: ThreadedCall) -> None:
        self._look()
        if call.is_lost:
            raise CopyError(f"{self._name} were not finished: their thread has died; the step can be tried again")
