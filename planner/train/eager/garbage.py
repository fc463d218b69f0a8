"""Runs of Python's garbage collector while ops are recorded: rarely.

An op makes a record and storages, which live until the step ends. So the collector would run once in a few hundred ops, look at
all records, and now and then at all objects of the process: 6% of the instructions that recording adds to small ops. When memory
is short, the runtime collects garbage itself.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from planner.train.eager.shared_context import SharedContext

_RARER = 20


@contextmanager
def _collect_rarely() -> Iterator[None]:
    youngest, *older = before = gc.get_threshold()
    during = (_RARER * youngest, *older)
    gc.set_threshold(*during)
    try:
        yield
    finally:
        if gc.get_threshold() == during:  # else the program has set others
            gc.set_threshold(*before)


COLLECTED_RARELY = SharedContext(_collect_rarely)
