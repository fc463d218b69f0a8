"""Walks along references: from ops to what they read, from nodes of graphs and of autograd to those behind them."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def walk(starts: Iterable[T], list_next: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Yield `starts` and all that `list_next` leads to from there, each once; it is called once its argument was yielded."""
    waiting, seen = list(starts), set[T]()
    while waiting:
        if (found := waiting.pop()) not in seen:
            seen.add(found)
            yield found
            waiting += list_next(found)
