"""A cache of the most recently used values."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRUCache(Generic[K, V]):
    """A cache of at most `most` values; the least recently used one is dropped first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[K, V] = OrderedDict()

    def values(self) -> tuple[V, ...]:
        """Return all values, the most recently used last."""
        return tuple(self._values.values())

    def items(self) -> tuple[tuple[K, V], ...]:
        """Return all values with their keys, the most recently used last."""
        return tuple(self._values.items())

    def has(self, key: K) -> bool:
        """Return True if there is a value of `key`."""
        return key in self._values

    def use(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of `key`, made if it is missing."""
        if key not in self._values:
            self._values[key] = make()
        self._values.move_to_end(key)
        while len(self._values) > self._most:
            self._values.popitem(last=False)
        return self._values[key]

    def clear(self) -> None:
        """Remove all values."""
        self._values.clear()
