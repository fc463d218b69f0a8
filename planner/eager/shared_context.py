"""Contexts that change the process, for blocks in several threads at once."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager


class SharedContext:
    """A context that blocks may be in at once: it is entered with the first of them, and left with the last.

    Contexts of their own would each put back what they found, which is wrong unless they end in the reverse order.

    Args:
        new: returns the context to enter.
    """

    def __init__(self, new: Callable[[], AbstractContextManager[object]]) -> None:
        self._new = new
        self._lock = threading.Lock()
        self._users = 0
        self._entered: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        """Enter it, unless it is entered."""
        with self._lock:
            if self._entered is None:
                context = self._new()
                context.__enter__()
                self._entered = context
            self._users += 1

    def __exit__(self, *_: object) -> None:
        """Leave it, if nobody else is in it."""
        with self._lock:
            self._users -= 1
            if not self._users and self._entered is not None:
                self._entered.__exit__(None, None, None)
                self._entered = None
