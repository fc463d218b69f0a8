"""Progress on a terminal: one line, rewritten in place, on stderr.

If stderr is not a terminal, a plain line every ten seconds instead. Rich draws the line, from a thread of its own; a process that
is about to exit cannot wait for that thread's locks, and writes what shows the cursor again itself.
"""

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from planner.graphs.escape import escape_text
from planner.progress.describe import describe
from planner.progress.stages import Event, Progress

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

PLAIN_EVERY_S = 10.0


class LineView:
    """A view that shows the last report and the elapsed seconds in one line, and leaves the summary at the end.

    As a context manager it stays open for several plannings, or for reports that are plain text.

    Args:
        quiet: show nothing.
        stream: the output, stderr if None.
        clock: returns increasing seconds.
    """

    def __init__(self, *, quiet: bool = False, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream if stream is not None else sys.stderr
        # A process may be started without a stderr.
        self._quiet = quiet or self._stream is None
        self._clock = clock
        self._text = ""
        self._is_open = self._stays_open = False
        self._start_s = clock()
        self._next_plain_s = PLAIN_EVERY_S
        self._live: Live | None = None

    def __enter__(self) -> Self:
        self._stays_open = True
        self._open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stays_open = False
        self.close()

    def __call__(self, progress: Progress) -> None:
        """Show the state of planning."""
        if progress.event not in (Event.DONE, Event.FAILED):
            self.show_activity(describe(progress))
            return
        if not self._stays_open:
            self.close()
        self._text = ""
        if progress.summary:
            self.note(progress.summary)

    def show_activity(self, activity: str) -> None:
        """Show the present activity; if stderr is not a terminal, at most every ten seconds."""
        self._text = escape_text(activity)
        self._open()
        seconds = self._clock() - self._start_s
        if self._live is None and seconds >= self._next_plain_s:
            self._next_plain_s = seconds + PLAIN_EVERY_S
            self.note(f"{self._text}, {seconds:.0f} s")

    def note(self, text: str) -> None:
        """Write a line that stays."""
        if self._quiet:
            return
        text = escape_text(text)
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False, emoji=False)
        else:
            self._stream.write(f"planner: {text}\n")
            self._stream.flush()

    def close(self) -> None:
        """Remove the line and show the cursor again."""
        self._is_open = False
        if self._live is not None:
            self._live.stop()
            self._live = None

    def abandon(self) -> None:
        """Show the cursor again, without locks or buffers: for a process that is about to exit."""
        if self._live is not None:
            os.write(self._stream.fileno(), b"\r\x1b[K\x1b[?25h")

    def _open(self) -> None:
        if self._is_open:
            return
        self._is_open = True
        self._start_s, self._next_plain_s = self._clock(), PLAIN_EVERY_S
        if not self._quiet and self._stream.isatty():
            # Imported here: commands without progress need not load it.
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._stream)
            self._live = Live(
                console=console, get_renderable=self._build_line, transient=True, refresh_per_second=5, redirect_stdout=False
            )
            self._live.start(refresh=True)

    def _build_line(self) -> "Text":
        from rich.text import Text

        seconds = self._clock() - self._start_s
        return Text(f"{self._text}, {seconds:.0f} s" if self._text else f"{seconds:.0f} s", no_wrap=True, overflow="ellipsis")
