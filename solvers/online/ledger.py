"""A ledger of storages for eviction while a step runs: costs, last uses and neighbourhoods, which grows as ops come.

It knows nothing of tensors, graphs or memory. A driver tells it what is computed, read, evicted and freed for good, and asks it
for the storage that a heuristic evicts next. Two drivers share it: the replay of a graph (``solvers.baselines.common.online``)
and the eager runtime. Terms are those of dynamic tensor rematerialization (DTR, Kirisame et al., ICLR 2021).
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from solvers.online.candidates import Candidates
from solvers.online.heuristics import Bits, Floats, Heuristic, Ints, heuristic_of


class Deallocation(StrEnum):
    """The treatment of a tensor after its last use in the program; a driver applies it."""

    EAGER = "eager"  # it is evicted; another recomputation may produce it again, to be evicted when memory runs out
    IGNORE = "ignore"  # nothing
    BANISH = "banish"  # once all tensors computed from it are in memory, it is removed for good, and these are pinned


@dataclass(slots=True)
class _Op:
    inputs: tuple[int, ...]
    outputs: list[int] = field(default_factory=list)  # without dropped ones


class Ledger:
    """Storages and the ops that computed them, with a heuristic that chooses the next to evict.

    The id of a dropped storage is given to a later one, so that memory stays flat over many steps. Seconds are of any clock that
    does not go back.

    Attributes, for heuristics (indexed by storage id unless said otherwise):
        size_bytes: of each storage.
        own_s: time of the ops that write it: its producer, views of it and writes in place.
        touched_s: time of its first production or last read.
        since: when it was last produced, restored or used by an op, a running number.
        again: recomputations of the ops that write it.
        gone: 1 if it is evicted.
        live: True if it is in memory.
        parents, children: storages that the ops writing it read, and those that ops reading it write; in the order of the ops.
        work: scores, neighbours and members of classes looked at so far, to measure the bookkeeping independently of time.
    """

    def __init__(
        self, heuristic: str | Heuristic = "dtr", *, sampled: bool = False, ignored_share: float = 0.0, seed: int = 0
    ) -> None:
        """Begin an empty ledger.

        Args:
            heuristic: the name of a heuristic (see ``heuristic_of``), or a new one.
            sampled: choose among a random sample of as many candidates as the square root of their number, as DTR's prototype
                does; otherwise among all.
            ignored_share: candidates below this share of the candidates' mean size are chosen only if there are no others; DTR's
                prototype sets 0.01.
            seed: of the sample, and of the heuristic ``dtr-random``.
        """
        self.size_bytes: Floats = np.zeros(0)
        self.own_s: Floats = np.zeros(0)
        self.touched_s: Floats = np.zeros(0)
        self.since: Ints = np.zeros(0, dtype=np.int64)
        self.again: Ints = np.zeros(0, dtype=np.int64)
        self.live: Bits = np.zeros(0, dtype=np.bool_)
        self.gone = bytearray()
        self.parents: list[dict[int, None]] = []
        self.children: list[dict[int, None]] = []
        self.work = 0
        self._pins: list[int] = []
        self._ops: dict[int, _Op] = {}
        self._writers: list[list[int]] = []  # ops that write each storage
        self._unused: list[int] = []  # ids of dropped storages
        self._numbers = self._op_numbers = 0
        self.heuristic = heuristic_of(heuristic, seed) if isinstance(heuristic, str) else heuristic
        self.candidates = Candidates(self, sampled=sampled, ignored_share=ignored_share, seed=seed)
        self.heuristic.begin(self)
        self._grow(1024)

    def __len__(self) -> int:
        """Return the number of storages that are not dropped."""
        return len(self.parents) - len(self._unused)

    @property
    def op_count(self) -> int:
        """The number of ops with an output that is not dropped."""
        return len(self._ops)

    # What the program does.

    def add_storage(self, size_bytes: int) -> int:
        """Return the id of a new storage, which is in memory; `touch` it once its op has run."""
        if self._unused:
            storage = self._unused.pop()
        else:
            storage = len(self.parents)
            if storage == len(self.size_bytes):
                self._grow(2 * storage)
            self.gone.append(0)
            self._pins.append(0)
            self._writers.append([])
            self.parents.append({})
            self.children.append({})
        self.size_bytes[storage] = size_bytes
        self.own_s[storage] = 0.0
        self.again[storage] = 0
        self._touched[storage] = 0.0
        self._pins[storage] = int(self.heuristic.spares(size_bytes))
        self.heuristic.added(storage)
        self._enter(storage)
        return storage

    def add_op(self, inputs: Sequence[int], outputs: Sequence[int], seconds: float) -> int:
        """Record an op that ran for the first time, and return its id.

        Args:
            inputs: storages that it read.
            outputs: storages that it wrote, each once: new ones, and those of which it made a view or which it wrote in place.
            seconds: its cost; see ``Heuristic.estimate_s``.
        """
        op = self._op_numbers
        self._op_numbers += 1
        if outputs:
            self._ops[op] = _Op(tuple(inputs), list(outputs))
        for out in outputs:
            self.own_s[out] += seconds
            self._writers[out].append(op)
            parents = self.parents[out]
            for storage in inputs:
                if storage != out:
                    parents[storage] = None
                    self.children[storage][out] = None
        self._number(inputs)
        return op

    def recomputed(self, op: int) -> None:
        """Record that `op` ran again, after `computed` for the storages that it restored."""
        record = self._ops[op]
        for out in record.outputs:
            self.again[out] += 1
        self._number(record.inputs)

    def touch(self, storages: Iterable[int], now_s: float) -> None:
        """Record that `storages` are read, or were computed for the first time, at `now_s`."""
        touched = self._touched
        for storage in storages:
            touched[storage] = now_s

    # Where storages are.

    def evicted(self, storage: int) -> None:
        """Record that `storage` was evicted, to be recomputed when it is needed."""
        self._live[storage] = False
        self.candidates.remove(storage)
        self.gone[storage] = 1
        self.heuristic.evicted(storage)

    def computed(self, storage: int) -> None:
        """Record that an op computed `storage`: it is in memory again, or as new as an output of its op."""
        self._enter(storage)
        if self.gone[storage]:
            self.gone[storage] = 0
            self.heuristic.restored(storage)

    def pinned(self, storage: int) -> None:
        """Record that `storage` may not be evicted until `unpinned` has been called as often."""
        self._pins[storage] += 1
        self.candidates.bar(storage)

    def unpinned(self, storage: int) -> None:
        """Record the end of one `pinned`."""
        self._pins[storage] -= 1
        if not self._pins[storage] and self._live[storage]:
            self.candidates.readmit(storage)

    def is_needed(self, storage: int) -> bool:
        """Return True if a storage computed from `storage` is evicted."""
        return any(self.gone[child] for child in self.children[storage])

    def dropped(self, storage: int) -> None:
        """Record that `storage` is freed for good (banished), and forget it: storages computed from it are pinned from now on."""
        if self.gone[storage]:
            self.gone[storage] = 0
            self.heuristic.restored(storage)
        self._live[storage] = False
        self.candidates.remove(storage)
        for child in self.children[storage]:
            self.pinned(child)
            del self.parents[child][storage]
        for parent in self.parents[storage]:
            del self.children[parent][storage]
        for op in self._writers[storage]:
            outputs = self._ops[op].outputs
            outputs.remove(storage)
            if not outputs:
                del self._ops[op]
        self.parents[storage], self.children[storage], self._writers[storage] = {}, {}, []
        self._unused.append(storage)

    # The choice.

    def victim(self, now_s: float, exclude: Collection[int] = ()) -> int | None:
        """Return the storage that the heuristic evicts next, at `now_s`; None if there is none.

        Of equal scores it is the storage that became evictable last, but for scores of 0 the first.

        Args:
            now_s: the time.
            exclude: storages in use, which may not be evicted now.
        """
        barred = [s for s in exclude if self.candidates.pool[s]]
        for storage in barred:
            self.candidates.bar(storage)
        chosen = self.candidates.least(now_s)
        for storage in barred:
            self.candidates.readmit(storage)
        return chosen

    def siblings(self, storage: int) -> list[int]:
        """Return the other outputs of the ops that write `storage`."""
        return [out for op in self._writers[storage] for out in self._ops[op].outputs if out != storage]

    def fell(self, storages: Collection[int]) -> None:
        """Record, for a heuristic, that the cost of the neighbourhood of `storages` may have fallen."""
        self.work += len(storages)
        self.candidates.look_again(storages)

    def _enter(self, storage: int) -> None:
        self._since[storage] = self._numbers
        self._numbers += 1
        self._live[storage] = True
        self.candidates.add(storage, barred=self._pins[storage] > 0)

    def _number(self, storages: Iterable[int]) -> None:
        number = self._numbers
        for storage in storages:
            self._since[storage] = number
            number += 1
        self._numbers = number

    def _grow(self, capacity: int) -> None:
        """Make room for `capacity` storages; memory views write single elements faster than arrays."""
        more = capacity - len(self.size_bytes)
        for name in ("size_bytes", "own_s", "touched_s", "since", "again", "live"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros(more, dtype=array.dtype)]))
        self._touched = self.touched_s.data.cast("B").cast("d")
        self._since = self.since.data.cast("B").cast("q")
        self._live = self.live.data.cast("B").cast("?")
        self.candidates.grow(capacity)
        self.heuristic.grow(capacity)
