"""Steps in an arena: the passes of an executor take their memory from one slab, at planned addresses.

The first step is recorded: which memory it asks for, in which order, and when it is freed. Addresses are planned for these
requests (``solvers.addresses``), and the following steps get them from a slab of that size, which is kept from step to step. The
loss and other outputs are outside of it. Gradients are in it, and may stay as long as the caller likes: memory in use is never
given away (``arena_allocator.cpp``).

A step that finds tensors of another one in the slab, such as a second forward pass before the backward pass, gets what is
occupied from the usual allocator.
"""

import logging
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from graphs.addresses import Buffer, Offsets, live_bytes
from graphs.units import format_bytes
from planner.runtime import arena_allocator
from planner.runtime.arena_allocator import LEAST_BYTES, Missed, Recording, Request, Slab
from planner.runtime.code import Code
from planner.runtime.release import release_unused
from planner.torch_private.core import backward_retains_graph
from solvers.addresses.solve import solve

_LOG = logging.getLogger(__name__)
_ALIGNMENT = 64  # that of PyTorch's CPU allocator, by which kernels choose how they compute
_SEARCH_S = 5.0  # time limit for addresses; most searches end at the bound before
_MOST_RECORDINGS = 3  # of steps whose requests differ from those recorded before

_Returned = tuple[Any, tuple[Any, ...], list[Any]]


class Arena:
    """The arena of one executor.

    Attributes:
        missed: what was to be in it and was not, in the last step.
    """

    def __init__(self, *, accumulate: bool = False) -> None:
        """Put the allocator in place.

        Args:
            accumulate: True if gradients are added to those of earlier steps. They are then copied out of the arena.

        Raises:
            PlannerError: as ``arena_allocator.install``.
        """
        arena_allocator.install()
        self.missed = Missed()
        self._recordings = 0
        self._warned = False
        self._planned: _Planned | None = None
        self._accumulate = accumulate
        self._held: Sequence[Any] = ()  # gradients that others hold too are copied by autograd

    @property
    def slab(self) -> Slab | None:
        """The memory of the arena; None until a step has been recorded."""
        return None if self._planned is None else self._planned.slab

    @property
    def outside_bytes(self) -> int | None:
        """The most bytes that a step takes outside of the slab at once; None until a step has been recorded."""
        return None if self._planned is None else self._planned.outside_bytes

    @property
    def step_bytes(self) -> int | None:
        """Bytes that a step takes, with the slab; None until one has been recorded."""
        return None if self._planned is None else self._planned.slab.size_bytes + self._planned.outside_bytes

    def drop(self) -> None:
        """Give the memory back; the next step is recorded again."""
        self._planned = None

    def around(self, code: Code) -> Code:
        """Return `code` with both passes in the arena."""
        return replace(code, forward=partial(self._forward, code), backward=partial(self._backward, code))

    def _forward(self, code: Code, static: Sequence[Any]) -> _Returned:
        self._held, self.missed = (), Missed()
        if self._planned is None:
            recording = Recording()
            with _recorded(recording):
                loss, extras, alive = code.forward(static)
            requests = recording.requests()
            alive.append(_Recorded(recording, len(requests), _held(requests, (loss, *extras))))
        else:
            with self._served(self._planned.slab, self._planned.forward):
                loss, extras, alive = code.forward(static)
            alive.append(self._planned)
        return loss, extras, alive

    def _backward(self, code: Code, static: Sequence[Any], alive: list[Any]) -> tuple[Any, ...]:
        started: _Recorded | _Planned = alive.pop()
        if isinstance(started, _Planned):
            with self._served(started.slab, started.backward):
                gradients = code.backward(static, alive)
            if self.missed.unmatched_bytes and self._recordings < _MOST_RECORDINGS:
                self.drop()
            self._warn_of_tensors_in_it()
        else:
            with _recorded(started.recording):
                gradients = code.backward(static, alive)
            if not backward_retains_graph():  # else saved tensors are freed later than in other steps
                self._planned = _planned(started, gradients)
                self._recordings += 1
        if self._accumulate:
            self._held = gradients
        return gradients

    def _warn_of_tensors_in_it(self) -> None:
        """Log once that a step found its addresses occupied."""
        if self.missed.occupied_bytes and not self._warned:
            self._warned = True
            _LOG.warning(
                "%s of a step are outside of its arena, where tensors of another step are: free gradients before the step "
                "(optimizer.zero_grad(), with set_to_none=True), or plan with accumulate=True, and call backward() for each step "
                "before the next one",
                format_bytes(self.missed.occupied_bytes),
            )

    @contextmanager
    def _served(self, slab: Slab, requests: range) -> Iterator[None]:
        slab.start(requests)
        try:
            yield
        finally:
            self.missed += arena_allocator.stop()


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A step whose forward pass has been recorded.

    Attributes:
        count: number of requests of the forward pass.
        returned: positions of those for what the caller gets.
    """

    recording: Recording
    count: int
    returned: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Planned:
    """A slab, the positions of its requests in each pass, and the most bytes that a step takes outside of it."""

    slab: Slab
    forward: range
    backward: range
    outside_bytes: int


@contextmanager
def _recorded(recording: Recording) -> Iterator[None]:
    recording.start()
    try:
        yield
    finally:
        arena_allocator.stop()


def _planned(recorded: _Recorded, gradients: Sequence[Any]) -> _Planned:
    """Return the slab for a step that was recorded, with addresses for its requests."""
    requests = recorded.recording.requests()
    staying = _held(requests, gradients)
    buffers = [
        _buffer(requests, i)
        for i, request in enumerate(requests)
        if request.size_bytes >= LEAST_BYTES and i not in recorded.returned and (request.end is not None or i in staying)
    ]
    found = solve(buffers, time_limit_s=_SEARCH_S).offsets if buffers else Offsets((), ())
    assert found is not None  # any arena will do
    offsets = {int(buffer.id): offset for buffer, offset in zip(found.buffers, found.offsets, strict=True)}
    large = [i for i, request in enumerate(requests) if request.size_bytes >= LEAST_BYTES]
    release_unused(torch.device("cpu"))  # what the recorded step has freed
    slab = Slab(max(found.height_bytes, _ALIGNMENT), [requests[i].size_bytes for i in large], [offsets.get(i) for i in large])
    count = sum(i < recorded.count for i in large)
    return _Planned(slab, range(count), range(count, len(large)), _outside_bytes(requests, offsets))


def _outside_bytes(requests: Sequence[Request], inside: Container[int]) -> int:
    """Return the most bytes in use at once of the requests that are not `inside`."""
    return live_bytes([_buffer(requests, i) for i in range(len(requests)) if i not in inside])


def _buffer(requests: Sequence[Request], i: int) -> Buffer:
    """Return request `i` as a buffer; one that was not freed stays to the end."""
    end = requests[i].end
    return Buffer(str(i), i, len(requests) if end is None else end, requests[i].size_bytes, _ALIGNMENT)


def _held(requests: Sequence[Request], tensors: Sequence[torch.Tensor | None]) -> frozenset[int]:
    """Return the positions of the requests that `tensors` lie in."""
    addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None}
    return frozenset(i for i, request in enumerate(requests) if request.end is None and request.address in addresses)
