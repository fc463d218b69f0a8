"""Handles that autograd holds in place of saved tensors, so that their storages can be evicted.

While the C++ library records, it does what is done here for most of them (``planner/native/op_records.cpp``).
"""

from typing import TYPE_CHECKING

import torch

from planner.torch_private.core import storage_address
from planner.train.eager.recompute import get_resident_tensor
from planner.train.eager.storages import Reference, make_alias

if TYPE_CHECKING:
    from planner.train.eager.recording import Recorder


class SavedTensor:
    """A handle that autograd holds in place of a saved tensor, whose storage may be evicted.

    Attributes:
        storage: the storage of the tensor.
        version: autograd's version counter when it was saved.
    """

    __slots__ = ("_leaf", "_number", "_recorder", "storage", "version")

    def __init__(self, recorder: "Recorder", tensor: torch.Tensor, alias: torch.Tensor, version: int) -> None:
        """Save `tensor`, of which `alias` keeps the storage in memory until it is evicted.

        Leaves that have gradients or whose storage is never evicted are held themselves, and so are parameters: as in plain
        eager PyTorch, a backward pass sees what was assigned to their ``.data`` meanwhile.
        """
        storage = recorder.memory.find(storage_address(alias)) or recorder.memory.add(alias)
        is_held = type(tensor) is torch.nn.Parameter or (tensor.is_leaf and (tensor.requires_grad or storage.pinned))
        self._leaf = tensor if is_held else None
        self._recorder = recorder
        self._number = recorder.sources.packs
        self.storage = storage
        self.version = version
        storage.aliases[self._number] = alias
        storage.saved += 1
        recorder.sources.saved[id(storage)] = storage
        recorder.sources.packs += 1

    def __del__(self) -> None:
        if not self._recorder.release(self):
            self._drop()

    def _drop(self) -> None:
        storage, recorder = self.storage, self._recorder
        storage.saved -= 1
        storage.aliases.pop(self._number, None)
        if storage.evicted_aliases is not None:
            storage.evicted_aliases.pop(self._number, None)
        if not storage.saved:
            recorder.sources.saved.pop(id(storage), None)
            recorder.memory.mark_not_evicted(storage)
            # The ledger is not updated: the garbage collector may call this while it runs. Its choices are checked instead.
            storage.base = None
            if storage.get_storage() is None:
                recorder.follower.log_release(storage, only_saved=True)
        if recorder.is_closed and not recorder.sources.saved:
            recorder.forget()

    def unpack(self) -> torch.Tensor:
        """Return the tensor, recomputed if it was evicted.

        Raises:
            RuntimeError: the tensor was modified in place after it was saved.
        """
        storage, recorder = self.storage, self._recorder
        with recorder.lock:
            if recorder.follower.log is not None:
                recorder.follower.log_unpack(storage)
            recorder.memory.touch(storage, recorder.memory.read_s)
            alias = self._leaf if self._leaf is not None else storage.aliases.get(self._number)
            if alias is None:
                alias = self._restore()
            elif alias._version != self.version:
                raise _build_overwritten_error(alias, self.version, alias._version)
            return make_alias(alias)  # autograd may keep this alias: then the reference count of the storage is higher

    def _restore(self) -> torch.Tensor:
        """Return the alias, which was dropped when the storage was evicted."""
        storage, recomputation = self.storage, self._recorder.recomputation
        assert storage.evicted_aliases is not None
        version, reference = storage.evicted_aliases[self._number]
        if version != self.version:
            raise _build_overwritten_error(reference, self.version, version)
        with recomputation.run_own_ops():
            source = get_resident_tensor(storage)
            if source is None:
                source = recomputation.recompute(storage)
            alias = storage.aliases[self._number] = make_alias(reference.view_of(source))
        del storage.evicted_aliases[self._number]
        self.version = alias._version
        return alias


def _build_overwritten_error(saved: torch.Tensor | Reference, expected: int, version: int) -> RuntimeError:
    """Return the error that plain eager PyTorch raises for a saved tensor that was modified in place."""
    kind = f"{saved.dtype}".removeprefix("torch.")
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{kind} {list(saved.shape)}] is at version {version}; expected version {expected} instead. "
        "Hint: torch.autograd.set_detect_anomaly(True) finds the operation that failed to compute its gradient"
    )


def unpack(saved: object) -> torch.Tensor:
    """Return the tensor that was packed.

    Raises:
        RuntimeError: the tensor was modified in place after it was saved.
    """
    if isinstance(saved, SavedTensor):
        return saved.unpack()
    assert isinstance(saved, torch.Tensor)
    return saved
