"""What the C++ library tells Python of the memory, of recomputation, of storages and of recorded ops (``planner/native``)."""

from collections.abc import Callable
from typing import Protocol

import torch

from planner.train.eager.sizes import KnownOp
from planner.train.eager.step_log import StepLog


class Memory(Protocol):
    """The budgeted memory: bytes in it, and the storages that take them (``planner/native/memory.cpp``).

    Attributes:
        budget_bytes: the limit.
        live_bytes: bytes of the resident storages.
        peak_bytes: the peak of them so far.
        eager_peak_bytes: the peak of plain eager PyTorch so far.
        evictions: number of evictions.
        retries: number of times that the allocator ran out of memory in an op.
        overwrites: number of writes to pinned storages that were read before, without a copy.
        ops: number of recorded ops.
        recorded: the same, since records were last dropped.
        kept_ops: number of ops that cannot be executed again, so that their outputs are kept.
        host_reads: number of Python numbers that were read from tensors.
        packs: number of tensors saved so far, and of writes by recorded ops: until it changes, the same ops read a storage.
        between_peak_bytes: the most bytes in memory during an op that ran while autograd held no tensor.
        clock_s: total time of ops so far.
        clock: returns the time in seconds; None for the real time.
        pending: number of ops that were recorded since the ledger was last used; they are entered into it before its next use.
        log: the log of the current step; None if no step runs, or it is not logged.
        resident: the resident storages by address.
    """

    budget_bytes: int
    live_bytes: int
    peak_bytes: int
    eager_peak_bytes: int
    evictions: int
    retries: int
    overwrites: int
    ops: int
    recorded: int
    kept_ops: int
    host_reads: int
    packs: int
    between_peak_bytes: int
    clock_s: float
    clock: Callable[[], float] | None
    pending: int
    log: StepLog | None
    resident: "dict[int, TrackedStorage]"

    def find(self, tensor: torch.Tensor) -> "TrackedStorage | None":
        """Return the storage of `tensor`; None if it is not known."""

    def add(self, tensor: torch.Tensor, *, visible: bool = True) -> "TrackedStorage":
        """Record the storage of `tensor`, which cannot be recomputed, and return it; only the runtime reads an invisible one."""

    def allow(self, storage: "TrackedStorage") -> None:
        """Update in the ledger if `storage` may be evicted: the runtime must own it."""

    def forget(self) -> None:
        """Pin all resident storages, and drop the records to recompute them, which no saved tensor needs any more."""

    def settle(self) -> None:
        """Record the storages that were freed since the last call."""

    def make_room(self, size_bytes: int, purpose: object) -> None:
        """Evict until `size_bytes` fit; raise BudgetError, with their `purpose`, if all resident storages are in use."""

    def evict_one(self) -> bool:
        """Evict the storage that the heuristic chooses, and return True; return False if all are in use."""

    def evict_bytes(self, size_bytes: int) -> bool:
        """Evict until `size_bytes` are free, or nothing is left to evict; return True if anything was evicted."""

    def evict(self, storage: "TrackedStorage") -> bool:
        """Evict `storage`, and return True; return False if it is in use or not resident."""


class Recomputation(Protocol):
    """Recomputes storages by their chains of ops (``planner/native/recomputation.cpp``).

    Attributes:
        in_block: the block has not ended: afterwards another one may record its ops.
        ops: number of recomputed ops.
        seconds: time of recomputed ops. Where ops return before they are done, each counts with its first measured time.
        by_operator, by_module: number and time by operator, and by the module in which ops first ran.
    """

    in_block: bool
    ops: int
    seconds: float
    by_operator: dict[str, tuple[int, float]]
    by_module: dict[str, tuple[int, float]]

    def begin_step(self) -> None:
        """Start to count the ops of a step."""

    def recompute(self, storage: "TrackedStorage") -> None:
        """Make the current contents of `storage` resident; raise BudgetError if that does not fit or takes too many ops."""

    def restore(self, storage: "TrackedStorage") -> None:
        """Restore the current contents of a resident storage that a failed op may have written in part, likewise."""


class TrackedStorage(Protocol):
    """The storage of a tensor and its views, resident or not.

    An in-place write makes another version of the contents. The chain has the op that made each version, so that the contents can
    be recomputed: all versions from the first one on, in the same memory.

    Attributes:
        size_bytes: size; 0 on devices whose memory is not budgeted.
        version: number of in-place writes since the first contents.
        chain: the op that made each version.
        pinned: the current contents cannot be recomputed, and are kept.
        address: address of the resident storage; 0 if it is not resident.
        saved: number of saved tensors, of which each has an alias that keeps the storage in memory.
        last_read: the last version that a recorded op has read.
        snapshots: earlier contents of a pinned storage, by version.
        checked: ``Memory.overwrites`` when it was last checked that its contents can be recomputed.
    """

    size_bytes: int
    version: int
    chain: "tuple[RecordedOp, ...]"
    pinned: bool
    address: int
    saved: int
    last_read: int
    snapshots: dict[int, torch.Tensor] | None
    checked: int

    def drop_records(self) -> None:
        """Pin it, and drop the records and copies to recompute it."""

    def is_recomputable(self, version: int) -> bool:
        """Return True if the contents of `version` can be recomputed by the chain."""

    def has_copy(self, version: int) -> bool:
        """Return True if there is a copy of the contents of `version`."""

    def get_storage(self) -> torch.UntypedStorage | None:
        """Return the storage in memory; None if it is not resident."""

    def is_owned(self) -> bool:
        """Return True if the runtime keeps it in memory, and may free it if nothing else holds it."""

    def find_alias(self) -> torch.Tensor | None:
        """Return an alias that keeps the storage in memory; None if there is none."""


class RecordedOp(Protocol):
    """One execution of an operator, with everything that is needed to execute it again.

    Attributes:
        inputs: the tensors among its arguments, in order: storages and the versions of their contents. The storage is None if
            the op itself writes it in place: the one that is being rebuilt.
        kept: the storages of inputs that cannot be recomputed.
        known: the facts about its signature.
    """

    inputs: list[tuple[TrackedStorage | None, int]]
    kept: tuple[torch.UntypedStorage, ...]
    known: KnownOp
