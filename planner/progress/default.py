"""The views that planning reports to unless others are given: a line on a terminal, a bar in a notebook, and the log."""

import sys
from functools import lru_cache
from typing import Literal, TypeAlias

from planner.graphs.errors import UsageError
from planner.progress.line import LineView
from planner.progress.logs import LoggingView
from planner.progress.notebook import NotebookView
from planner.progress.stages import View

OnProgress: TypeAlias = View | Literal[False] | None


def list_views(on_progress: OnProgress) -> tuple[View, ...]:
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
    return (LoggingView(), *(() if on_progress is False else list_default_views()))


def list_default_views() -> tuple[View, ...]:
    """Return a bar in a notebook, a line if stderr is a terminal, and nothing elsewhere."""
    if (ipython := _find_notebook()) is not None:
        return (_view_of_cell(getattr(ipython, "execution_count", 0)),)
    return (LineView(),) if sys.stderr is not None and sys.stderr.isatty() else ()


def _find_notebook() -> object | None:
    """Return the kernel's IPython, which shows outputs as HTML; None elsewhere."""
    module = sys.modules.get("IPython")
    shell: object = None if module is None else module.get_ipython()
    return shell if getattr(shell, "kernel", None) is not None else None


@lru_cache(maxsize=1)
def _view_of_cell(count: int) -> NotebookView:
    """Return the view of a cell, by its number: what leaves no summary gives its place to what follows in the cell."""
    del count
    return NotebookView()
