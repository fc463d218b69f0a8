"""Parameters, buffers and inputs that are written between the passes, such as DINO's centre and running statistics of inputs.

Eager PyTorch allows it where autograd has not saved the tensor. A plan that recomputes ops reads their inputs again in the
backward pass, so it needs the values of the forward pass. In the first step copies are taken of all tensors that only
recomputed ops read, as far as they fit in the budget between the passes, and freed before the backward pass begins if nothing
was written; a copy also shows writes through ``.data``. Where something was, the copy is read, and later steps keep one by plans
that count it.

Copies in every step would cost memory and time in all models for the few that write. A copy at the time of the write is not
possible: PyTorch counts writes to a tensor, but calls nothing before them.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from planner.capture.frontend.preserved_state import has_same_values
from planner.capture.lowering.lower import Capture
from planner.graphs.errors import PlannerError
from planner.graphs.ir import Graph, Kind, Phase
from planner.runtime.unseen_writes import get_version

_ORDER = (Kind.BUFFER, Kind.INPUT, Kind.PARAMETER)  # in which copies are taken while they fit


@dataclass(frozen=True, slots=True)
class Input:
    """A static tensor at the end of a forward pass: its number of writes so far, and a copy if one was taken.

    The copy may have been freed for other tensors.
    """

    tensor: int
    value: torch.Tensor
    version: int
    copy: torch.Tensor | None

    @property
    def has_copy(self) -> bool:
        """True if there is a copy."""
        return self.copy is not None and (has_memory(self.copy) or not self.copy.numel())

    @property
    def is_written(self) -> bool:
        """True if the tensor was written since; also in a way that autograd does not see, if there is a copy."""
        seen = get_version(self.value) != self.version
        return seen or (self.copy is not None and self.has_copy and not has_same_values(self.value, self.copy))


def has_memory(tensor: torch.Tensor) -> bool:
    """Return True if `tensor` has memory."""
    return tensor.untyped_storage().nbytes() > 0


class ChangedInputs:
    """The static tensors that the backward pass of a plan reads only to recompute.

    Attributes:
        changed: static tensors that were written between the passes, once that has concerned one that the plan recomputes from.
        recomputed_from: those that the backward pass reads.
    """

    def __init__(self, graph: Graph, read: Collection[int], copied: Iterable[int] = ()) -> None:
        """Find them among the static tensors that are `read` by the backward pass; keep copies of those that are `copied`."""
        own = {t for op in graph.ops for t in (op.mutates if op.phase is Phase.FORWARD else op.inputs)}
        tensors = [t for t in graph.tensors if not t.producers and t.kind in _ORDER and t.id not in own]
        tensors.sort(key=lambda t: (_ORDER.index(t.kind), t.size_bytes))
        reads = {t for op in graph.ops for t in op.inputs}
        self.recomputed_from = tuple(t.id for t in tensors if t.id in read)
        self.changed = set(copied)
        self._graph = graph
        self._others = [t.id for t in tensors if t.id in reads and t.id not in read and t.kind is not Kind.INPUT]
        self._copied = self.changed.intersection(self.recomputed_from)
        self._is_first = False

    def begin(self, room_bytes: int) -> int:
        """Take copies that fit in `room_bytes` between the passes of the next step, and look for all writes.

        Return the bytes that are left.
        """
        self._is_first = True
        self._copied = self.changed.intersection(self.recomputed_from)
        for t in self.recomputed_from:
            size_bytes = self._graph.tensors[t].size_bytes
            if t not in self._copied and size_bytes <= room_bytes:
                self._copied = self._copied | {t}
                room_bytes -= size_bytes
        return room_bytes

    def save(self, value_of: Callable[[int], torch.Tensor]) -> Sequence[Input]:
        """Return the values of the tensors at the end of a forward pass, by `value_of`; first those in ``recomputed_from``."""
        if not self._is_first and not self.recomputed_from:
            return ()
        watched = (*self.recomputed_from, *self._others) if self._is_first else self.recomputed_from
        copied = self._copied
        return [
            Input(t, value, get_version(value), value.detach().clone() if t in copied else None)
            for t, value in ((t, value_of(t)) for t in watched)
        ]

    def restore(self, saved: Sequence[Input], name: Callable[[int], str]) -> list[torch.Tensor]:
        """Return the values of ``recomputed_from`` that the forward pass has read; raise PlannerError if one is lost."""
        self._is_first = False
        read = saved[: len(self.recomputed_from)]
        written = {given.tensor for given in saved if given.is_written}
        if not written.isdisjoint(self.recomputed_from):
            self.changed |= written
        self._copied = self.changed.intersection(self.recomputed_from)
        for given in read:
            if given.tensor in written and not given.has_copy:
                raise PlannerError(
                    f"{name(given.tensor)} was written between the step and its backward pass, and the plan recomputes from it: "
                    "the gradients of this step are lost. The next steps keep a copy for the backward pass: call the step again"
                )
        return [given.copy if given.tensor in written and given.copy is not None else given.value for given in read]


def keep_copies(captured: Capture, changed: Iterable[int]) -> Capture:
    """Return `captured` with copies of the `changed` tensors for its backward pass, which count as static memory."""
    new = frozenset(changed) - captured.copied
    graph = captured.graph
    for t in sorted(new):
        graph = graph.holding(Kind.BUFFER, f"copy_of_{graph.tensors[t].name}", graph.tensors[t].size_bytes)
    return replace(captured, graph=graph, copied=captured.copied | new)
