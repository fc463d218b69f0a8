"""The views that planning reports to unless others are given: a line on a terminal, a bar in a notebook, and the log."""

import sys
from typing import Literal, TypeAlias

from graphs.errors import UsageError
from planner.progress.line import LineView
from planner.progress.logs import LoggingView
from planner.progress.notebook import NotebookView
from planner.progress.stages import View

OnProgress: TypeAlias = View | Literal[False] | None


def views_of(on_progress: OnProgress) -> tuple[View, ...]:
    """Return the view `on_progress`; for None those that show progress by themselves and the log; for False only the log.

    Raises:
        UsageError: it is none of these.
    """
    if on_progress not in (None, False) and not callable(on_progress):
        raise UsageError(
            f"on_progress is {on_progress!r}: must be a view such as planner.progress.LineView(), a function that is called with "
            "each planner.progress.Progress, or False"
        )
    if on_progress is not None and on_progress is not False:
        return (on_progress,)
    return (LoggingView(), *(() if on_progress is False else default_views()))


def default_views() -> tuple[View, ...]:
    """Return a bar in a notebook, a line if stderr is a terminal, and nothing elsewhere."""
    if _in_notebook():
        return (NotebookView(),)
    return (LineView(),) if sys.stderr is not None and sys.stderr.isatty() else ()


def _in_notebook() -> bool:
    """Return True in a kernel of IPython, which shows outputs as HTML."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None
