"""A cache of the most recently used values."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRUCache(OrderedDict[K, V]):
    """At most `most` values by their keys, the most recently used last; the least recently used one is dropped first."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def use(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of `key`, made if it is missing."""
        if key not in self:
            self[key] = make()
        self.move_to_end(key)
        while len(self) > self._most:
            self.popitem(last=False)
        return self[key]
