"""Runs of Python's garbage collector while ops are recorded: about as often as without records.

A record takes about 20 containers, and lives until the step ends. So the collector would run once in a few dozen ops, look at all
records, and now and then at all objects of the process: a quarter of the time that recording adds to small ops. While ops go to
the log in C++ nothing is changed. When memory is short, the runtime collects garbage itself.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from planner.train.eager.shared_context import SharedContext

_CONTAINERS = 20  # of a record


@contextmanager
def _collect_rarely() -> Iterator[None]:
    youngest, *older = before = gc.get_threshold()
    during = (_CONTAINERS * youngest, *older)
    gc.set_threshold(*during)
    try:
        yield
    finally:
        if gc.get_threshold() == during:  # else the program has set others
            gc.set_threshold(*before)


_COLLECTED_RARELY = SharedContext(_collect_rarely)


class RareCollections:
    """The part of a recorder in how often the collector runs: rarely while any of them records."""

    def __init__(self) -> None:
        """Initialize without changing anything."""
        self._are_on = False

    def start(self) -> None:
        """Let the collector run rarely; do nothing if it does so for this recorder."""
        if not self._are_on:
            self._are_on = True
            _COLLECTED_RARELY.__enter__()

    def stop(self) -> None:
        """Let the collector run as often as before; do nothing if it does so as far as this recorder is concerned."""
        if self._are_on:
            self._are_on = False
            _COLLECTED_RARELY.__exit__()
