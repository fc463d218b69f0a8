"""Tensors on the stand-in: what they say of themselves, and where they lie.

The storage of such a tensor is memory of the host that ``DeviceMemory`` has handed out.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.support.cuda_device.machine import Machine
from tests.support.cuda_device.memory import Held
from tests.support.cuda_device.streams import Stream


class OnDevice(torch.Tensor):
    """A tensor on a device of the stand-in."""

    machine: Machine
    launch: Callable[..., Any]  # does an op on it (``ops``)
    _index: int
    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self._index)

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def is_cpu(self) -> bool:
        return False

    def get_device(self) -> int:
        return self._index

    def cpu(self) -> torch.Tensor:
        return self.to("cpu")

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        place, *_ = torch._C._nn._parse_to(*args, **{k: v for k, v in kwargs.items() if k != "copy"})
        if place is not None and place.type == "cpu":
            kwargs["copy"] = True
        return super().to(*args, **kwargs)

    def record_stream(self, stream: Stream) -> None:
        held = Ref.of(self).held
        if held is not None:
            held.used_by.add(stream)

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory"
            )
        return self.detach().cpu().numpy()

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"OnDevice({self.device}, {self.dtype}{list(self.shape)})"

    def __deepcopy__(self, memo: dict[int, object]) -> torch.Tensor:
        made = self.detach().clone()
        made = torch.nn.Parameter(made, self.requires_grad) if isinstance(self, torch.nn.Parameter) else made
        memo[id(self)] = made
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return cls.launch(cls.machine, func, args, kwargs or {})


@dataclass(frozen=True, slots=True)
class Ref:
    """Where a tensor lies, which does not hold its memory."""

    machine: Machine
    index: int
    held: Held | None  # None: it has no bytes
    storage_bytes: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: OnDevice) -> "Ref":
        storage = tensor.untyped_storage()
        held = tensor.machine.memories[tensor._index].held[storage.data_ptr()] if storage.nbytes() else None
        layout = tensor.size(), tensor.stride(), tensor.storage_offset()
        return Ref(tensor.machine, tensor._index, held, storage.nbytes(), tensor.dtype, *layout)

    def plain(self, *, again: bool) -> torch.Tensor:
        """What lies there now, as a tensor of the host; in memory that has gone only where it is done `again`."""
        if self.held is None:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype)
        if self.held.is_gone and not again:
            said = f"work uses {self.dtype}{list(self.size)} on cuda:{self.index} behind where its memory was freed"
            self.machine.wrong.append(said)
        values = self.machine.memories[self.index].bytes_of(self.held, self.storage_bytes)
        storage = torch.from_numpy(values).untyped_storage()
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True)
class HostRef:
    """Where a tensor lies in page-locked memory of the host, which this does not hold either."""

    address: int
    storage_bytes: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: torch.Tensor) -> "HostRef":
        storage = tensor.untyped_storage()
        layout = tensor.size(), tensor.stride(), tensor.storage_offset()
        return HostRef(storage.data_ptr(), storage.nbytes(), tensor.dtype, *layout)

    def plain(self, *, again: bool) -> torch.Tensor:
        """What lies there now."""
        del again
        values = np.ctypeslib.as_array((ctypes.c_uint8 * self.storage_bytes).from_address(self.address))
        return torch.empty(0, dtype=self.dtype).set_(
            torch.from_numpy(values).untyped_storage(), self.offset, self.size, self.stride
        )


def referred(value: Any) -> Any:
    return Ref.of(value) if isinstance(value, OnDevice) else value


def plain(value: Any) -> Any:
    """`value` as a tensor of the host over the same storage."""
    if not isinstance(value, OnDevice):
        return value
    made = torch.empty(0, dtype=value.dtype)
    return made.set_(value.untyped_storage(), value.storage_offset(), value.size(), value.stride())


def on(index: int, plain: torch.Tensor) -> OnDevice:
    """`plain`, whose storage is memory of the device, as a tensor there."""
    made = torch.Tensor._make_subclass(OnDevice, plain)
    made._index = index
    return made


def new(machine: Machine, index: int, size: Any, stride: Any, dtype: torch.dtype, storage_bytes: int) -> OnDevice:
    """A tensor that was allocated for the current stream of a device."""
    made = torch.empty(0, dtype=dtype)
    if storage_bytes:
        storage = machine.memories[index].take(storage_bytes, machine.current(index)).untyped_storage()
        made = made.set_(storage, 0, size, stride)
    else:
        made = made.as_strided(size, stride) if 0 in torch.Size(size) else made
    return on(index, made)
