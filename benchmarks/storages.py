"""Storages counted as they come and go: the peak of a step, by a way that shares nothing with the planner's own measurement."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from planner.torch_private.core import TorchDispatchMode, pytree


class LiveStorages(TorchDispatchMode):
    """While entered, counts the bytes of all storages that are alive: those given, and those of all results of ops.

    A storage counts from the op that made it until it is freed, once however many views it has. What kernels take
    for themselves and free again is not seen.

    Args:
        there: tensors that are in memory before: parameters, buffers, the batch.

    Attributes:
        live_bytes: now.
        peak_bytes: the most so far.
    """

    def __init__(self, there: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._known: set[int] = set()
        for tensor in there:
            self._add(tensor)

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = function(*args, **(kwargs or {}))
        for result in pytree.tree_leaves(results):
            if isinstance(result, torch.Tensor):
                self._add(result)
        return results

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        identity, size_bytes = storage._cdata, storage.nbytes()
        if identity not in self._known:
            self._known.add(identity)
            weakref.finalize(storage, self._remove, identity, size_bytes).atexit = False
            self.live_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _remove(self, identity: int, size_bytes: int) -> None:
        self._known.remove(identity)
        self.live_bytes -= size_bytes
