"""Tensors on the stand-in: what they say of themselves, and the ops on them as work on streams.

The storage of such a tensor is memory of the host that ``DeviceMemory`` has handed out. For each op the outputs are allocated
at once, by what the op makes of meta tensors; the CPU's kernel is run when the stream comes to it, on whatever is in memory then.
"""

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from tests.support.cuda_device.machine import Machine
from tests.support.cuda_device.memory import Held, seconds
from tests.support.cuda_device.streams import Stream, Work

aten = torch.ops.aten

_VIEWS = {aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten._unsafe_view.default}
_NEW = {"resize_", "empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided"}
_MATRIX_PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm}
_COPIES_OF_DEVICES = {aten._to_copy.default, aten.copy_.default}


class OnDevice(torch.Tensor):
    """A tensor on a device of the stand-in."""

    machine: Machine
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

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
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
        return launch(cls.machine, func, args, kwargs or {})


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


def launch(machine: Machine, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Do `func` as PyTorch does on a device: allocate now, compute later."""
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    there = [leaf for leaf in given if isinstance(leaf, OnDevice)]
    if func in _COPIES_OF_DEVICES:
        return _copied(machine, func, args, kwargs)
    index = max(there, key=lambda tensor: tensor.dim() > 0)._index
    _check_devices(func, given, index)
    if func in _VIEWS or _is_view(func) or func.overloadpacket is aten.set_:
        return _viewed(func, args, kwargs)
    if func.overloadpacket in _MATRIX_PRODUCTS:
        machine.memories[index].workspace(machine.current(index))
    if func is aten._local_scalar_dense.default or func is aten.equal.default:
        return _waited(machine, func, args, kwargs, index)
    written = _written(func, args, kwargs)
    if func is aten.resize_.default or "out" in func._overloadname:
        _resize(machine, func, args, kwargs, written)
    made = _outputs(machine, func, args, kwargs, index, written)
    if made is _UNKNOWN:
        return _waited(machine, func, args, kwargs, index)
    if func.overloadpacket.__name__ not in _NEW:
        _queue(machine, func, args, kwargs, made, machine.current(index))
    return made


def _check_devices(func: Any, given: Iterable[torch.Tensor], index: int) -> None:
    for tensor in given:
        if (tensor.dim() or tensor.is_cuda) and tensor.device != torch.device("cuda", index) and not _mixes(func):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, cuda:{index} and "
                f"{tensor.device}! ({func})"
            )


def _mixes(func: Any) -> bool:
    return func is aten.equal.default or func.overloadpacket.__name__.startswith("_foreach_copy")


def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _plain(value: Any) -> Any:
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


def _viewed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if func.overloadpacket is aten.set_:
        with torch._C._DisableTorchDispatch():
            func(*args, **kwargs)
        return args[0]
    made = func(*pytree.tree_map(_plain, args), **pytree.tree_map(_plain, kwargs))
    return pytree.tree_map(lambda leaf: on(args[0]._index, leaf) if isinstance(leaf, torch.Tensor) else leaf, made)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Arguments that `func` writes to, in the order of its schema."""
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    return [named[a.name] for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def _resize(machine: Machine, func: Any, args: Sequence[Any], kwargs: dict[str, Any], written: list[OnDevice]) -> None:
    """Give those `written` the size that `func` gives them, in new memory where that is another."""
    metas, named = pytree.tree_map(_meta, (args, kwargs))
    with _disable_current_modes():
        func(*metas, **named)
    for tensor, form in zip(written, _written(func, metas, named), strict=True):
        if tensor.size() != form.size():
            assert tensor.numel() == 0, "no tensor with values is given another size"
            resized = new(machine, tensor._index, form.size(), form.stride(), form.dtype, form.untyped_storage().nbytes())
            with torch._C._DisableTorchDispatch():
                tensor.set_(resized.untyped_storage(), 0, form.size(), form.stride())


_UNKNOWN: Any = object()


def _outputs(machine: Machine, func: Any, args: Sequence[Any], kwargs: dict[str, Any], index: int, written: list[Any]) -> Any:
    """What `func` returns, not computed yet; _UNKNOWN where that depends on values."""
    returns = func._schema.returns
    aliased = [r.alias_info is not None for r in returns]
    if all(aliased):
        if not returns:
            return None
        return written[0] if len(returns) == 1 else tuple(written[: len(returns)])
    made = _forms(func, args, kwargs)
    if made is _UNKNOWN:
        return _UNKNOWN

    def allocated(leaf: Any) -> Any:
        if leaf is None:
            return None
        return new(machine, index, leaf.size(), leaf.stride(), leaf.dtype, leaf.untyped_storage().nbytes())

    if not any(aliased):
        return pytree.tree_map(allocated, made)
    found = iter(written)
    return tuple(next(found) if old else allocated(leaf) for old, leaf in zip(aliased, made, strict=True))


_known_forms: dict[Any, Any] = {}


def _forms(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What `func` returns, as meta tensors; _UNKNOWN where that depends on values."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    key = (func, spec, tuple(map(_form, leaves)))
    if key not in _known_forms:
        try:
            with _disable_current_modes():
                made = func(*pytree.tree_map(_meta, args), **{**pytree.tree_map(_meta, kwargs), **_on_meta(kwargs)})
        except (NotImplementedError, RuntimeError):
            made = _UNKNOWN
        if any(not isinstance(leaf, torch.Tensor | type(None)) for leaf in pytree.tree_leaves(made)):
            made = _UNKNOWN
        _known_forms[key] = made
    return _known_forms[key]


def _form(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.size(), value.stride(), value.is_cuda)
    return None if isinstance(value, torch.Generator) else (type(value), value)


def _meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, OnDevice) and value.dim() == 0:
        return value  # a number
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.device("meta") if name == "device" else None for name in ("device", "generator") if name in kwargs}


def _queue(machine: Machine, func: Any, args: Any, kwargs: dict[str, Any], made: Any, stream: Stream) -> None:
    """Let `stream` compute `func` into `made`, where that is not among what it is given."""
    refs, names = pytree.tree_map(_referred, (args, kwargs))
    if "device" in names:
        names["device"] = torch.device("cpu")
    given = {id(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, OnDevice)}
    targets = [Ref.of(t) if isinstance(t, OnDevice) and id(t) not in given else None for t in pytree.tree_leaves(made)]
    generator = None
    if torch.Tag.nondeterministic_seeded in func.tags:
        index = stream.device.index
        generator = names.pop("generator", None) or machine.generators[index]
    takes_generator = any(argument.name == "generator" for argument in func._schema.arguments)
    again = stream.recording is not None

    def run(seed: int) -> None:
        values, others = pytree.tree_map(lambda leaf: leaf.plain(again=again) if isinstance(leaf, Ref) else leaf, (refs, names))
        if generator is not None and takes_generator:
            others["generator"] = torch.Generator().manual_seed(seed)
        with torch.no_grad(), _disable_current_modes(), seeded(None if generator is None else seed):
            found = pytree.tree_leaves(func(*values, **others))
            for target, value in zip(targets, found, strict=True):
                if target is not None and value is not None:
                    target.plain(again=again).copy_(value)

    size_bytes = sum(leaf.nbytes for leaf in pytree.tree_leaves((args, kwargs, made)) if isinstance(leaf, OnDevice))
    stream.launch(Work(run, seconds(size_bytes), generator))


class seeded:  # noqa: N801  # a context
    """Inside, the CPU's generator draws from a seed, and goes on afterwards as if nobody had drawn."""

    def __init__(self, seed: int | None) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        if self._seed is not None:
            self._state = torch.default_generator.get_state()
            torch.default_generator.manual_seed(self._seed)

    def __exit__(self, *_: object) -> None:
        if self._seed is not None:
            torch.default_generator.set_state(self._state)


def _referred(value: Any) -> Any:
    return Ref.of(value) if isinstance(value, OnDevice) else value


def _waited(machine: Machine, func: Any, args: Any, kwargs: dict[str, Any], index: int) -> Any:
    """`func` of values, for which the host waits."""
    machine.check_may_wait(str(func))
    for number in {leaf._index for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, OnDevice)}:
        stream = machine.current(number)
        stream.run_to(stream.issued)
    with _disable_current_modes(), machine.lock:
        made = func(*pytree.tree_map(_plain, args), **pytree.tree_map(_plain, kwargs))

    def there(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        target = new(machine, index, leaf.size(), leaf.stride(), leaf.dtype, leaf.untyped_storage().nbytes())
        _plain(target).copy_(leaf)
        return target

    return pytree.tree_map(there, made)


def _copied(machine: Machine, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``copy_`` and ``_to_copy`` on a device, between devices, and between a device and the host."""
    if func is aten.copy_.default:
        target, source, non_blocking = args[0], args[1], bool(args[2]) if len(args) > 2 else kwargs.get("non_blocking", False)
        copy_between(machine, target, source, non_blocking=non_blocking)
        return target
    source = args[0]
    place = kwargs.get("device")
    place = source.device if place is None else torch.device(place)
    form = torch.empty_strided(source.size(), source.stride(), dtype=source.dtype, device="meta")
    like = form.to(dtype=kwargs.get("dtype"), memory_format=kwargs.get("memory_format") or torch.preserve_format, copy=True)
    if place.type == "cpu":
        target = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
    else:
        index = machine.device if place.index is None else place.index
        target = new(machine, index, like.size(), like.stride(), like.dtype, like.untyped_storage().nbytes())
    copy_between(machine, target, source, non_blocking=bool(kwargs.get("non_blocking")))
    return target


def copy_between(machine: Machine, target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> None:
    """Copy on the stream that CUDA copies on; the host waits where it would."""
    if isinstance(target, OnDevice) and isinstance(source, OnDevice):
        stream, other = machine.current(source._index), machine.current(target._index)
        if stream is not other:
            stream.wait_stream(other)
        _queue_copy(target, source, stream)
        if stream is not other:
            other.wait_stream(stream)
        return
    host, index = (source, target._index) if isinstance(target, OnDevice) else (target, source._index)
    locked = machine.is_locked(host)
    if non_blocking and locked:
        _queue_copy(target, source, machine.current(index), host=host)
        return
    stream = machine.current(index)
    if host is target or stream.recording is not None or host.dim():
        machine.check_may_wait("a copy that waits")
    if host is source:
        _queue_copy(target, source.detach().clone(), stream)
        if locked:
            stream.run_to(stream.issued)
    else:
        _queue_copy(target, source, stream)
        stream.run_to(stream.issued)


def _queue_copy(target: torch.Tensor, source: torch.Tensor, stream: Stream, host: torch.Tensor | None = None) -> None:
    ends = tuple(HostRef.of(end) if end is host else _referred(end) for end in (target, source))
    again = stream.recording is not None

    def run(_: int) -> None:
        to, of = (end.plain(again=again) if isinstance(end, Ref | HostRef) else end for end in ends)
        with torch.no_grad(), _disable_current_modes():
            to.copy_(of)

    used = () if host is None else ((host.untyped_storage().data_ptr(), host.untyped_storage().nbytes()),)
    stream.launch(Work(run, seconds(2 * target.nbytes), host=used))
