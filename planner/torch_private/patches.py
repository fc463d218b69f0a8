"""Functions of PyTorch that are wrapped, for a time or for good: a capture changes how Dynamo and AOTAutograd work.

What is put around a function is called with the original one first, then with the arguments of the call.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

Around = Callable[..., Any]  # around(original, *args, **kwargs)


def wrap(owner: Any, name: str, around: Around) -> AbstractContextManager[object]:
    """Return the patch that puts `around` around the function ``owner.name``."""
    return patch.object(owner, name, bind_original(getattr(owner, name), around))


def wrap_for_good(owner: Any, name: str, around: Around) -> None:
    """Put `around` around the function ``owner.name`` for the rest of the process."""
    setattr(owner, name, bind_original(getattr(owner, name), around))


def bind_original(original: Callable[..., Any], around: Around) -> Callable[..., Any]:
    """Return a function, which objects bind as a method, that calls `around` with `original` first."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return call
