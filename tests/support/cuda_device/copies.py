"""Copies on the stand-in: on a device, between devices, and between a device and the host."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.support.cuda_device.machine import Machine
from tests.support.cuda_device.memory import seconds
from tests.support.cuda_device.streams import Stream, Work
from tests.support.cuda_device.tensors import HostRef, OnDevice, Ref, new, referred

aten = torch.ops.aten


def copied(machine: Machine, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``copy_`` and ``_to_copy`` on a device, between devices, and between a device and the host."""
    if func is aten.copy_.default:
        target, source, non_blocking = args[0], args[1], bool(args[2]) if len(args) > 2 else kwargs.get("non_blocking", False)
        _copy_between(machine, target, source, non_blocking=non_blocking)
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
    _copy_between(machine, target, source, non_blocking=bool(kwargs.get("non_blocking")))
    return target


def _copy_between(machine: Machine, target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> None:
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
    locked, pinned = machine.is_locked(host), machine.is_pinned(host)
    if non_blocking and (locked or pinned):
        _queue_copy(target, source, machine.current(index), host=host if locked else None)
        return
    stream = machine.current(index)
    if host is target or stream.recording is not None or host.dim():
        machine.check_may_wait("a copy that waits")
    if host is source and not (locked or pinned):  # it is staged: the host may write to it at once
        _queue_copy(target, source.detach().clone(), stream)
        return
    _queue_copy(target, source, stream)
    stream.run_to(stream.issued)


def _queue_copy(target: torch.Tensor, source: torch.Tensor, stream: Stream, host: torch.Tensor | None = None) -> None:
    ends = tuple(HostRef.of(end) if end is host else referred(end) for end in (target, source))
    again = stream.recording is not None

    def run(_: int) -> None:
        to, of = (end.plain(again=again) if isinstance(end, Ref | HostRef) else end for end in ends)
        with torch.no_grad(), _disable_current_modes():
            to.copy_(of)

    used = () if host is None else ((host.untyped_storage().data_ptr(), host.untyped_storage().nbytes()),)
    stream.launch(Work(run, seconds(2 * target.nbytes), host=used))
