"""The contents that saved tensors are computed from: copied or pinned before they are lost.

Known weakness: a constant that is overwritten while saved tensors may have to be recomputed from it is copied, or these tensors
are pinned if they are smaller. Both take memory that the program did not ask for; copies alone had doubled all parameters where a
graph stays alive while the optimizer steps.
"""

from collections.abc import Hashable, Sequence

import torch

from planner.train.eager.operators import Operator
from planner.train.eager.storages import Memory, Recomputation, RecordedOp, TrackedStorage


class Sources:
    """The saved tensors of autograd, and what they can be recomputed from.

    Args:
        memory: the budgeted memory.
        recomputation: recomputes storages that are pinned.

    Attributes:
        saved: the storages of saved tensors, by identity.
        pinned: number of storages that were pinned since their ops were recorded.
        copies: number of storages that were copied before they were overwritten.
    """

    def __init__(self, memory: Memory, recomputation: Recomputation) -> None:
        self.saved: dict[int, TrackedStorage] = {}
        self.pinned = self.copies = 0
        self._memory = memory
        self._recomputation = recomputation
        self._copied_bytes = 0  # in this step
        self._read_by: tuple[int, dict[Hashable, list[int]]] = (-1, {})  # ``Memory.packs`` when it was found

    def copy_before_writes(self, operator: Operator, written: Sequence[TrackedStorage]) -> None:
        """Copy pinned storages that are about to be written, if saved tensors may have to be recomputed from them.

        Pin those saved tensors instead, if they are smaller. Other tensors computed from them are pinned when they are read.
        """
        for storage in written:
            if not storage.pinned or storage.last_read != storage.version:
                continue
            if (
                self.saved
                and (readers := self._find_saved_readers(storage))
                and not self._pin_instead(readers, storage.size_bytes)
            ):
                self._memory.make_room(storage.size_bytes, f"a copy of the tensor that {operator.function} writes")
                held = storage.get_storage()
                assert held is not None
                copy = torch.empty(0, dtype=torch.uint8, device=held.device).set_(held).clone()  # of all bytes
                self._memory.add(copy, visible=False)
                storage.snapshots = {**(storage.snapshots or {}), storage.version: copy}
                self.copies += 1
                self._copied_bytes += storage.size_bytes
            else:
                self._memory.overwrites += 1

    def pin_if_lost(self, storage: TrackedStorage) -> bool:
        """Pin a resident storage and return True if contents that it is computed from were lost; else return False.

        Sources that were pinned after an op had read them are kept by that op from now on.
        """
        overwrites = self._memory.overwrites
        checked = [storage]
        storage.checked = overwrites
        for computed in checked:  # grows in the loop
            for op in computed.chain:
                for source, version in op.inputs:
                    if source is None or (source.pinned and self.keep(source, version, op)):
                        continue
                    if not source.is_recomputable(version):
                        for passed in checked:
                            passed.checked = -1
                        self.pin(storage)
                        return True
                    if source.checked != overwrites:
                        source.checked = overwrites
                        checked.append(source)
        return False

    def keep(self, source: TrackedStorage, version: int, op: RecordedOp) -> bool:
        """Keep the contents of a pinned storage that an op has read, and return True; return False if they are not resident."""
        if version != source.version:
            return source.has_copy(version)
        held = source.get_storage()
        if held is None:
            return False
        if held not in op.kept:
            op.kept += (held,)
        return True

    def pin(self, storage: TrackedStorage) -> None:
        """Keep a resident storage, because its contents can no longer be recomputed."""
        if not storage.pinned:
            self.pinned += 1
            storage.pinned = True
            self._memory.allow(storage)
            self._read_by = (-1, {})

    def forget(self) -> None:
        """Begin again, because no tensor is saved."""
        self._copied_bytes = 0
        self._read_by = (-1, {})

    def forget_unneeded(self) -> None:
        """Drop the records of resident storages that no saved tensor is computed from, and pin these storages.

        A record keeps the inputs that cannot be recomputed, as the batches from which a gradient was accumulated.
        """
        readers, memory = self._find_readers(), self._memory
        for storage in memory.resident.values():
            if not storage.pinned and id(storage) not in self.saved and id(storage) not in readers:
                storage.drop_records()
                memory.allow(storage)
        self._read_by = (-1, {})

    def _find_saved_readers(self, storage: TrackedStorage) -> list[TrackedStorage]:
        """Return the storages of saved tensors that may have to be recomputed from the current contents of a pinned storage."""
        readers = self._find_readers()
        found: set[int] = set()
        stack = list(readers.get((id(storage), storage.version), ()))
        while stack:
            reader = stack.pop()
            if reader not in found:
                found.add(reader)
                stack += readers.get(reader, ())
        return [self.saved[reader] for reader in found if reader in self.saved]

    def _find_readers(self) -> dict[Hashable, list[int]]:
        """Return the storages that saved tensors are computed from, each with the identities of those computed from it.

        Unpinned storages are named by identity. Pinned ones, whose contents must be resident, are named by identity and version.
        """
        packs, readers = self._read_by
        if packs == self._memory.packs:
            return readers
        readers = {}
        seen = set(self.saved)
        stack = [storage for storage in self.saved.values() if not storage.pinned]
        while stack:
            reader = stack.pop()
            for op in reader.chain:
                for storage, version in op.inputs:
                    if storage is None:
                        continue
                    if storage.pinned:
                        readers.setdefault((id(storage), version), []).append(id(reader))
                    if not storage.pinned or storage.is_recomputable(version):
                        readers.setdefault(id(storage), []).append(id(reader))
                        if id(storage) not in seen:
                            seen.add(id(storage))
                            stack.append(storage)
        self._read_by = self._memory.packs, readers
        return readers

    def _pin_instead(self, readers: Sequence[TrackedStorage], size_bytes: int) -> bool:
        """Pin storages, and return True; return False if they are larger than `size_bytes` and the copies of the step so far."""
        if sum(storage.size_bytes for storage in readers) > size_bytes + self._copied_bytes:
            return False
        for storage in sorted(readers, key=lambda storage: not storage.address):
            if not storage.address:
                self._recomputation.recompute(storage)
            self.pin(storage)
        return True
