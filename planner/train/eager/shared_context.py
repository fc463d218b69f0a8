"""Contexts that change process-wide state, shared by blocks in several threads."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager


class SharedContext:
    """A context that several blocks share: the first block enters it, and the last one exits it.

    With a context for each block, each would restore the state that it found, which is wrong unless they exit in reverse order.

    Args:
        new: returns the context to enter.
    """

    def __init__(self, new: Callable[[], AbstractContextManager[object]]) -> None:
        self._new = new
        self._lock = threading.Lock()
        self._users = 0
        self._entered: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        """Enter the context, unless another block has entered it."""
        with self._lock:
            if self._entered is None:
                context = self._new()
                context.__enter__()
                self._entered = context
            self._users += 1

    def __exit__(self, *_: object) -> None:
        """Exit the context, unless another block still uses it."""
        with self._lock:
            self._users -= 1
            if not self._users and self._entered is not None:
                self._entered.__exit__(None, None, None)
                self._entered = None
