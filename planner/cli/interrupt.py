"""Ctrl-C as a request to end the solve with the best result so far."""

import os
import signal
from types import FrameType, TracebackType
from typing import Self

from planner.cli.arguments import INTERRUPTED
from planner.progress import LineView


class StopOnInterrupt:
    """A context manager and predicate: the first Ctrl-C makes it return True, the second ends the process at once.

    Until it is asked for the first time there is nothing that could be ended with a result, as while a model is traced: Ctrl-C
    then raises KeyboardInterrupt, as everywhere else.

    Args:
        progress: the view for the note that the solve is being ended.
        ending: the end of the note, which says with which result the solve ends.
    """

    def __init__(self, progress: LineView, *, ending: str = "with the best schedule found so far") -> None:
        self._progress = progress
        self._ending = ending
        self._asked = False
        self._requested = False
        self._said = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._before)

    def __call__(self) -> bool:
        """Return True if to stop. The first time, also print a note: a signal handler must not write."""
        self._asked = True
        if self._requested and not self._said:
            self._said = True
            self._progress.note(f"interrupted: ending {self._ending}; Ctrl-C again to quit at once")
        return self._requested

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._requested:
            self._progress.abandon()
            os._exit(INTERRUPTED)
        if not self._asked:
            raise KeyboardInterrupt
        self._requested = True
