"""Steps in an arena: the passes of an executor take their memory from one slab, at planned addresses.

The first step is recorded: which memory it asks for, in which order, and when it is freed. Addresses are planned for these
requests (``solvers.addresses``), and the following steps get them from a slab, which is kept from step to step, and which all
plans of a model share. The loss and other outputs are outside of it. Gradients are in it, and may stay as long as the caller
likes: memory in use is never given away (``arena_allocator.cpp``).

A step that finds tensors of another one in the slab, such as a second forward pass before the backward pass, gets what is
occupied from the usual allocator.
"""

import logging
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch

from graphs.addresses import Buffer, Offsets, live_bytes
from graphs.units import format_bytes
from planner.arena import ALIGNMENT, LEAST_BYTES
from planner.runtime import arena_allocator
from planner.runtime.arena_allocator import Addresses, Missed, Recording, Request, Slab
from planner.runtime.code import Code
from planner.runtime.release import release_unused
from planner.torch_private.core import backward_retains_graph
from solvers.addresses.solve import solve

_LOG = logging.getLogger(__name__)
_SEARCH_WORK = (
    5.0  # limit of the search for addresses, in work: the same addresses on every machine; most end at the bound before
)
_MOST_RECORDINGS = 3  # of steps whose requests differ from those recorded before

_Returned = tuple[Any, tuple[Any, ...], list[Any]]


class SharedSlab:
    """The slab of all plans of a model, of which one runs at a time.

    It has addresses for the largest of them. What a plan may not use of it within the budget is given back to the system.

    Attributes:
        present: the slab; None where there is none at present.
    """

    def __init__(self) -> None:
        self.present: Slab | None = None
        self._used_bytes = 0  # of the present one, from its beginning
        self._plans: WeakSet[Addresses] = WeakSet()

    def add(self, addresses: Addresses) -> None:
        """Take the size for `addresses` into account."""
        self._plans.add(addresses)

    def drop(self) -> None:
        """Give the memory back; parts that tensors are in, once these are freed."""
        self.present = None

    def holding(self, addresses: Addresses, most_bytes: int) -> Slab:
        """Return the slab for `addresses`; if the present one is too small, it is dropped first.

        Args:
            addresses: added before.
            most_bytes: what other plans have used of the slab beyond this is given back.

        Raises:
            OutOfMemoryError: there is no such memory.
        """
        if self.present is None or self.present.size_bytes < addresses.height_bytes:
            self.drop()
            release_unused(torch.device("cpu"))  # what a recorded step has freed
            self.present = Slab(max(plan.height_bytes for plan in self._plans))
            self._used_bytes = 0
        most_bytes = max(most_bytes, addresses.height_bytes)
        if self._used_bytes > most_bytes:
            self.present.trim(most_bytes)
            self._used_bytes = most_bytes
        self._used_bytes = max(self._used_bytes, addresses.height_bytes)
        return self.present


