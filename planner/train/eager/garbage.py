"""Runs of Python's garbage collector while ops are recorded: about as often as without records.

A record takes about 20 containers, and lives until the step ends. So the collector would run once in a few dozen ops, look at all
records, and now and then at all objects of the process: a quarter of the time that recording adds to small ops. When memory is
short, the runtime collects garbage itself.
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


COLLECTED_RARELY = SharedContext(_collect_rarely)
