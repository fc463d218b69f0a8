"""Static tensors of a step: parameters, buffers, inputs, and reserved memory.

Tied weights, views of one buffer and inputs that share memory count once, by their storage, since a budget is about bytes. An
input that is a slice of a larger tensor counts with its own bytes only: the rest is the caller's data set.
"""

from collections.abc import Iterable

import torch
from torch import nn

from planner.capture.program.program import Source
from planner.capture.rewrites.outputs import get_storage
from planner.capture.rewrites.sparse_products import is_sparse
from planner.capture.signature import Batch, list_leaves
from planner.graphs.errors import TraceError
from planner.graphs.ir import TANGENT, Kind, Tensor
from planner.torch_private import capture as private
from planner.torch_private.core import list_names_of_parts


def compute_allocated_bytes(size_bytes: int, device: torch.device) -> int:
    """Return the bytes that the allocator of `device` uses for `size_bytes`: CUDA rounds up to blocks of 512 bytes."""
    return -(-size_bytes // 512) * 512 if device.type == "cuda" else size_bytes


class StaticTensors:
    """The static memory: each storage is counted once, under its first name.

    Args:
        device: the device of the allocator.
    """

    def __init__(self, step: nn.Module, batch: Batch, device: torch.device) -> None:
        self.device = device
        self.tensors: list[Tensor] = []
        self.sources: list[Source] = []
        self._by_name: dict[tuple[Kind, str], int] = {}
        self._by_object: dict[int, int] = {}
        self._in_storage: dict[int, set[int]] = {}
        self._objects: list[torch.Tensor] = []
        for name, parameter in step.named_parameters(remove_duplicate=False):
            self._add_parts(Kind.PARAMETER, name, parameter)
        for name, buffer in step.named_buffers(remove_duplicate=False):
            if not is_sparse(buffer):  # its parts are added when the step reads it
                self._add_parts(Kind.BUFFER, name, buffer)
        for index, leaf in enumerate(list_leaves(batch)):
            if isinstance(leaf, torch.Tensor):
                self.add(Kind.INPUT, str(index), leaf)

    def _add_parts(self, kind: Kind, name: str, value: torch.Tensor, parts: tuple[str, ...] = ()) -> None:
        """Add a tensor of the model; of a subclass that is made of other tensors those that it is made of."""
        made_of = list_names_of_parts(value)
        for part in made_of:
            self._add_parts(kind, name, getattr(value, part), (*parts, part))
        if not made_of:
            self.add(kind, name, value, parts)

    def add(self, kind: Kind, name: str, value: torch.Tensor, parts: tuple[str, ...] = ()) -> int:
        """Add `value` under the name `name` and those of `parts` (``Source``), and return its id."""
        if id(value) not in self._by_object:
            cdata = get_storage(value)
            # An input may be a slice of a data set: only its own bytes count.
            size = value.numel() * value.element_size() if kind is Kind.INPUT else value.untyped_storage().nbytes()
            size = 0 if cdata in self._in_storage else compute_allocated_bytes(size, self.device)
            self._by_object[id(value)] = self._append(kind, name, size, value, parts)
            self._in_storage.setdefault(cdata, set()).add(self._by_object[id(value)])
            self._objects.append(value)  # keeps id() and storage identities valid
        self._by_name[kind, ".".join((name, *parts))] = self._by_object[id(value)]
        return self._by_object[id(value)]

    def reserve(self, name: str, kind: Kind, size_bytes: int) -> None:
        """Count `size_bytes` that no op reads, if there are any."""
        if size_bytes:
            self._append(kind, name, size_bytes, None)

    def find(self, desc: private.AOTInput) -> int:
        """Return the id of the tensor of a joint graph's input."""
        parts, whole = "", desc
        while isinstance(whole, private.SubclassGetAttrAOTInput):
            parts = f".{whole.attr}{parts}"
            whole = whole.base
        match whole:
            case private.ParamAOTInput(target=name) if (Kind.PARAMETER, name + parts) in self._by_name:
                return self._by_name[Kind.PARAMETER, name + parts]
            case private.BufferAOTInput(target=name) if (Kind.BUFFER, name + parts) in self._by_name:
                return self._by_name[Kind.BUFFER, name + parts]
            case private.PlainAOTInput(idx=index):
                return self._by_name[Kind.INPUT, str(index)]
            case private.ViewBaseAOTInput(base_of=view):
                overlapping = sorted(self.find_in_memory_of((self.find(view),)))
                raise TraceError(
                    f"{' and '.join(map(self._format_name, overlapping))} overlap in memory, and the step writes to one of "
                    "them: keep one tensor of them all, and take the others as views of it in the forward pass"
                )
        raise TraceError(f"the step has an input {desc!r}, a kind that is not supported: pass plain tensors")

    def find_in_memory_of(self, tensors: Iterable[int]) -> set[int]:
        """Return `tensors`, and all tensors that share a storage with one of them."""
        given = set(tensors)
        return given.union(*(sharing for sharing in self._in_storage.values() if not sharing.isdisjoint(given)))

    def add_tangent(self, value: torch.Tensor) -> int:
        """Return the id of the gradient of the loss, which autograd holds during the backward pass."""
        if (Kind.INPUT, TANGENT) not in self._by_name:
            size = compute_allocated_bytes(value.numel() * value.element_size(), self.device)
            self._by_name[Kind.INPUT, TANGENT] = self._append(Kind.INPUT, TANGENT, size, value)
        return self._by_name[Kind.INPUT, TANGENT]

    def _format_name(self, tensor: int) -> str:
        """Return the name of a static tensor in messages."""
        name = self.tensors[tensor].name
        return name.removeprefix("model.") if self.tensors[tensor].kind is not Kind.INPUT else name.replace("_", " ")

    def _append(self, kind: Kind, name: str, size_bytes: int, value: torch.Tensor | None, parts: tuple[str, ...] = ()) -> int:
        tensor = len(self.tensors)
        shape = () if value is None else tuple(value.shape)
        dtype = "" if value is None else format_dtype(value.dtype)
        unique = ".".join((name, *parts)) if kind in (Kind.PARAMETER, Kind.BUFFER) else f"{kind}_{name}"
        self.tensors.append(Tensor(tensor, unique, size_bytes, (), kind, shape, dtype))
        if value is not None:
            self.sources.append(Source(tensor, kind, name, parts))
        return tensor


def format_dtype(dtype: torch.dtype) -> str:
    """Return the name of `dtype` without its module: ``float32``."""
    return str(dtype).removeprefix("torch.")
