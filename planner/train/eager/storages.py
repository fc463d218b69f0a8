"""What the C++ library tells Python of the memory, of recomputation and of what it begins with (``planner/native``)."""

from collections.abc import Callable
from typing import Protocol

import torch

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
        resident: number of resident storages.
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
    resident: int

    def find_bytes(self, tensor: torch.Tensor) -> int | None:
        """Return the size of the storage of `tensor`, 0 on devices whose memory is not budgeted; None if it is not known."""

    @staticmethod
    def list_aliases() -> list[torch.Tensor]:
        """Return tensors on the resident storages of all that autograd has saved in blocks."""

    def add(self, tensor: torch.Tensor) -> None:
        """Record the storage of `tensor`, which cannot be recomputed."""

    def forget(self) -> None:
        """Pin all storages, and drop the records to recompute them, which no saved tensor needs any more."""

    def settle(self) -> None:
        """Record the storages that were freed since the last call."""

    def make_room(self, size_bytes: int, purpose: object) -> None:
        """Evict until `size_bytes` fit; raise BudgetError, with their `purpose`, if all resident storages are in use."""

    def evict_one(self) -> bool:
        """Evict the storage that the heuristic chooses, and return True; return False if all are in use."""

    def evict_bytes(self, size_bytes: int) -> bool:
        """Evict until `size_bytes` are free, or nothing is left to evict; return True if anything was evicted."""

    def evict_logged(self, storage: int) -> bool | None:
        """Evict a storage by its number in the log, and return True; False if it is in use, None if it no longer can be."""


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


class Sources(Protocol):
    """The saved tensors of autograd, and what they can be recomputed from (``planner/native/sources.cpp``).

    Attributes:
        saved: number of storages with saved tensors.
        pinned: number of storages that were pinned since their ops were recorded.
        copies: number of storages that were copied before they were overwritten.
    """

    saved: int
    pinned: int
    copies: int

    def forget(self) -> None:
        """Begin again, because no tensor is saved."""

    def forget_unneeded(self) -> None:
        """Drop the records of storages that no saved tensor is computed from, and pin these storages."""
