"""The evictable storage of least score, found without computing the scores of all.

As time passes, scores fall: staleness grows. They rise when a storage is read, and change with its neighbourhood. So the score
at a later time is a lower bound until then, unless the neighbourhood becomes cheaper. The candidates are sorted by such a bound
now and then; a choice looks at them from the least bound on, in blocks, until the bound exceeds the least score found, and at all
that are new, restored, or have a cheaper neighbourhood since they were sorted. The choice is exact. They are sorted again when
the time has come or when too many have changed: after about as many changes as the square root of their number.

Tried before: the scores of all storages for each eviction, as in DTR's simulator. To draw a sample of the candidates, or to
ignore small ones, as DTR proposes, changes the choice; the ledger could do both, and nothing asked for it.
"""

from math import isqrt

import numpy as np

from solvers.online.heuristics import Heuristic
from solvers.online.storages import Bits, Floats, Ints, Storages

_ROUNDING = 1.0 - 1e-9  # of bounds, which are not computed as the scores are
_LEAST_ROOM = 64  # storages looked at together


class Candidates:
    """The storages in memory, and those of them that may be evicted.

    Attributes:
        pool: True for those that may be evicted, by storage id.
    """

    def __init__(self, storages: Storages, heuristic: Heuristic) -> None:
        self.storages, self.heuristic = storages, heuristic
        self.pool: Bits = np.zeros(0, dtype=np.bool_)
        self._order: Ints = np.zeros(0, dtype=np.int64)  # by bound
        self._bounds: Floats = np.zeros(0)
        self._changed = storages.changed  # not in the order, or with a bound that no longer holds
        self._removed = 0  # since they were sorted
        self._room = 0
        self._until_s = 0.0

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` storages."""
        self.pool = np.concatenate([self.pool, np.zeros(capacity - len(self.pool), dtype=np.bool_)])
        self._pool = self.pool.data.cast("B").cast("?")

    def add(self, storage: int, *, barred: bool) -> None:
        """Add a storage that is in memory from now on; it may not be evicted if `barred`."""
        self._pool[storage] = not barred
        self._changed.add(storage)

    def remove(self, storage: int) -> None:
        """Remove a storage that is no longer in memory."""
        self._pool[storage] = False
        self._changed.discard(storage)
        self._removed += 1

    def exclude(self, storage: int) -> None:
        """Record that a storage may not be evicted."""
        self._pool[storage] = False

    def readmit(self, storage: int) -> None:
        """Record that a storage in memory may be evicted again."""
        self._pool[storage] = True

    def find_least(self, now_s: float) -> int | None:
        """Return the candidate of least score at `now_s`; None if there is none."""
        if not self.heuristic.bounded:
            candidates = np.flatnonzero(self.pool)
            return self._pick(candidates, self._score(candidates, now_s)) if len(candidates) else None
        if now_s > self._until_s or len(self._changed) + self._removed > self._room:
            self._sort(now_s)
        return self._find_first(now_s)

    def _find_first(self, now_s: float) -> int | None:
        """Return the candidate of least score, looking at those that have changed, and at the others by their bounds."""
        seen, scores = [], []
        least, at = np.inf, 0
        block = np.fromiter(self._changed, dtype=np.int64, count=len(self._changed))
        while True:
            block = block[self.pool[block]]
            if len(block):
                seen.append(block)
                scores.append(self._score(block, now_s))
                least = min(least, float(scores[-1].min()))
            if at >= len(self._order) or self._bounds[at] > least:
                break
            block = self._order[at : at + self._room]
            at += self._room
        return self._pick(np.concatenate(seen), np.concatenate(scores)) if seen else None

    def _pick(self, storages: Ints, scores: Floats) -> int:
        """Return the storage of least score; of equal ones the latest to become evictable, but for scores of 0 the first."""
        least = scores.min()
        tied = storages[scores == least]
        since = self.storages.since[tied]
        return int(tied[since.argmin() if least == 0 else since.argmax()])

    def _score(self, storages: Ints, now_s: float) -> Floats:
        self.storages.work += len(storages)
        return self.heuristic.score(storages, now_s)

    def _sort(self, now_s: float) -> None:
        """Sort all storages in memory, pinned ones too, by their scores at a time from which on they are sorted again."""
        order = np.flatnonzero(self.storages.live)
        pool = order[self.pool[order]]
        root = isqrt(len(pool)) + 1
        oldest_s = float(self.storages.touched_s[pool].min()) if len(pool) else now_s
        self._until_s = now_s + (now_s - oldest_s) / root
        bounds = self._score(order, self._until_s) * _ROUNDING
        by_bound = np.argsort(bounds, kind="stable")
        self._order, self._bounds = order[by_bound], bounds[by_bound]
        self._room = max(_LEAST_ROOM, 2 * root)
        self._changed.clear()
        self._removed = 0
