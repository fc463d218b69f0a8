"""Steps in an arena: the passes of an executor take their memory from one slab, at planned addresses.

What a step asks for, in which order, and when it is freed, follows from its plan and the profile of its ops; if that is not
known, or is not what comes, a step is recorded. Steps get planned addresses (``slab_addresses``) from a slab, which is kept from
step to step, and which all plans of a model share. The loss and other outputs are outside of it. Gradients are in it, and may
stay as long as the caller likes: memory in use is never given away (``arena_allocator.cpp``). The optimizer's steps are recorded
and served likewise: what they free lies beside the gradients, where the step had its activations.

A step that finds tensors of another one in the slab, such as a second forward pass before the backward pass, gets what is
occupied from the usual allocator.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim import Optimizer

from planner.graphs.addresses import Offsets
from planner.graphs.ir import Phase
from planner.graphs.units import format_bytes
from planner.memory.release import release_unused, return_blocks_beside_arena
from planner.runtime import arena_allocator, optimizer_steps
from planner.runtime.arena_allocator import Addresses, Missed, RecordedRequest, Recording, Slab
from planner.runtime.code import Backward, Forward, Returned
from planner.runtime.slab_addresses import (
    MOST_RECORDINGS,
    OptimizerStep,
    RecordedStep,
    SlabAddresses,
    find_requests,
    plan_slab_addresses,
    select_freed_requests,
)
from planner.torch_private.core import backward_retains_graph

_LOG = logging.getLogger(__name__)
_SMALL_BYTES = 2**16  # that a step may ask for beside what was planned without being recorded, such as random states


class SharedSlab:
    """The slab of all plans of a model, of which one runs at a time.

    It has addresses for the largest of them. What a plan may not use of it within the budget is given back to the system.

    Attributes:
        present: the slab; None where there is none at present.
        optimizers: the recorded steps of optimizers.
        optimizer_recordings: number of their recordings.
    """

    def __init__(self) -> None:
        self.present: Slab | None = None
        self.optimizers: WeakKeyDictionary[Optimizer, OptimizerStep] = WeakKeyDictionary()
        self.optimizer_recordings = 0
        self._plans: WeakSet[Addresses] = WeakSet()

    def add(self, addresses: Addresses) -> None:
        """Take the size for `addresses` into account."""
        self._plans.add(addresses)

    def add_optimizer(self, optimizer: Optimizer, requests: Sequence[RecordedRequest], *, is_whole: bool) -> None:
        """Take the requests of a step of `optimizer` into account, in place of those before; none unless it `is_whole`."""
        before = self.optimizers.get(optimizer)
        recordings = 1 if before is None else before.recordings + 1
        self.optimizers[optimizer] = OptimizerStep(
            select_freed_requests(requests) if is_whole else (), recordings, differs=not is_whole
        )
        self.optimizer_recordings += 1

    def drop(self) -> None:
        """Give the memory back; parts that tensors are in, once these are freed."""
        self.present = None

    def provide_slab(self, addresses: Addresses, most_bytes: int) -> Slab:
        """Return the slab for `addresses`; if the present one is too small and cannot grow, it is dropped first.

        Args:
            addresses: added before.
            most_bytes: for its pages, and what is requested between steps. What other plans have used beyond this is given back.

        Raises:
            OutOfMemoryError: there is no such memory.
        """
        size_bytes = max(plan.height_bytes for plan in self._plans)
        if self.present is None or not self.present.grow(size_bytes):
            self.drop()
            release_unused(torch.device("cpu"))  # what a recorded step has freed
            self.present = Slab(size_bytes, most_bytes)
            return_blocks_beside_arena()
        self.present.keep_within(max(most_bytes, addresses.height_bytes))
        return self.present


class Arena:
    """The arena of the steps of one executor, or of the graphs of a compiled model.

    A step begins with a forward pass before which no other one waits for its backward pass. The graphs whose passes it has are
    recorded as one sequence of requests, so that they lie beside each other in the slab.

    Attributes:
        missed: bytes of requests in the last step that were planned in the arena and not served there.
        optimizer_missed: the same of the last step of an optimizer.
        budget_bytes: for slab and outside bytes together; within it, what larger plans have used of the slab stays.
    """

    def __init__(self, shared: SharedSlab, *, accumulate: bool = False) -> None:
        """Put the allocator in place. Gradients that `accumulate` in those of earlier steps are copied out of the arena."""
        arena_allocator.install()
        optimizer_steps.install()
        self.missed = self.optimizer_missed = Missed()
        self.budget_bytes = 0
        self.shared = shared
        self._runs: WeakSet[_Run] = WeakSet()
        self._recorded: RecordedStep | None = None  # a whole step
        self._alone: SlabAddresses | None = None  # addresses for it
        self._planned: SlabAddresses | None = None  # addresses for it and for the steps of optimizers
        self._ended: SlabAddresses | None = None  # those of the step whose backward pass has ended, until the next one begins
        self._optimizing: Recording | _Started | None = None
        self._given: set[int] = set()  # what the step was called with, parameters among it, by id
        self._recordings = 0
        self._warned = self._warned_of_optimizers = False
        self._accumulate = accumulate

    @property
    def slab(self) -> Slab | None:
        """The slab; None where there is none at present."""
        return self.shared.present

    @property
    def size_bytes(self) -> int | None:
        """The bytes of the slab that the step needs, without the optimizer's; None until it is known."""
        planned = self._plan_alone()
        return None if planned is None else planned.addresses.height_bytes

    @property
    def outside_bytes(self) -> int | None:
        """The most bytes that a step takes outside of the slab at once, with those that missed it; None likewise."""
        planned = self._plan_alone()
        return None if planned is None else planned.outside_bytes + self.missed.unmatched_bytes

    @property
    def step_bytes(self) -> int | None:
        """Bytes that a step takes, with the slab that it needs; None until it is known."""
        size_bytes, outside_bytes = self.size_bytes, self.outside_bytes
        return None if size_bytes is None or outside_bytes is None else size_bytes + outside_bytes

    @property
    def training_bytes(self) -> int | None:
        """Bytes that a step and the steps of optimizers take that were recorded: one after the other, in one slab."""
        planned = self._plan()
        return None if planned is None else planned.step_bytes

    def build_stage(self, key: object = None) -> "ArenaStage":
        """Return the stage that runs both passes in the arena; `key` is the same for all passes that ask for the same memory."""
        return ArenaStage(self, key)

    def expect(self, step: RecordedStep, found: Offsets) -> None:
        """Serve the steps of the one plan at the offsets `found` for `step`, which it predicts; none is recorded."""
        self._recorded, self._alone = step, plan_slab_addresses(step, found=found)
        self.shared.add(self._alone.addresses)

    def forget(self) -> None:
        """Record the next step, as it runs by another plan."""
        self._recorded = self._alone = self._planned = None
        self._recordings = 0

    def has_optimizer(self, optimizer: Optimizer) -> bool:
        """Return True if a parameter of `optimizer` is one of the last step."""
        return optimizer_steps.has_any(optimizer, self._given)

    def begin_optimizer(self, optimizer: Optimizer) -> None:
        """Serve the step of `optimizer` behind the last step from here on; record it if it is not known."""
        known, slab, planned = self.shared.optimizers.get(optimizer), self.slab, self._ended
        is_final = known is not None and known.is_final
        if slab is not None and planned is not None and is_final and optimizer in planned.optimizers:
            self._optimizing = _Started(planned, slab)
            planned.addresses.start(slab, planned.optimizers[optimizer])
            return
        if not is_final:
            self._optimizing = Recording()
            self._optimizing.start()

    def end_optimizer(self, optimizer: Optimizer, *, is_whole: bool) -> None:
        """Serve none any more; a step that was interrupted is recorded again."""
        run, self._optimizing = self._optimizing, None
        if run is None:
            return
        self.optimizer_missed = arena_allocator.stop()
        if isinstance(run, Recording):
            self.shared.add_optimizer(optimizer, run.list_requests(), is_whole=is_whole)
        elif self.optimizer_missed.unmatched_bytes:
            self.shared.optimizers[optimizer].differs = True

    def _plan_alone(self) -> SlabAddresses | None:
        """Return the addresses for the recorded step, which are planned when they are first needed."""
        if self._alone is None and self._recorded is not None:
            self._alone = plan_slab_addresses(self._recorded)
            self.shared.add(self._alone.addresses)
        return self._alone

    def _plan(self) -> SlabAddresses | None:
        """Return the addresses for the recorded step and behind it those of optimizers, planned likewise."""
        optimizers, version = self.shared.optimizers, self.shared.optimizer_recordings
        if self._recorded is None or not optimizers:
            return self._plan_alone()
        if self._planned is None or self._planned.version != version:
            alone = None if any(step.takes_slab for step in optimizers.values()) else self._plan_alone()
            found = None if alone is None else alone.found
            self._planned = plan_slab_addresses(
                self._recorded, optimizers, gradients_stay=not self._accumulate, version=version, found=found
            )
            self.shared.add(self._planned.addresses)
            self._warn_of_optimizers(self._planned.step_bytes)
        return self._planned

    def run_forward(self, key: object, run_pass: Forward, static: Sequence[Any]) -> Returned:
        """Run a forward pass, recorded or in the slab; `key` as in ``build_stage``."""
        waiting = next((run for run in self._runs if not run.done), None)
        step = self._begin() if waiting is None else waiting.step
        self._given.update(map(id, static))
        run = _Run(step, key, step.runs[key])
        step.runs[key] += 1
        with self._run_within(run, Phase.FORWARD):
            loss, extras, alive = run_pass(static)
        if isinstance(step, RecordedStep):
            step.left += 1
            step.returned |= find_requests(step.recording.list_requests(), (loss, *extras))
        self._runs.add(run)
        alive.append(run)
        return loss, extras, alive

    def _begin(self) -> "RecordedStep | _Started":
        """Return a new step: recorded, or in the slab."""
        if self.missed.unmatched_bytes > _SMALL_BYTES and self._recordings < MOST_RECORDINGS:
            self._recorded = self._alone = self._planned = None
        self.missed, self._ended = Missed(), None
        self._given.clear()
        planned = self._plan()
        if planned is None:
            self.shared.drop()  # there is not room for both
            return RecordedStep()
        return _Started(planned, self.shared.provide_slab(planned.addresses, self.budget_bytes - planned.outside_bytes))

    def run_backward(self, run_pass: Backward, static: Sequence[Any], saved: list[Any]) -> tuple[Any, ...]:
        """Run a backward pass, where its forward pass was."""
        run: _Run = saved.pop()
        run.done = True
        with self._run_within(run, Phase.BACKWARD):
            gradients = run_pass(static, saved)
        if isinstance(run.step, _Started):
            self._ended = run.step.planned
            self._warn_of_tensors_in_it()
        elif not backward_retains_graph():  # else saved tensors are freed later than in other steps
            self._end_recorded(run.step, gradients)
        optimizer_steps.follow(self)
        return gradients

    def _end_recorded(self, step: RecordedStep, gradients: Sequence[Any]) -> None:
        """Take note of the end of a backward pass, and perhaps of its step."""
        step.requests = step.recording.list_requests()
        step.staying |= find_requests(step.requests, gradients)
        step.left -= 1
        if not step.left:
            self._recorded, self._alone, self._planned = step, None, None
            self._recordings += 1

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

    def _warn_of_optimizers(self, training_bytes: int) -> None:
        """Log once if optimizers, with the gradients, take more than the budget."""
        over_bytes = training_bytes - self.budget_bytes
        if 0 < self.budget_bytes < training_bytes and not self._warned_of_optimizers:
            self._warned_of_optimizers = True
            _LOG.warning(
                "the optimizer takes %s more than the budget while it steps, with the gradients: with fused=True it takes less",
                format_bytes(over_bytes),
            )

    @contextmanager
    def _run_within(self, run: "_Run", phase: Phase) -> Iterator[None]:
        optimizer_steps.interrupt()
        run.step.begin(run.key, run.number, phase)
        try:
            yield
        finally:
            self.missed += arena_allocator.stop()


