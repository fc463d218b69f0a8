"""Warnings that a test does not expect."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from planner.graphs.errors import EagerWarning


@contextmanager
def raise_warnings(category: type[Warning] = Warning) -> Iterator[None]:
    """Raise warnings of `category`, but for those of times, which a busy machine changes."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", category)
        warnings.filterwarnings("ignore", "the captured step takes", EagerWarning)
        yield
