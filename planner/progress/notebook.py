"""Progress in a notebook: a bar below the cell, which the summary replaces at the end.

A planning without a summary leaves its place to the next one: the graphs of a step that is captured in pieces share one bar. The
bar is an element of HTML, so that it needs no widgets, which not every notebook shows.
"""

import time
from collections.abc import Callable
from html import escape
from typing import Any

from planner.graphs.errors import PlannerError
from planner.progress.describe import describe
from planner.progress.stages import Event, Progress

_EVERY_S = 0.2  # the shortest time between two updates of one stage


class NotebookView:
    """A view with a bar, the activity and the estimate of the time left.

    Args:
        clock: returns increasing seconds.

    Raises:
        PlannerError: IPython is not installed.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        try:
            from IPython.display import display
        except ImportError as error:
            raise PlannerError("NotebookView is for notebooks, and IPython is not installed: use LineView") from error
        self._display: Callable[..., Any] = display
        self._clock = clock
        self._handle: Any = None
        self._next_s = 0.0

    def __call__(self, progress: Progress) -> None:
        """Show the state of planning."""
        if progress.event is Event.ADVANCE and self._clock() < self._next_s:
            return
        self._next_s = self._clock() + _EVERY_S
        if self._handle is None:
            self._handle = self._display(_render(progress), raw=True, display_id=True)
        else:
            self._handle.update(_render(progress), raw=True)
        if progress.summary or progress.event is Event.FAILED:
            self._handle = None


def _render(progress: Progress) -> dict[str, str]:
    """Return the representation of `progress` by MIME type."""
    if progress.event is Event.DONE:
        text, bar = progress.summary, ""
    elif progress.event is Event.FAILED:
        text, bar = f"{progress.activity}: ended by an error after {progress.seconds:.0f} s", ""
    else:
        text, bar = f"{describe(progress)}, {progress.seconds:.0f} s", f'<progress value="{progress.overall:.3f}"></progress> '
    return {"text/plain": text, "text/html": f"{bar}{escape(text)}"}
