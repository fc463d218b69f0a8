"""A ledger of storages for eviction while a step runs: costs, last uses and neighbourhoods, which grows as ops come.

It knows nothing of tensors, graphs or memory. Its driver, the replay of a graph (``planner.solvers.baselines.common.online``),
tells it what is computed, read, evicted and freed for good, and asks it for the storage that a heuristic evicts next. Terms are
those of dynamic tensor rematerialization (DTR, Kirisame et al., ICLR 2021).

Ids are used again once a storage is dropped, so that a long run takes no more memory than what it has alive. A storage that is
dropped for good pins what was computed from it, since that could not be recomputed any more.

Each choice looks at all that may be evicted, as in DTR's simulator. Tried before: to sort them by bounds on their scores, so that
a choice looks at about the square root of their number, and to keep the costs of neighbourhoods until they change. That was more
than half of the lines here, and took more time for most steps; the eager runtime has a ledger of its own
(``planner/native/ledger.cpp``). To draw a sample of the candidates, or to ignore small ones, as DTR proposes, changes the choice.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum

import numpy as np

from planner.solvers.online.heuristics import Heuristic, make_heuristic
from planner.solvers.online.storages import LedgerOp, Storages


class Deallocation(StrEnum):
    """The treatment of a tensor after its last use in the program; a driver applies it."""

    EAGER = "eager"  # it is evicted; another recomputation may produce it again, to be evicted when memory runs out
    IGNORE = "ignore"  # nothing
    BANISH = "banish"  # once all tensors computed from it are in memory, it is removed for good, and these are pinned


class Ledger(Storages):
    """Storages and the ops that computed them, with a heuristic that chooses the next to evict.

    The id of a dropped storage is given to a later one, so that memory stays flat over many steps. Seconds are of any clock that
    does not go back.
    """

    def __init__(self, heuristic: str | Heuristic = "dtr") -> None:
        """Begin an empty ledger, for a new heuristic or the name of one (see ``make_heuristic``)."""
        super().__init__()
        self._pins: list[int] = []
        self._unused: list[int] = []  # ids of dropped storages
        self._numbers = self._op_numbers = 0
        self.heuristic = make_heuristic(heuristic) if isinstance(heuristic, str) else heuristic
        self.heuristic.begin(self)
        self._grow(1024)

    def __len__(self) -> int:
        """Return the number of storages that are not dropped."""
        return len(self.parents) - len(self._unused)

    # What the program does.

    def add_storage(self, size_bytes: int, origin: tuple[int, int] | None = None) -> int:
        """Return the id of a new storage, which is in memory; `touch` it once its op has run.

        Args:
            origin: the number in the program of the op that computes it, and its place among the outputs: by it ``dtr-random``
                evicts the same storages whoever drives the ledger. None for storages that are never evicted, or if that does not
                matter.
        """
        if self._unused:
            storage = self._unused.pop()
        else:
            storage = len(self.parents)
            if storage == len(self.size_bytes):
                self._grow(2 * storage)
            self.gone.append(0)
            self._pins.append(0)
            self.writers.append([])
            self.parents.append({})
            self.children.append({})
        op, place = (self._numbers, 0) if origin is None else origin
        self.origin[storage] = op << 16 | place
        self.size_bytes[storage] = size_bytes
        self.own_s[storage] = 0.0
        self.again[storage] = 0
        self.touched_s[storage] = 0.0
        self._pins[storage] = int(self.heuristic.spares(size_bytes))
        self.heuristic.note_added(storage)
        self._enter(storage)
        return storage

    def add_op(self, inputs: Sequence[int], outputs: Sequence[int], seconds: float) -> int:
        """Record an op that ran for the first time, and return its id; what it read or wrote may be evicted by now.

        Args:
            inputs: storages that it read.
            outputs: storages that it wrote, each once: new ones, and those of which it made a view or which it wrote in place.
            seconds: its cost; see ``Heuristic.estimate_s``.
        """
        op = self._op_numbers
        self._op_numbers += 1
        if outputs:
            self.ops[op] = LedgerOp(tuple(inputs), list(outputs))
        for out in outputs:
            self.own_s[out] += seconds
            if self.gone[out]:
                self.heuristic.note_dearer(out, seconds)
            self.writers[out].append(op)
            parents = self.parents[out]
            for storage in inputs:
                if storage != out and storage not in parents:
                    parents[storage] = None
                    self.children[storage][out] = None
                    if self.gone[storage] or self.gone[out]:
                        self.heuristic.note_related(storage, out)
        self._number(inputs)
        return op

    def note_recomputed(self, op: int) -> None:
        """Record that `op` ran again, after `computed` for the storages that it restored."""
        record = self.ops[op]
        for out in record.outputs:
            self.again[out] += 1
        self._number(record.inputs)

    def touch(self, storages: Iterable[int], now_s: float) -> None:
        """Record that `storages` are read, or were computed for the first time, at `now_s`."""
        for storage in storages:
            self.touched_s[storage] = now_s

    # Where storages are.

    def note_evicted(self, storage: int) -> None:
        """Record that `storage` was evicted, to be recomputed when it is needed."""
        self.live[storage] = self.evictable[storage] = False
        self.gone[storage] = 1
        self.heuristic.note_evicted(storage)

    def note_computed(self, storage: int) -> None:
        """Record that an op computed `storage`: it is in memory again, or as new as an output of its op."""
        self._enter(storage)
        if self.gone[storage]:
            self.gone[storage] = 0
            self.heuristic.note_restored(storage)

    def pin(self, storage: int) -> None:
        """Record that `storage` may not be evicted until `unpin` has been called as often."""
        self._pins[storage] += 1
        self.evictable[storage] = False

    def unpin(self, storage: int) -> None:
        """Record the end of one `pin`."""
        self._pins[storage] -= 1
        self.evictable[storage] = self.live[storage] and not self._pins[storage]

    def is_needed(self, storage: int) -> bool:
        """Return True if a storage computed from `storage` is evicted."""
        return any(self.gone[child] for child in self.children[storage])

    def drop(self, storage: int) -> None:
        """Record that `storage` is freed for good (banished), and forget it: storages computed from it are pinned from now on."""
        if self.gone[storage]:
            self.gone[storage] = 0
            self.heuristic.note_restored(storage)
        self.live[storage] = self.evictable[storage] = False
        # What was computed from it can no longer be computed again.
        for child in self.children[storage]:
            self.pin(child)
            del self.parents[child][storage]
        for parent in self.parents[storage]:
            del self.children[parent][storage]
        for op in self.writers[storage]:
            outputs = self.ops[op].outputs
            outputs.remove(storage)
            if not outputs:
                del self.ops[op]
        self.parents[storage], self.children[storage], self.writers[storage] = {}, {}, []
        self._unused.append(storage)

    # The choice.

    def choose_victim(self, now_s: float) -> int | None:
        """Return the storage that the heuristic evicts next, at `now_s`; None if there is none.

        Of equal scores it is the storage that became evictable last, but for scores of 0 the first.
        """
        candidates = np.flatnonzero(self.evictable)
        if not len(candidates):
            return None
        tied, least = self.heuristic.select_least(candidates, now_s)
        since = self.since[tied]
        chosen = int(tied[since.argmin() if least == 0 else since.argmax()])
        self.heuristic.note_chosen(chosen)
        return chosen

    def _enter(self, storage: int) -> None:
        self._number((storage,))
        self.live[storage], self.evictable[storage] = True, not self._pins[storage]

    def _number(self, storages: Iterable[int]) -> None:
        for storage in storages:
            self.since[storage] = self._numbers
            self._numbers += 1

    def _grow(self, capacity: int) -> None:
        """Make room for `capacity` storages."""
        more = capacity - len(self.size_bytes)
        for name in ("size_bytes", "own_s", "touched_s", "origin", "since", "again", "live", "evictable"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros(more, dtype=array.dtype)]))