class Arena:
    """The arena of one executor.

    Attributes:
        missed: what was to be in it and was not, in the last step.
        budget_bytes: for slab and outside bytes together; within it, what larger plans have used of the slab stays.
    """

    def __init__(self, shared: SharedSlab, *, accumulate: bool = False) -> None:
        """Put the allocator in place.

        Args:
            shared: the slab, shared with other plans of the model.
            accumulate: True if gradients are added to those of earlier steps. They are then copied out of the arena.

        Raises:
            PlannerError: as ``arena_allocator.install``.
        """
        arena_allocator.install()
        self.missed = Missed()
        self.budget_bytes = 0
        self._shared = shared
        self._recordings = 0
        self._warned = False
        self._planned: _Planned | None = None
        self._accumulate = accumulate
        self._held: Sequence[Any] = ()  # gradients that others hold too are copied by autograd

    @property
    def slab(self) -> Slab | None:
        """The slab; None where there is none at present."""
        return self._shared.present

    @property
    def size_bytes(self) -> int | None:
        """The bytes of the slab that the step needs; None until one has been recorded."""
        return None if self._planned is None else self._planned.addresses.height_bytes

    @property
    def outside_bytes(self) -> int | None:
        """The most bytes that a step takes outside of the slab at once; None until one has been recorded."""
        return None if self._planned is None else self._planned.outside_bytes

    @property
    def step_bytes(self) -> int | None:
        """Bytes that a step takes, with the slab that it needs; None until one has been recorded."""
        return None if self._planned is None else self._planned.addresses.height_bytes + self._planned.outside_bytes

    def around(self, code: Code) -> Code:
        """Return `code` with both passes in the arena."""
        return replace(code, forward=partial(self._forward, code), backward=partial(self._backward, code))

    def _forward(self, code: Code, static: Sequence[Any]) -> _Returned:
        self._held, self.missed = (), Missed()
        if self._planned is None:
            self._shared.drop()  # there is not room for both
            recording = Recording()
            with _recorded(recording):
                loss, extras, alive = code.forward(static)
            requests = recording.requests()
            alive.append(_Recorded(recording, len(requests), _held(requests, (loss, *extras))))
        else:
            started = _Started(self._planned, self._slab_for(self._planned))
            with self._served(started, self._planned.forward):
                loss, extras, alive = code.forward(static)
            alive.append(started)
        return loss, extras, alive

    def _slab_for(self, planned: "_Planned") -> Slab:
        return self._shared.holding(planned.addresses, self.budget_bytes - planned.outside_bytes)

    def _backward(self, code: Code, static: Sequence[Any], alive: list[Any]) -> tuple[Any, ...]:
        started: _Recorded | _Started = alive.pop()
        if isinstance(started, _Started):
            with self._served(started, started.planned.backward):
                gradients = code.backward(static, alive)
            if self.missed.unmatched_bytes and self._recordings < _MOST_RECORDINGS:
                self._planned = None  # the next step is recorded again
            self._warn_of_tensors_in_it()
        else:
            with _recorded(started.recording):
                gradients = code.backward(static, alive)
            if not backward_retains_graph():  # else saved tensors are freed later than in other steps
                self._planned = _planned(started, gradients)
                self._shared.add(self._planned.addresses)
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
    def _served(self, started: "_Started", requests: range) -> Iterator[None]:
        started.planned.addresses.start(started.slab, requests)
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
    """Addresses, the positions of their requests in each pass, and the most bytes that a step takes outside of the slab."""

    addresses: Addresses
    forward: range
    backward: range
    outside_bytes: int


@dataclass(frozen=True, slots=True)
class _Started:
    """A step whose forward pass has run in a slab; its backward pass runs in the same, even if that was replaced since."""

    planned: _Planned
    slab: Slab


@contextmanager
def _recorded(recording: Recording) -> Iterator[None]:
    recording.start()
    try:
        yield
    finally:
        arena_allocator.stop()


def _planned(recorded: _Recorded, gradients: Sequence[Any]) -> _Planned:
    """Return addresses for the requests of a step that was recorded."""
    requests = recorded.recording.requests()
    staying = _held(requests, gradients)
    buffers = [
        _buffer(requests, i)
        for i, request in enumerate(requests)
        if request.size_bytes >= LEAST_BYTES and i not in recorded.returned and (request.end is not None or i in staying)
    ]
    found = solve(buffers, work_limit=_SEARCH_WORK).offsets if buffers else Offsets((), ())
    assert found is not None  # any arena will do
    offsets = {int(buffer.id): offset for buffer, offset in zip(found.buffers, found.offsets, strict=True)}
    large = [i for i, request in enumerate(requests) if request.size_bytes >= LEAST_BYTES]
    addresses = Addresses(
        max(found.height_bytes, ALIGNMENT), [requests[i].size_bytes for i in large], [offsets.get(i) for i in large]
    )
    count = sum(i < recorded.count for i in large)
    return _Planned(addresses, range(count), range(count, len(large)), _outside_bytes(requests, offsets))


def _outside_bytes(requests: Sequence[Request], inside: Container[int]) -> int:
    """Return the most bytes in use at once of the requests that are not `inside`."""
    return live_bytes([_buffer(requests, i) for i in range(len(requests)) if i not in inside])


def _buffer(requests: Sequence[Request], i: int) -> Buffer:
    """Return request `i` as a buffer; one that was not freed stays to the end."""
    end = requests[i].end
    return Buffer(str(i), i, len(requests) if end is None else end, requests[i].size_bytes, ALIGNMENT)


def _held(requests: Sequence[Request], tensors: Sequence[torch.Tensor | None]) -> frozenset[int]:
    """Return the positions of the requests that `tensors` lie in."""
    addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None}
    return frozenset(i for i, request in enumerate(requests) if request.end is None and request.address in addresses)
