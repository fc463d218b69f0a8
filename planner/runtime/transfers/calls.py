"""Transfers that are calls, such as collectives of several processes: the calls of a channel are made in their order.

All memory is taken by the thread that computes, when a call starts, and let go by it when it waits for the call. So what a step
holds at each point does not depend on when the calls end. On the CPU a thread makes the calls; on CUDA they are launched on a
stream. The latter has run on a stand-in only, with neither a GPU nor NCCL.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from graphs.errors import CopyError, PlannerError
from planner.runtime.transfers.workers import ThreadedCall, Worker


class Begins(Protocol):
    """A function that can be called in two parts."""

    def begin(self, given: Any) -> tuple[Any, Callable[[], None]]:
        """Return the memory of the result, and the function that fills it."""


class CallTransfer(Protocol):
    """A call that runs in parallel with the computation."""

    def start(self, function: Begins, given: Any) -> Any:
        """Issue the call of `function`; return its result, which is not filled before ``finish``.

        Raises:
            CopyError: no thread can be started for it.
        """

    def finish(self) -> None:
        """Make the computation wait for the call, and let go of its memory.

        Raises:
            PlannerError: it has failed; a CopyError if that is not an error of its own.
        """

    def stop(self) -> None:
        """Do nothing: a call that was issued ends by itself, or by the failure of another process."""


class CallChannel:
    """A channel with a thread or, on CUDA, a stream for calls."""

    def __init__(self, name: str, device: torch.device) -> None:
        """Initialize the channel called `name`."""
        self._name = name
        self._on = torch.cuda.Stream(device) if device.type == "cuda" else Worker(name, name, CopyError)

    def transfer(self, look: Callable[[], object] = lambda: None) -> CallTransfer:
        """Return a transfer that is not started; long waits for it call `look`, which may raise."""
        return ThreadCall(self._name, self._on, look) if isinstance(self._on, Worker) else StreamCall(self._on)


class StreamCall:
    """A call whose work is launched on a stream, by the thread that computes."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """Initialize a call on `stream`."""
        self._stream = stream
        self._ended: torch.cuda.Event | None = None
        self._fill: Callable[[], None] | None = None  # it holds all memory of the call

    def start(self, function: Begins, given: Any) -> Any:
        """Launch the call of `function`; see ``CallTransfer.start``."""
        result, self._fill = function.begin(given)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._fill()
        self._ended = self._stream.record_event()
        return result

    def finish(self) -> None:
        """Make the stream of the computation wait; see ``CallTransfer.finish``."""
        if self._ended is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._ended)
        self._ended = self._fill = None

    def stop(self) -> None:
        """Do nothing; see ``CallTransfer.stop``."""

    def __del__(self) -> None:
        self.finish()  # for steps that were dropped halfway: their memory must not be reused before the call ends


class ThreadCall:
    """A call in the thread of its channel."""

    def __init__(self, name: str, worker: Worker, look: Callable[[], object]) -> None:
        """Initialize a call by `worker`."""
        self._name, self._look = name, look
        self._worker: Worker | None = worker
        self._call: ThreadedCall | None = None
        self._fill: Callable[[], None] | None = None

    def start(self, function: Begins, given: Any) -> Any:
        """Issue the call of `function`; see ``CallTransfer.start``."""
        assert self._worker is not None
        result, self._fill = function.begin(given)
        self._call = ThreadedCall(self._fill)
        self._worker.issue(self._call)
        self._worker = None
        return result

    def finish(self) -> None:
        """Wait for the call; see ``CallTransfer.finish``."""
        if (call := self._call) is None:
            return
        call.wait(lambda: self._check(call))
        self._fill = self._call = None
        if isinstance(error := call.error, PlannerError):
            raise type(error)(str(error)) from error
        if error is not None:
            raise CopyError(f"{self._name} failed: {type(error).__name__}: {error}") from error

    def stop(self) -> None:
        """Do nothing; see ``CallTransfer.stop``."""

    def _check(self, call: ThreadedCall) -> None:
        self._look()
        if call.is_lost:
            raise CopyError(f"{self._name} were not finished: their thread has died; the step can be tried again")
