"""What was used last, where not all can be kept."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRUCache(Generic[K, V]):
    """At most so many values; the one that was used longest ago goes first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[K, V] = OrderedDict()

    def values(self) -> tuple[V, ...]:
        """All of them, the last used last."""
        return tuple(self._values.values())

    def use(self, key: K, make: Callable[[], V]) -> V:
        """The value of `key`, made if there is none."""
        if key not in self._values:
            self._values[key] = make()
        self._values.move_to_end(key)
        while len(self._values) > self._most:
            self._values.popitem(last=False)
        return self._values[key]

    def clear(self) -> None:
        """Forget all of them."""
        self._values.clear()