@dataclass(frozen=True, slots=True)
class ArenaStage:
    """The passes of one plan in an arena; `key` as in ``Arena.build_stage``."""

    arena: Arena
    key: object

    def run_forward(self, run: Forward, static: Sequence[Any]) -> Returned:
        """Run the forward pass in the arena."""
        return self.arena.run_forward(self.key, run, static)

    def run_backward(self, run: Backward, static: Sequence[Any], saved: list[Any]) -> tuple[Any, ...]:
        """Run the backward pass in the arena."""
        return self.arena.run_backward(run, static, saved)


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Run:
    """The two passes of a code in a step.

    Attributes:
        number: number of its runs in this step before.
        done: True once its backward pass has begun.
    """

    step: "RecordedStep | _Started"
    key: object
    number: int
    done: bool = False


@dataclass(frozen=True, slots=True)
class _Started:
    """A step in a slab, which stays the same to its end, even if it was replaced since.

    Attributes:
        planned: addresses for its requests.
        runs: number of runs by key.
    """

    planned: SlabAddresses
    slab: Slab
    runs: Counter[object] = field(default_factory=Counter)

    def begin(self, key: object, number: int, phase: Phase) -> None:
        """Serve a pass from here on; runs that were not recorded take the addresses of the last one, or none."""
        known = self.planned.passes.get(key)
        requests = known[min(number, len(known) - 1)][phase] if known else range(0)
        self.planned.addresses.start(self.slab, requests)
