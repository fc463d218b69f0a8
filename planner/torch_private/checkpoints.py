"""Checkpoints of PyTorch that are not reentrant: what they recompute is kept by hooks on saved tensors.

Such a checkpoint recomputes its whole segment when its backward pass begins, and holds all tensors of the segment until they are
read. Its own hooks hide them from others, and so does the graph of the recomputation.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils import checkpoint

from planner.torch_private.patches import wrap

Hooks = tuple[Callable[[torch.Tensor], object], Callable[[Any], torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Facts:
    """What a checkpoint compares of a recomputed tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class _Recomputed(WeakKeyDictionary[Any, Any]):
    """The tensors of a recomputed segment by their handles, each packed by hooks; while they are compared, their facts."""

    def __init__(self, hooks: Hooks) -> None:
        super().__init__()
        self.is_compared = False
        self._pack, self._unpack = hooks

    def __setitem__(self, handle: Any, tensor: torch.Tensor) -> None:
        super().__setitem__(handle, (self._pack(tensor), _Facts(tensor.shape, tensor.dtype, tensor.device)))

    def __getitem__(self, handle: Any) -> Any:
        packed, facts = super().__getitem__(handle)
        return facts if self.is_compared else self._unpack(packed)


def get_saved_hooks() -> Hooks | None:
    """Return the innermost hooks on saved tensors."""
    found: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


@contextmanager
def pack_recomputed(find_hooks: Callable[[], Hooks | None]) -> Iterator[None]:
    """Let the hooks on saved tensors that `find_hooks` finds in a thread, if any, pack what checkpoints recompute."""
    frame = checkpoint._CheckpointFrame
    with (
        wrap(checkpoint._recomputation_hook, "__init__", partial(_pack_in, find_hooks)),
        wrap(frame, "check_recomputed_tensors_match", _compare_facts),
    ):
        yield


def _pack_in(find_hooks: Callable[[], Hooks | None], init: Callable[..., None], own: Any, find_frame: Any, group: Any) -> None:
    """Initialize the hooks `own` of a recomputation, with a hook around it."""
    init(own, find_frame, group)
    hooks = find_hooks()
    recomputed = find_frame().recomputed
    if hooks is None or group in recomputed:
        return
    recomputed[group] = _Recomputed(hooks)
    own.pack_hook, own.unpack_hook = partial(_pack_after, own.pack_hook, hooks[0]), hooks[1]


def _pack_after(keep: Callable[[torch.Tensor], torch.Tensor], pack: Callable[[torch.Tensor], object], x: torch.Tensor) -> object:
    return pack(keep(x))


def _compare_facts(compare: Callable[..., None], frame: Any, group: Any) -> None:
    recomputed = frame.recomputed[group]
    if not isinstance(recomputed, _Recomputed):
        compare(frame, group)
        return
    recomputed.is_compared = True
    try:
        compare(frame, group)
    finally:
        recomputed.is_compared = False
