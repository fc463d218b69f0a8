"""A tensor's bytes on the host, with its layout on the device."""

import torch

from planner.runtime.host_memory import Copy, HostMemory


class HostTensor:
    """A host copy of a tensor's whole storage. Its buffer is returned when it dies.

    Attributes:
        values: the bytes of the storage, uint8.
        copies: copies issued with it, the one that fills it first.
    """

    __slots__ = ("_buffer", "_device", "_dtype", "_layout", "_memory", "copies", "values")

    def __init__(self, tensor: torch.Tensor, memory: HostMemory, size_bytes: int) -> None:
        """Take `size_bytes` of `memory` for `tensor`; nothing is copied yet.

        Raises:
            CopyError: there is no room.
        """
        self._memory = memory
        self._buffer = memory.take(size_bytes)
        self.values = self._buffer.values[: tensor.untyped_storage().nbytes()]
        self.copies: list[Copy] = []
        self._device, self._dtype = tensor.device, tensor.dtype
        self._layout = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()

    @property
    def waits_for(self) -> tuple[Copy, ...]:
        """The copies issued with the buffer before this tensor."""
        return tuple(self._buffer.used_by)

    def on_device(self) -> torch.Tensor:
        """Return an uninitialized tensor on the device with the layout of the original."""
        storage = torch.empty(len(self.values), dtype=torch.uint8, device=self._device).untyped_storage()
        return torch.empty(0, dtype=self._dtype, device=self._device).set_(storage, *self._layout)

    def __del__(self) -> None:
        if hasattr(self, "copies"):  # there was room
            self._buffer.used_by = self.copies
            self._memory.give_back(self._buffer)


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of `tensor` as a uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
