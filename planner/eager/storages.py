"""What the runtime knows of memory: storages with their versions, the ops that made them, tensors that autograd saved."""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from planner.eager.operators import Operator
from planner.runtime.random_state import RandomState
from planner.torch_private.core import make_subclass, neg_view

# Makes a reference of a tuple of its fields, at a third of the cost of its constructor.
new_reference = tuple.__new__


class TrackedStorage:
    """The memory behind a tensor and its views, whether it is resident or not.

    A write in place makes another version of the contents. The chain holds the op that made each version, so that the contents
    can be computed again: from the first version on, in one piece of memory.

    Attributes:
        size_bytes: size; 0 on devices whose memory is not budgeted.
        device: where it is.
        version: number of writes in place since the first contents.
        chain: the op that made each version.
        pinned: the present contents cannot be recomputed; they are kept.
        address: identity of the resident storage; 0 if it is not resident.
        watch: the weak reference that reports when the storage is freed.
        barred: the ledger knows that it must not be evicted.
        base: a tensor that keeps recomputed contents in memory.
        aliases: for each saved tensor, by its number, an alias that keeps the storage in memory.
        evicted_aliases: for each saved tensor whose alias was dropped, autograd's version counter at that time, and its geometry.
        saved: number of saved tensors.
        evicted: it was evicted, and saved tensors need it.
        ledger_id: identity in the ledger; None before it is entered.
        touched_s: time of the last read, on the clock of ops.
        last_read: the last version that a recorded op has read.
        snapshots: earlier contents of a pinned storage, by version.
        checked: ``Memory.overwrites`` when it was last known that its contents can be recomputed.
        step, number: the last step that has met it, and its number there.
    """

    __slots__ = (
        "__weakref__",
        "address",
        "aliases",
        "barred",
        "base",
        "chain",
        "checked",
        "device",
        "evicted",
        "evicted_aliases",
        "last_read",
        "ledger_id",
        "number",
        "pinned",
        "saved",
        "size_bytes",
        "snapshots",
        "step",
        "touched_s",
        "version",
        "watch",
    )

    def __init__(self, size_bytes: int, device: torch.device, *, pinned: bool) -> None:
        self.size_bytes = size_bytes
        self.device = device
        self.version = 0
        self.chain: list[RecordedOp] = []
        self.pinned = pinned
        self.address = 0
        self.watch: StorageWatch | None = None
        self.barred = False
        self.base: torch.Tensor | None = None
        self.aliases: dict[int, torch.Tensor] = {}
        self.evicted_aliases: dict[int, tuple[int, Reference]] | None = None
        self.saved = 0
        self.evicted = False
        self.ledger_id: int | None = None
        self.touched_s = 0.0
        self.last_read = -1
        self.snapshots: dict[int, torch.Tensor] | None = None
        self.checked = 0
        self.step = self.number = 0

    def recomputable(self, version: int) -> bool:
        """Return whether the contents of `version` can be recomputed by the chain."""
        return version < len(self.chain)

    def has(self, version: int) -> bool:
        """Return whether the contents of `version` are there, in place or as a copy."""
        return version == self.version or (self.snapshots is not None and version in self.snapshots)

    def owned(self) -> bool:
        """Return whether the runtime keeps it in memory, and may free it if nobody else holds it."""
        return not self.pinned and (self.base is not None or bool(self.aliases))


class StorageWatch(weakref.ref[torch.UntypedStorage]):
    """A weak reference to the memory of a resident storage, which knows what it was.

    Attributes:
        storage: weak reference to what is known of it.
        size_bytes: its bytes.
        extra_bytes: those of them that plain eager PyTorch does not have.
    """

    __slots__ = ("extra_bytes", "size_bytes", "storage")
    storage: weakref.ref[TrackedStorage]
    size_bytes: int
    extra_bytes: int


class LedgerWatch(weakref.ref[TrackedStorage]):
    """A weak reference to a storage of the ledger, which reports when nothing can need the storage any more.

    Attributes:
        ledger_id: identity in the ledger.
    """

    __slots__ = ("ledger_id",)
    ledger_id: int


class Reference(NamedTuple):
    """A tensor as an argument of a recorded op: a storage, the version of its contents, and the geometry of the view.

    The storage that the op itself writes is None: what is being rebuilt.
    """

    storage: TrackedStorage | None
    version: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conjugated: bool
    negated: bool

    def view_of(self, source: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the storage of `source`."""
        if source.dtype == self.dtype and not source.is_conj() and not source.is_neg():
            view = source.as_strided(self.shape, self.stride, self.offset)
        else:
            view = torch.empty(0, dtype=self.dtype, device=source.device)
            view.set_(source.untyped_storage(), self.offset, self.shape, self.stride)
        if self.conjugated:
            view = view.conj()
        return neg_view(view) if self.negated else view


def reference_to(storage: TrackedStorage | None, tensor: torch.Tensor) -> Reference:
    """Return a reference to `tensor`, a view of the present contents of `storage`."""
    dtype = tensor.dtype
    return new_reference(
        Reference,
        (
            storage,
            0 if storage is None else storage.version,
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
            dtype,
            dtype.is_complex and tensor.is_conj(),
            tensor.is_neg(),
        ),
    )


class RecordedOp:
    """One execution of an operator, with all that is needed to execute it again.

    Attributes:
        operator: the facts about the operator.
        function: what is called again: the operator, or what computes its outputs without further effects.
        args: its arguments, with a ``Reference`` in place of each tensor.
        kwargs: its keyword arguments, likewise.
        inputs: the references among them.
        kept: the memory of inputs that cannot be recomputed.
        recordable: it can be executed again.
        grad_enabled: gradients are recorded, by which a kernel may decide what it keeps for its backward pass.
        outputs: weak references to the storages that it made, by the position of the output; the one that it writes, if it
            works in place.
        in_place: it writes a storage that existed.
        room_bytes: bytes of its outputs, and that it takes while it runs.
        taken_bytes: all that it has allocated; 0 if that was not measured.
        seconds: measured time.
        draws: the generator and its state before the op; None if it does not draw.
        ledger_id: identity in the ledger; None before it is entered.
        module: name of the module that was running.
        number: of the op in its step, if that is logged, or of all that were recorded.
    """

    __slots__ = (
        "__weakref__",
        "args",
        "draws",
        "function",
        "grad_enabled",
        "in_place",
        "inputs",
        "kept",
        "kwargs",
        "ledger_id",
        "module",
        "number",
        "operator",
        "outputs",
        "recordable",
        "room_bytes",
        "seconds",
        "taken_bytes",
    )

    def __init__(self, operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Begin with the arguments of the call."""
        self.operator = operator
        self.function = operator.function
        self.args, self.kwargs = args, kwargs
        self.inputs: list[Reference] = []
        self.kept: list[torch.UntypedStorage] = []
        self.recordable = operator.repeatable
        self.grad_enabled = torch.is_grad_enabled()
        self.outputs: list[tuple[int, weakref.ref[TrackedStorage]]] = []
        self.in_place = False
        self.room_bytes = self.taken_bytes = 0
        self.seconds = 0.0
        self.draws: tuple[torch.Generator, RandomState] | None = None
        self.ledger_id: int | None = None
        self.module = ""
        self.number = 0

    def made(self) -> list[TrackedStorage]:
        """Return the storages that it made and that are still known."""
        return [storage for _, weak in self.outputs if (storage := weak()) is not None]


def make_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached alias of `tensor` that shares its version counter; no dispatch mode sees it."""
    return make_subclass(torch.Tensor, tensor)
