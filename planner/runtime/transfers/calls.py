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


class CallChannel:
    """A channel with a thread or, on CUDA, a stream for calls."""

    def __init__(self, name: str, device: torch.device) -> None:
        """Initialize the channel called `name`."""
        self._name, self._device = name, device
        self._on = torch.cuda.Stream(device) if device.type == "cuda" else Worker(name, name, CopyError)

    def transfer(self, look: Callable[[], object] = lambda: None) -> "CallTransfer":
        """Return a transfer that is not started; long waits for it call `look`, which may raise."""
        return CallTransfer(self, look)

    def issue(self, fill: Callable[[], None]) -> ThreadedCall | torch.cuda.Event:
        """Issue the call of `fill`; return what can be waited for."""
        if isinstance(self._on, Worker):
            call = ThreadedCall(fill)
            self._on.issue(call)
            return call
        stream = self._on
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            fill()
        ended: torch.cuda.Event = stream.record_event()
        return ended

    def wait(self, issued: ThreadedCall | torch.cuda.Event, look: Callable[[], object]) -> None:
        """Make the computation wait for a call; see ``CallTransfer.finish``."""
        if not isinstance(issued, ThreadedCall):
            torch.cuda.current_stream(self._device).wait_event(issued)
            return
        issued.wait(lambda: self._check(issued, look))
        if isinstance(error := issued.error, PlannerError):
            raise type(error)(str(error)) from error
        if error is not None:
            raise CopyError(f"{self._name} failed: {type(error).__name__}: {error}") from error

    def _check(self, call: ThreadedCall, look: Callable[[], object]) -> None:
        look()
        if call.is_lost:
            raise CopyError(f"{self._name} were not finished: their thread has died; the step can be tried again")


class CallTransfer:
    """A call that runs in parallel with the computation."""

    def __init__(self, channel: CallChannel, look: Callable[[], object]) -> None:
        """Initialize a call on `channel`."""
        self._channel, self._look = channel, look
        # With the function that holds all memory of the call.
        self._issued: tuple[ThreadedCall | torch.cuda.Event, Callable[[], None]] | None = None

    def start(self, function: Begins, given: Any) -> Any:
        """Issue the call of `function`; return its result, which is not filled before ``finish``."""
        result, fill = function.begin(given)
        self._issued = self._channel.issue(fill), fill
        return result

    def finish(self) -> None:
        """Make the computation wait for the call, and let go of its memory; raise if it has failed."""
        if self._issued is not None:
            self._channel.wait(self._issued[0], self._look)
        self._issued = None

    def stop(self) -> None:
        """Do nothing: a call that was issued ends by itself, or by the failure of another process."""

    def __del__(self) -> None:
        # For steps that were dropped halfway: memory of a device must not be reused before the call ends.
        if self._issued is not None and not isinstance(self._issued[0], ThreadedCall):
            self.finish()
