"""The records of storages in a ledger: costs, last uses and neighbourhoods, for heuristics to read."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bits = NDArray[np.bool_]


@dataclass(slots=True)
class LedgerOp:
    """The storages that an op read, and those that it wrote and that are not dropped."""

    inputs: tuple[int, ...]
    outputs: list[int] = field(default_factory=list)


class Storages:
    """The records of storages by id, which a ``Ledger`` keeps.

    Attributes (indexed by storage id unless said otherwise):
        size_bytes: of each storage.
        own_s: time of the ops that write it: its producer, views of it and writes in place.
        touched_s: time of its first production or last read.
        origin: identifier of its computation; see ``Ledger.add_storage``.
        since: running number of the op that last produced, restored or used it.
        again: recomputations of the ops that write it.
        gone: 1 if it is evicted.
        live: True if it is in memory.
        evictable: True if it is in memory and not pinned.
        parents, children: storages that the ops writing it read, and those that ops reading it write; in the order of the ops.
        writers: ops that write it.
        ops: the ops with an output that is not dropped, by their number.
    """

    def __init__(self) -> None:
        self.size_bytes: Floats = np.zeros(0)
        self.own_s: Floats = np.zeros(0)
        self.touched_s: Floats = np.zeros(0)
        self.origin: Ints = np.zeros(0, dtype=np.int64)
        self.since: Ints = np.zeros(0, dtype=np.int64)
        self.again: Ints = np.zeros(0, dtype=np.int64)
        self.live: Bits = np.zeros(0, dtype=np.bool_)
        self.evictable: Bits = np.zeros(0, dtype=np.bool_)
        self.gone = bytearray()
        self.parents: list[dict[int, None]] = []
        self.children: list[dict[int, None]] = []
        self.writers: list[list[int]] = []
        self.ops: dict[int, LedgerOp] = {}

    def list_siblings(self, storage: int) -> list[int]:
        """Return the other outputs of the ops that write `storage`."""
        return [out for op in self.writers[storage] for out in self.ops[op].outputs if out != storage]
