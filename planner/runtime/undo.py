"""Rollback of a failed step: in-place writes are undone, so that the model is as before.

A step that fails half way has written running statistics and drawn numbers; a training loop may catch the error and go on. Copies
are on the host and are used again: to allocate them takes longer than to copy. Known weakness: they are taken in every step,
though only a failure needs them.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch

from planner.capture.program.program import Program
from planner.capture.rewrites.explicit_generators import list_generators
from planner.graphs.ir import Graph, Phase
from planner.native.library import find_library
from planner.runtime.code import Backward, Forward, Returned
from planner.runtime.random_state import RandomState
from planner.runtime.unseen_writes import get_version
from planner.torch_private.core import backward_retains_graph, foreach_copy_, set_version_counter


class Rollback:
    """A stage of a step: if a pass raises, the step's in-place writes and the random state are restored.

    It keeps host copies of what the forward pass overwrites: mostly small running statistics. In the backward pass, later writes
    and draws by others are kept. Sums of gradients, which the backward pass writes, stay as they are, as in eager PyTorch.
    """

    @classmethod
    def of(cls, graph: Graph, program: Program, *, versions_follow: bool = False, in_backward: bool = True) -> Self | None:
        """Return the stage of a step; None if it writes nothing and draws no numbers.

        Args:
            versions_follow: True if the caller increments the versions of written tensors after the forward pass.
            in_backward: True if a failed backward pass also undoes the forward pass; the copies are then kept with the saved
                tensors.
        """
        needed = any(op.mutates or op.random for op in graph.ops)
        return cls(graph, program, versions_follow=versions_follow, in_backward=in_backward) if needed else None

    def __init__(self, graph: Graph, program: Program, *, versions_follow: bool, in_backward: bool) -> None:
        overwritten = {t for op in graph.ops if op.phase is Phase.FORWARD for t in op.mutates}
        self._written = [i for i, source in enumerate(program.sources) if source.tensor in overwritten]
        draws = any(op.random for op in graph.ops)
        drawn_from: list[Any] = [program.generator, *list_generators(program)] if draws else []
        self._generators: list[torch.Generator] = drawn_from
        self._increment = int(versions_follow)
        self._in_backward = in_backward
        self._unused: list[_HostCopies] = []  # of finished steps: allocating takes longer than copying

    def run_forward(self, run: Forward, static: Sequence[Any]) -> Returned:
        """Run the forward pass; undo it if it raises."""
        before = _Before([static[i] for i in self._written], self._generators, self._unused)
        try:
            loss, extras, saved = run(static)
        except BaseException:
            before.write_back()
            raise
        if not self._in_backward:
            self._unused.append(before.copies)
            return loss, extras, saved
        before.note_written(self._increment)
        return loss, extras, [*saved, before]

    def run_backward(self, run: Backward, static: Sequence[Any], saved: list[Any]) -> tuple[Any, ...]:
        """Run the backward pass; undo the whole step if it raises."""
        if not self._in_backward:
            return run(static, saved)
        before: _Before = saved.pop()
        before.note_drawn()
        try:
            gradients = run(static, saved)
        except BaseException:
            before.write_back(only_unwritten=True)
            raise
        if not backward_retains_graph():
            self._unused.append(before.copies)
        return gradients


class _Before:
    """The values and autograd versions of some tensors before the step, and the random states."""

    def __init__(self, tensors: list[torch.Tensor], generators: list[torch.Generator], unused: "list[_HostCopies]") -> None:
        self._tensors, self._generators = tensors, generators
        self._versions = _list_versions(tensors)
        try:
            self.copies = unused.pop()
        except IndexError:  # other threads take them too
            self.copies = _HostCopies(tensors)
        self.copies.take(tensors)
        self._states = self._drawn = [RandomState.of(generator) for generator in generators]

    def note_written(self, increment: int) -> None:
        """Record the versions and random states after the forward pass, apart from a later `increment` of the versions."""
        self._written = [version + increment for version in _list_versions(self._tensors)]
        self._drawn = [RandomState.of(generator) for generator in self._generators]

    def note_drawn(self) -> None:
        """Record the random states at the start of the backward pass if others have drawn since the forward pass."""
        if (now := [RandomState.of(generator) for generator in self._generators]) != self._drawn:
            self._states = self._drawn = now

    def write_back(self, *, only_unwritten: bool = False) -> None:
        """Restore the tensors; with `only_unwritten`, only those not written by others since the step."""
        for i, tensor in enumerate(self._tensors):
            if not only_unwritten or get_version(tensor) == self._written[i]:
                self.copies.write_back(i, tensor)
                if not tensor.is_inference():
                    set_version_counter((tensor,), (self._versions[i],))
        for generator, state in zip(self._generators, self._states, strict=True):
            state.restore(generator)


class _HostCopies:
    """Copies of some tensors in host memory that PyTorch's allocator does not count."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        places = defaultdict[tuple[torch.device, torch.dtype], list[int]](list)
        for i, tensor in enumerate(tensors):
            places[tensor.device, tensor.dtype].append(i)
        self._values: dict[int, torch.Tensor] = {}
        self._on_gpu: list[tuple[list[int], torch.Tensor]] = []
        self._on_cpu: list[tuple[list[int], list[torch.Tensor]]] = []
        for (device, dtype), group in places.items():
            sizes = [tensors[i].numel() for i in group]
            if device.type == "cuda":
                whole = torch.empty(sum(sizes), dtype=dtype, pin_memory=True)
            else:
                whole = torch.from_numpy(np.empty(sum(sizes) * dtype.itemsize, dtype=np.uint8)).view(dtype)
            parts = [part.view(tensors[i].shape) for i, part in zip(group, whole.split(sizes), strict=True)]
            if device.type == "cuda":
                self._on_gpu.append((group, whole))
            else:
                self._on_cpu.append((group, parts))
            self._values.update(zip(group, parts, strict=True))

    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy `tensors`, on a GPU with one kernel and one transfer, ordered after the work on the stream."""
        for group, whole in self._on_gpu:
            with torch.no_grad():
                whole.copy_(torch.cat([tensors[i].reshape(-1) for i in group]), non_blocking=True)
        for group, parts in self._on_cpu:
            _copy_all([tensors[i] for i in group], parts)

    def write_back(self, i: int, tensor: torch.Tensor) -> None:
        """Restore `tensor`, which was at position `i`."""
        with torch.no_grad():
            tensor.copy_(self._values[i])


def _copy_all(tensors: list[torch.Tensor], copies: list[torch.Tensor]) -> None:
    if (library := find_library()) is not None:
        library.copy_all(tensors, copies)
        return
    with torch.no_grad():
        foreach_copy_(copies, tensors)


def _list_versions(tensors: list[torch.Tensor]) -> list[int]:
    library = find_library()
    return [get_version(tensor) for tensor in tensors] if library is None else library.list_versions(tensors)
