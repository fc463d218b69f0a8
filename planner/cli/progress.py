"""What the terminal shows while a command works: one line, rewritten in place, on stderr.

Where stderr is not a terminal, a plain line now and then instead.
"""

import os
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from graphs.units import format_ratio
from planner.visible import visible
from solvers.result import Progress

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

PLAIN_EVERY_S = 10.0


def describe(progress: Progress, *, base_s: float) -> str:
    """`progress` in one line; times as overhead over `base_s`, the step without recomputation."""
    parts = [progress.activity or "solving"]
    parts.append("best so far " + (_overhead(progress.best_s, base_s) if progress.best_s is not None else "none yet"))
    if progress.bound_s is not None:
        parts.append(f"bound {_overhead(progress.bound_s, base_s)}")
    if progress.gap is not None:
        parts.append(f"gap {format_ratio(progress.gap)}")
    return ", ".join(parts)


class ProgressLine:
    """Shows the last thing it was told, and the seconds since it was entered.

    Args:
        quiet: show nothing.
        base_s: seconds of the step without recomputation.
        stream: where to, stderr if None.
    """

    def __init__(self, *, quiet: bool = False, base_s: float = 0.0, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        # A process may be started without a stderr.
        self._quiet = quiet or self._stream is None
        self._base_s = base_s
        self._said = ""
        self._start_s = time.monotonic()
        self._next_plain_s = PLAIN_EVERY_S
        self._live: Live | None = None

    def __enter__(self) -> Self:
        self._start_s = time.monotonic()
        if not self._quiet and self._stream.isatty():
            # Imported here: a command that shows no progress does not wait for it.
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._stream)
            self._live = Live(console=console, get_renderable=self._line, transient=True, refresh_per_second=5)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def __call__(self, progress: Progress) -> None:
        """Show where a solve stands."""
        self._said = describe(progress, base_s=self._base_s)
        if self._live is None and not self._quiet and progress.seconds >= self._next_plain_s:
            self._next_plain_s = progress.seconds + PLAIN_EVERY_S
            self.note(f"{self._said}, {progress.seconds:.0f} s")

    def say(self, activity: str) -> None:
        """Show what is being done; where stderr is not a terminal, every ten seconds at most."""
        self._said = visible(activity)
        seconds = time.monotonic() - self._start_s
        if self._live is None and seconds >= self._next_plain_s:
            self._next_plain_s = seconds + PLAIN_EVERY_S
            self.note(f"{self._said}, {seconds:.0f} s")

    def note(self, text: str) -> None:
        """A line that stays."""
        if self._quiet:
            return
        text = visible(text)
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False, emoji=False)
        else:
            self._stream.write(f"planner: {text}\n")
            self._stream.flush()

    def close(self) -> None:
        """Remove the line and show the cursor again."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def abandon(self) -> None:
        """Show the cursor again, without locks or buffers: for a process that ends at once."""
        if self._live is not None:
            os.write(self._stream.fileno(), b"\r\x1b[K\x1b[?25h")

    def _line(self) -> "Text":
        from rich.text import Text

        seconds = time.monotonic() - self._start_s
        return Text(f"{self._said}, {seconds:.0f} s" if self._said else f"{seconds:.0f} s", no_wrap=True, overflow="ellipsis")


def _overhead(time_s: float, base_s: float) -> str:
    return f"{100 * (time_s / base_s - 1):+z.2f}%" if base_s > 0 else f"{time_s:.4g} s"
