"""Tracked storages with their versions, and the recorded ops that made them. The C++ library makes both (``planner/native``)."""

import weakref
from typing import Any, Protocol

import torch

from planner.runtime.random_state import RandomState
from planner.torch_private.core import make_subclass
from planner.train.eager.operators import Operator
from planner.train.eager.sizes import KnownOp


class TrackedStorage:
    """The storage of a tensor and its views, resident or not: the base of the library's type, which has the attributes.

    An in-place write makes another version of the contents. The chain has the op that made each version, so that the contents can
    be recomputed: all versions from the first one on, in the same memory.

    Attributes:
        size_bytes: size; 0 on devices whose memory is not budgeted.
        device: the device that it is on.
        version: number of in-place writes since the first contents.
        chain: the op that made each version.
        pinned: the current contents cannot be recomputed, and are kept.
        address: address of the resident storage; 0 if it is not resident.
        watch: the weak reference that reports when the storage is freed.
        barred: it is pinned in the ledger.
        base: a tensor that keeps recomputed contents in memory.
        saved: number of saved tensors, of which each has an alias that keeps the storage in memory.
        evicted: it is evicted, and saved tensors need it.
        ledger_id: id in the ledger; None before it is entered.
        touched_s: time of the last read, on the clock of ops.
        last_read: the last version that a recorded op has read.
        snapshots: earlier contents of a pinned storage, by version.
        checked: ``Memory.overwrites`` when it was last checked that its contents can be recomputed.
        step, number: the last step that has used it, and its number there.
    """

    __slots__ = tuple[str, ...]()  # the library's type has them
    size_bytes: int
    device: torch.device
    version: int
    chain: "list[RecordedOp]"
    pinned: bool
    address: int
    watch: "StorageWatch | None"
    barred: bool
    base: torch.Tensor | None
    saved: int
    evicted: bool
    ledger_id: int | None
    touched_s: float
    last_read: int
    snapshots: dict[int, torch.Tensor] | None
    checked: int
    step: int
    number: int

    def is_recomputable(self, version: int) -> bool:
        """Return True if the contents of `version` can be recomputed by the chain."""
        return version < len(self.chain)

    def has_copy(self, version: int) -> bool:
        """Return True if there is a copy of the contents of `version`."""
        return self.snapshots is not None and version in self.snapshots

    def get_storage(self) -> torch.UntypedStorage | None:
        """Return the storage in memory; None if it is not resident."""
        return None if self.watch is None else self.watch()

    def is_owned(self) -> bool:
        """Return True if the runtime keeps it in memory, and may free it if nothing else holds it."""
        return not self.pinned and (self.base is not None or (self.saved > 0 and self.address > 0))

    def move_aliases(self, tensor: torch.Tensor | None) -> None:
        """Move the aliases of saved tensors to the storage of `tensor`, or to none: then they keep their geometry only."""

    def find_alias(self) -> torch.Tensor | None:
        """Return an alias that keeps the storage in memory; None if there is none."""


class StorageWatch(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a resident storage, with facts that outlive it.

    Attributes:
        storage: weak reference to its `TrackedStorage`.
        size_bytes: its size.
        extra_bytes: the part of it that plain eager PyTorch does not have.
    """

    __slots__ = ("extra_bytes", "size_bytes", "storage")
    storage: weakref.ref[TrackedStorage]
    size_bytes: int
    extra_bytes: int


class LedgerWatch(weakref.ref[TrackedStorage]):
    """A weak reference to a storage of the ledger, which reports when nothing needs the storage any more.

    Attributes:
        ledger_id: id in the ledger.
    """

    __slots__ = ("ledger_id",)
    ledger_id: int


class RecordedOp(Protocol):
    """One execution of an operator, with everything that is needed to execute it again.

    Attributes:
        operator: the facts about the operator.
        settings: settings with which it ran: ``get_kernel_settings``.
        inputs: the tensors among its arguments, in order: storages and the versions of their contents. The storage is None if
            the op itself writes it in place: the one that is being rebuilt.
        read_bytes: bytes of the inputs.
        kept: the storages of inputs that cannot be recomputed.
        known: the facts about its signature.
        outputs: weak references to the storages that it made, with the position of the output; for an in-place op the storage
            that it writes.
        in_place: it writes a storage that existed before.
        room_bytes: bytes of its outputs and of its workspace.
        seconds: measured time.
        draws: the generator and its state before the op; None if it draws no random numbers.
        ledger_id: id in the ledger; None before it is entered.
        module: name of the module that was running.
    """

    operator: Operator
    settings: tuple[Any, ...]
    inputs: list[tuple[TrackedStorage | None, int]]
    read_bytes: int
    kept: tuple[torch.UntypedStorage, ...]
    known: KnownOp
    outputs: list[tuple[int, weakref.ref[TrackedStorage]]]
    in_place: bool
    room_bytes: int
    seconds: float
    draws: tuple[torch.Generator, RandomState] | None
    ledger_id: int | None
    module: str

    def execute(self, sources: list[torch.Tensor]) -> list[Any]:
        """Execute it again, on tensors with the storages of its inputs, and return its outputs."""


def make_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached alias of `tensor` that shares its version counter; no dispatch mode sees it."""
    return make_subclass(torch.Tensor, tensor)
