"""The budgeted memory: which storages are resident, and what is evicted to make room.

What may be evicted follows from one condition, that the runtime alone owns the storage. Before, each event (saved, released,
computed) told the ledger so by a method of its own. Whether a storage is in use is asked of its reference counts when it is to be
evicted, and not tracked: C++ code may hold tensors that Python does not see.
"""

import gc
import itertools
import sys
import weakref
from collections import deque
from collections.abc import Callable
from time import perf_counter

import torch

from graphs.errors import BudgetError
from graphs.units import format_bytes, format_enough
from planner.runtime.allocator_failure import find_allocator_failure
from planner.torch_private.core import storage_address, storage_use_count
from planner.train.eager.sizes import OutputSizes
from planner.train.eager.storages import LedgerWatch, RecordedOp, StorageWatch, TrackedStorage, make_alias
from solvers.online.ledger import Ledger

# Storages in use are pinned in the ledger; before each search for a victim a few of them are checked again.
_ASKED_AGAIN = 4


class Memory:
    """Bytes in memory, and the storages that take them.

    The ledger is created and filled when memory first runs out: until then the only bookkeeping of an op is its record.

    Args:
        budget_bytes: the limit.
        sizes: counts bytes.
        new_ledger: returns an empty ledger.
        new_storage: returns a storage of a size on a device.

    Attributes:
        live_bytes: bytes of the resident storages.
        peak_bytes: the peak of them so far.
        evicted_bytes: bytes of evicted storages that saved tensors need.
        extra_bytes: bytes in memory that plain eager PyTorch does not have.
        eager_peak_bytes: the peak of plain eager PyTorch so far.
        evictions: number of evictions.
        retries: number of times that the allocator ran out of memory in an op.
        overwrites: number of writes to pinned storages that were read before, without a copy.
        clock_s: total time of ops so far.
        read_s: the clock when the program's last op ended: the time of the next op's reads, even if inputs are recomputed for it.
        pending: ops that were recorded since the ledger was last used; they are entered into it before its next use.
        evict_planned: evicts a storage that the plan evicts, and returns True if there is one; called before the heuristic.
        enter_ops: enters recorded ops into the ledger: the C++ library's, as the next one.
        settle: records the storages that were freed since the last call.
        forget_unneeded: drops records that no saved tensor needs, with what they keep; called before a budget is too small.
    """

    # Read and written for each op: in place, by the C++ library.
    __slots__ = (
        *("__dict__", "budget_bytes", "clock_s", "eager_peak_bytes", "evicted_bytes", "extra_bytes", "ledger", "live_bytes"),
        *("now", "overwrites", "peak_bytes", "pending", "read_s", "_dropped"),
    )

    def __init__(
        self,
        budget_bytes: int,
        sizes: OutputSizes,
        new_ledger: Callable[[], Ledger],
        new_storage: Callable[..., TrackedStorage],
    ) -> None:
        self.budget_bytes = budget_bytes
        self.live_bytes = self.peak_bytes = self.eager_peak_bytes = 0
        self.evicted_bytes = self.extra_bytes = 0
        self.evictions = self.retries = self.overwrites = 0
        self.clock_s = self.read_s = 0.0
        self.sizes = sizes
        self.resident: dict[int, TrackedStorage] = {}
        self.find = self.resident.get
        self._invisible: set[StorageWatch] = set()  # of memory that may outlive its `TrackedStorage`
        self.freed: deque[StorageWatch] = deque()
        self._note_freed = self.freed.append
        self._dropped: deque[LedgerWatch] = deque()
        self.ledger: Ledger | None = None
        self.now = perf_counter
        self.evict_planned: Callable[[], bool] = lambda: False
        self.enter_ops: Callable[[list[weakref.ref[RecordedOp]]], None]
        self.settle: Callable[[], None]
        self.forget_unneeded: Callable[[], None] = lambda: None
        self._new_storage = new_storage
        self._new_ledger = new_ledger
        self._unheld = _count_unheld()
        self.pending: list[weakref.ref[RecordedOp]] = []
        self._by_id: dict[int, LedgerWatch] = {}
        self._in_use: dict[int, TrackedStorage] = {}

    # Storages that become resident or are freed.

    def add(self, tensor: torch.Tensor, storage: TrackedStorage | None = None, *, visible: bool = True) -> TrackedStorage:
        """Record that the storage of `tensor` is resident, as that of `storage` or of a new one; return it.

        Args:
            tensor: a tensor on it.
            storage: the known storage; None if it is new, and cannot be recomputed.
            visible: True if ops outside of the runtime may read it.
        """
        held = tensor.untyped_storage()
        if storage is None:
            device = tensor.device
            storage = self._new_storage(self.sizes.count_bytes(held.nbytes(), device), device, pinned=True)
            storage.touched_s = self.clock_s
            storage.checked = self.overwrites
        storage.address = address = storage_address(tensor)
        storage.watch = watch = StorageWatch(held, self._note_freed)
        watch.storage = weakref.ref(storage)
        watch.size_bytes = size_bytes = storage.size_bytes
        self.live_bytes = live_bytes = self.live_bytes + size_bytes
        if live_bytes > self.peak_bytes:
            self.peak_bytes = live_bytes
        if visible:
            watch.extra_bytes = 0
            self.resident[address] = storage
            if (eager_bytes := live_bytes + self.evicted_bytes - self.extra_bytes) > self.eager_peak_bytes:
                self.eager_peak_bytes = eager_bytes
        else:
            watch.extra_bytes = size_bytes
            self._invisible.add(watch)
            self.extra_bytes += size_bytes
        return storage

    def note_gone(self, storage: TrackedStorage) -> None:
        """Record in the ledger that a storage is no longer resident."""
        if storage.ledger_id is not None and self.ledger is not None:
            self._in_use.pop(storage.ledger_id, None)
            self.ledger.note_evicted(storage.ledger_id)

    def mark_not_evicted(self, storage: TrackedStorage) -> None:
        """Record that `storage` is resident again, or that no saved tensor needs it."""
        if storage.evicted:
            storage.evicted = False
            self.evicted_bytes -= storage.size_bytes

    def update_size(self, storage: TrackedStorage) -> int:
        """Record the size of a storage that may have been resized, and return the size if it has grown, else 0."""
        held = storage.get_storage()
        if storage.watch is None or held is None:  # its tensor was given another storage
            return 0
        size_bytes = self.sizes.count_bytes(held.nbytes(), held.device)
        grown_bytes = size_bytes - storage.size_bytes
        self.live_bytes += grown_bytes
        storage.size_bytes = storage.watch.size_bytes = size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return size_bytes if grown_bytes > 0 else 0

    def record_recomputed(self, op: RecordedOp) -> None:
        """Record that an op was recomputed."""
        if op.ledger_id is not None and self.ledger is not None:
            self.ledger.note_recomputed(op.ledger_id)

    def touch(self, storage: TrackedStorage, now_s: float) -> None:
        """Record a read at `now_s`."""
        storage.touched_s = now_s
        if storage.ledger_id is not None and self.ledger is not None:
            self.ledger.touch((storage.ledger_id,), now_s)

    def record_computed(self, storage: TrackedStorage, tensor: torch.Tensor) -> None:
        """Record that `storage` is resident again, as the storage of `tensor`; the runtime keeps it."""
        self.mark_not_evicted(storage)
        storage.base = make_alias(tensor)
        storage.move_aliases(tensor)
        self.add(tensor, storage, visible=storage.saved > 0)
        if storage.ledger_id is not None and self.ledger is not None:
            self.ledger.note_computed(storage.ledger_id)
            self.allow(storage)

    def allow(self, storage: TrackedStorage, *, in_use: bool = False) -> None:
        """Update in the ledger if `storage` may be evicted: the runtime must own it, and it must not be `in_use`."""
        evictable = storage.is_owned() and not in_use
        if storage.ledger_id is not None and self.ledger is not None and storage.barred == evictable:
            storage.barred = not evictable
            if evictable:
                self.ledger.unpin(storage.ledger_id)
            else:
                self.ledger.pin(storage.ledger_id)

    def forget(self) -> None:
        """Pin all resident storages, and drop the records to recompute them, which no saved tensor needs any more."""
        for storage in self.resident.values():
            storage.chain = []
            storage.pinned = True
            storage.ledger_id = None
            storage.snapshots = None
            storage.last_read = -1
            storage.base = None
        # Reference cycles keep recomputed tensors in memory where storages were written with each other's contents.
        for watch in self._invisible:
            if (known := watch.storage()) is not None:
                known.base = None
        self.settle()
        self.ledger, self.evicted_bytes = None, 0
        self.pending, self._by_id, self._in_use = [], {}, {}
        self._dropped = deque()  # ids of the old ledger may still be added to the old deque

    # Room.

    def make_room(self, size_bytes: int, purpose: object, *, at_last: bool = True) -> None:
        """Evict until `size_bytes` fit.

        Args:
            size_bytes: bytes that are needed.
            purpose: the purpose of these bytes, for messages.
            at_last: if nothing can be evicted, also free what only records and reference cycles hold, which takes long.

        Raises:
            BudgetError: all resident storages are in use.
        """
        if self.live_bytes + size_bytes <= self.budget_bytes:
            return
        self.settle()
        while self.live_bytes + size_bytes > self.budget_bytes:
            if not (self.evict_planned() or self.evict_one() or (at_last and self._free_by_collection())):
                raise BudgetError(self._describe_too_small(size_bytes, purpose))

    def _free_by_collection(self) -> bool:
        live_bytes = self.live_bytes
        for free in (self.forget_unneeded, gc.collect):
            free()
            self.settle()
            if self.live_bytes < live_bytes:
                return True
        return False

    def evict_one(self) -> bool:
        """Evict the storage that the heuristic chooses, and return True; return False if all are in use."""
        ledger = self._update_ledger()
        for ledger_id in list(itertools.islice(self._in_use, _ASKED_AGAIN)):
            self._ask_again(ledger_id)
        for last in (False, True):
            while (chosen := ledger.choose_victim(self.clock_s)) is not None:
                storage = self._by_id[chosen]()
                assert storage is not None and storage.address, "the ledger chose a storage that is not resident"
                if self.evict(storage):
                    return True
                self.allow(storage, in_use=True)
                self._in_use[chosen] = storage
            if not last:
                for known in list(self._in_use):
                    self._ask_again(known)
        return False

    def evict_after(self, error: Exception) -> bool:
        """Evict as many bytes as the allocator lacked, if `error` is its failure; return True if the op can be retried.

        Return False if all resident storages are in use, or if the error has another cause.
        """
        failure = find_allocator_failure(error)
        if failure is None:
            return False
        self.settle()
        self.retries += 1
        enough_bytes = self.live_bytes - (failure.asked_bytes or 1)
        evicted = False
        while self.live_bytes > enough_bytes and self.evict_one():
            evicted = True
        return evicted

    def evict(self, storage: TrackedStorage) -> bool:
        """Evict `storage`, and return True; return False if it is in use or not resident."""
        if not storage.address or not storage.is_owned() or self._is_held_elsewhere(storage):
            return False
        self._evict(storage)
        return True

    def _is_held_elsewhere(self, storage: TrackedStorage) -> bool:
        uses, references = _count_holders(storage.address, storage.watch)
        return uses > self._unheld[0] + storage.saved + (storage.base is not None) or references > self._unheld[1]

    def _ask_again(self, ledger_id: int) -> None:
        storage = self._in_use.pop(ledger_id)
        if not storage.is_owned():
            return
        if self._is_held_elsewhere(storage):
            self._in_use[ledger_id] = storage
        else:
            self.allow(storage)

    def _evict(self, storage: TrackedStorage) -> None:
        if storage.saved:
            storage.evicted = True
            self.evicted_bytes += storage.size_bytes
        storage.base = None
        storage.move_aliases(None)
        self.evictions += 1
        self.settle()
        assert not storage.address, "an evicted storage is still in memory"

    def _update_ledger(self) -> Ledger:
        """Return the ledger, after entering all pending ops."""
        if self.ledger is None:
            self.ledger = self._new_ledger()
        self.settle()
        pending, self.pending = self.pending, []
        self.enter_ops(pending)
        return self.ledger

    def _describe_too_small(self, size_bytes: int, purpose: object) -> str:
        needed = self.live_bytes + size_bytes
        moment, request = (
            ("", f", and {purpose} needs {format_bytes(size_bytes)} more") if size_bytes else (f" after {purpose}", "")
        )
        return (
            f"budget {format_bytes(self.budget_bytes)} is too small: {format_bytes(self.live_bytes)} are in use{moment} and "
            f"cannot be evicted{request}. Up to this point {format_enough(needed)} is enough; the peak of plain eager PyTorch so "
            f"far is {format_enough(max(self.eager_peak_bytes, needed))}. Raise the budget, or lower the batch size"
        )


def _count_holders(address: int, watch: StorageWatch | None) -> tuple[int, int]:
    """Return the reference counts of a storage and of its Python object."""
    return storage_use_count(address), sys.getrefcount(None if watch is None else watch())


def _count_unheld() -> tuple[int, int]:
    """Return the reference counts of a storage that is not in use: PyTorch's own, which differ between its versions."""
    tensor = torch.empty(0)
    address = storage_address(tensor)
    watch = StorageWatch(tensor.untyped_storage())
    uses, references = _count_holders(address, watch)
    return uses - 1, references
