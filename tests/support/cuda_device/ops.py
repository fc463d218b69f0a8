"""Ops on tensors of the stand-in, as work on streams.

For each op the outputs are allocated at once, by what the op makes of meta tensors; the CPU's kernel is run when the stream comes
to it, on whatever is in memory then.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from tests.support.cuda_device.copies import copied
from tests.support.cuda_device.forms import UNKNOWN, forms, meta
from tests.support.cuda_device.machine import Machine
from tests.support.cuda_device.memory import seconds
from tests.support.cuda_device.streams import Stream, Work
from tests.support.cuda_device.tensors import OnDevice, Ref, new, on, plain, referred

aten = torch.ops.aten

_VIEWS = {aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten._unsafe_view.default}
_NEW = {"resize_", "empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided"}
_MATRIX_PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm}
_COPIES_OF_DEVICES = {aten._to_copy.default, aten.copy_.default}


def launch(machine: Machine, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Do `func` as PyTorch does on a device: allocate now, compute later."""
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    there = [leaf for leaf in given if isinstance(leaf, OnDevice)]
    if func in _COPIES_OF_DEVICES:
        return copied(machine, func, args, kwargs)
    index = max(there, key=lambda tensor: tensor.dim() > 0)._index
    _check_devices(func, given, index)
    if func in _VIEWS or _is_view(func) or func.overloadpacket is aten.set_:
        return _viewed(func, args, kwargs)
    if func.overloadpacket in _MATRIX_PRODUCTS:
        machine.memories[index].workspace(machine.current(index), biased=func.overloadpacket is aten.addmm)
    if func is aten._local_scalar_dense.default or func is aten.equal.default:
        return _waited(machine, func, args, kwargs, index)
    written = _written(func, args, kwargs)
    if func is aten.resize_.default or "out" in func._overloadname:
        _resize(machine, func, args, kwargs, written)
    made = _outputs(machine, func, args, kwargs, index, written)
    if made is UNKNOWN:
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


def _viewed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if func.overloadpacket is aten.set_:
        with torch._C._DisableTorchDispatch():
            func(*args, **kwargs)
        return args[0]
    made = func(*pytree.tree_map(plain, args), **pytree.tree_map(plain, kwargs))
    return pytree.tree_map(lambda leaf: on(args[0]._index, leaf) if isinstance(leaf, torch.Tensor) else leaf, made)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Arguments that `func` writes to, in the order of its schema."""
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    return [named[a.name] for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def _resize(machine: Machine, func: Any, args: Sequence[Any], kwargs: dict[str, Any], written: list[OnDevice]) -> None:
    """Give those `written` the size that `func` gives them, in new memory where that is another."""
    metas, named = pytree.tree_map(meta, (args, kwargs))
    with _disable_current_modes():
        func(*metas, **named)
    for tensor, form in zip(written, _written(func, metas, named), strict=True):
        if tensor.size() != form.size():
            assert tensor.numel() == 0, "no tensor with values is given another size"
            resized = new(machine, tensor._index, form.size(), form.stride(), form.dtype, form.untyped_storage().nbytes())
            with torch._C._DisableTorchDispatch():
                tensor.set_(resized.untyped_storage(), 0, form.size(), form.stride())


def _outputs(machine: Machine, func: Any, args: Sequence[Any], kwargs: dict[str, Any], index: int, written: list[Any]) -> Any:
    """What `func` returns, not computed yet; UNKNOWN where that depends on values."""
    returns = func._schema.returns
    aliased = [r.alias_info is not None for r in returns]
    if all(aliased):
        if not returns:
            return None
        return written[0] if len(returns) == 1 else tuple(written[: len(returns)])
    made = forms(func, args, kwargs)
    if made is UNKNOWN:
        return UNKNOWN

    def allocated(leaf: Any) -> Any:
        if leaf is None:
            return None
        return new(machine, index, leaf.size(), leaf.stride(), leaf.dtype, leaf.untyped_storage().nbytes())

    if not any(aliased):
        return pytree.tree_map(allocated, made)
    found = iter(written)
    return tuple(next(found) if old else allocated(leaf) for old, leaf in zip(aliased, made, strict=True))


def _queue(machine: Machine, func: Any, args: Any, kwargs: dict[str, Any], made: Any, stream: Stream) -> None:
    """Let `stream` compute `func` into `made`, where that is not among what it is given."""
    refs, names = pytree.tree_map(referred, (args, kwargs))
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


def _waited(machine: Machine, func: Any, args: Any, kwargs: dict[str, Any], index: int) -> Any:
    """`func` of values, for which the host waits."""
    machine.check_may_wait(str(func))
    for number in {leaf._index for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, OnDevice)}:
        stream = machine.current(number)
        stream.run_to(stream.issued)
    with _disable_current_modes(), machine.lock:
        made = func(*pytree.tree_map(plain, args), **pytree.tree_map(plain, kwargs))

    def there(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        target = new(machine, index, leaf.size(), leaf.stride(), leaf.dtype, leaf.untyped_storage().nbytes())
        plain(target).copy_(leaf)
        return target

    return pytree.tree_map(there, made)
