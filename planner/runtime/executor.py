"""Execution of a planned training step: a schedule with real tensors behind one node of autograd.

What autograd saves stays in memory until the backward pass returns. So only parameters and inputs are
saved there, for the check of their versions, and activations are passed on in a list that the backward pass empties. All that
surrounds the passes is a stage in one list of ``_wrap_in_stages``. Before, the arena, the rollback, the timer of ops and the
watch of peaks replaced the functions of the passes by their own, in an order that could be read nowhere.

The node is of the C++ library (``step_node.cpp``), or an autograd function until that is there. Known weaknesses: autograd gets
all gradients when the backward pass ends. Gradients of gradients, taken outside of the step, are refused.
"""

import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from planner.capture.guards.assertions import UNPLANNED
from planner.capture.lowering.lower import Capture
from planner.capture.signature import Batch, has_fewer_rows, join_returned, split_arguments
from planner.capture.step import TrainingStep
from planner.graphs.errors import MismatchError, PlannerError, SmallerBatchError, first_line
from planner.graphs.ir import Kind, Tensor
from planner.graphs.overwriting import find_overwritten_saved
from planner.graphs.schedule import Schedule, count_kept_bytes
from planner.graphs.short_tracebacks import warn_caller
from planner.graphs.simulate import simulate
from planner.memory.reserved import DeviceTraining, needs_libraries
from planner.native.library import find_library
from planner.native.unchanged import StepGuards
from planner.runtime.arena import Arena, SharedSlab
from planner.runtime.changed_inputs import ChangedInputs, Input
from planner.runtime.code import Backward, Code, Forward, Stage, check_runnable, compile_schedule
from planner.runtime.device_arena import DeviceArena, SharedPool
from planner.runtime.devices import Devices
from planner.runtime.eager_block import check_no_block
from planner.runtime.earlier_gradients import EarlierGradients
from planner.runtime.libraries import library_users, warm_up_libraries
from planner.runtime.out_of_memory import ErrorReport, PlannedMemory, StateNotMade
from planner.runtime.saved_hooks import warn_of_saved_hooks
from planner.runtime.sharding import Unsharded
from planner.runtime.slab_addresses import predict_step
from planner.runtime.transfers.channels import HostChannels
from planner.runtime.undo import Rollback
from planner.runtime.unseen_writes import UnseenWrites
from planner.torch_private.core import apply_function, at_end_of_backward, backward_retains_graph, current_transform

_SMALLER = "If only the last batch is smaller, drop it: DataLoader(..., drop_last=True). "
_OTHER_SIZES = (
    "If sizes vary, let each have a plan: planner.compile(..., dynamic=True), or planner.compile(..., replan=True), which "
    "measures each size by itself (neither under DistributedDataParallel). To evaluate, call model(...) itself, or the step "
    "under torch.no_grad()"
)


class Executor:
    """The executor of one training step's forward and backward passes by a schedule.

    A call with a batch returns the loss, in a tuple or dict if the step returns further tensors; the loss's ``backward()`` runs
    the backward pass and accumulates the gradients. Loss, gradients, buffers and random state are bit-identical to keeping
    everything, except for ops that are marked as different.

    Attributes:
        devices: the devices that it runs on, with the channels between them and to the host.
        sharding: how the parameters of the model are sharded.
        launched: both passes of the schedule.
        compile_s: seconds in which they were compiled.
        code: both passes as they run.
        inputs: the sources of the batch.
        memory: description of the memory of `code`.
        trained: positions of the static tensors that get gradients.
        changed_inputs: the tensors that are written between the passes.
        check_writes: True to detect writes to saved tensors that autograd does not see.
        arena: the arena that the passes run in; None for PyTorch's allocator.
        entered_s, left_s: by the host's clock, when a call or a backward pass last began, and when the call returned.
    """

    def __init__(
        self,
        capture: Capture,
        schedule: Schedule,
        model: nn.Module,
        loss_fn: Callable[..., object] | None,
        channels: HostChannels | None = None,
        sharding: Unsharded | None = None,
    ) -> None:
        """Compile `schedule` for the captured step of `model`.

        Args:
            channels: channels to the host; None for its own, if the graph offers transfers there.
            sharding: how the parameters of the model are sharded; None if they are not.
        """
        check_runnable(capture.graph, capture.program)
        simulate(capture.graph, schedule)
        self.graph = capture.graph
        self.program = capture.program
        self.signature = capture.signature
        self.schedule = schedule
        self.training_step = TrainingStep(model, loss_fn)
        self.device = device = next(self.training_step.parameters()).device
        if needs_libraries(self.graph):
            library_users.add(self)
            warm_up_libraries(device)  # before the first step, as predictions of reserved memory say
        self.devices = Devices(capture.graph, device, channels)
        self.sharding = sharding or Unsharded()
        self.arena: Arena | DeviceArena | None = None
        began = time.perf_counter()
        self.launched = self._compile_passes()
        self.compile_s = time.perf_counter() - began
        self._recorded: Code | None = None
        self.earlier_gradients = EarlierGradients(capture.graph, schedule)
        self.check_writes = self._trains = False
        self.entered_s = self.left_s = 0.0
        self._guards = capture.guards
        held = () if self.sharding.description else self.program.sources
        self._step_guards = None if capture.guards is None else StepGuards(capture.guards, self.training_step, held)
        self._conditions = capture.conditions
        self._device_type = device.type
        self._autocast = _describe_autocast(self._device_type)
        self._static_order = {source.tensor: i for i, source in enumerate(self.program.sources)}
        self._tangent = next(i for i, source in enumerate(self.program.sources) if source.is_tangent)
        self.trained = [self._static_order[tensor] for tensor, _ in self.program.gradients]
        self._untrained = sorted({*range(len(self.program.sources))}.difference(self.trained))
        self.inputs = tuple(source for source in self.program.sources if source.kind is Kind.INPUT and not source.is_tangent)
        self._leaves = [(self._static_order[source.tensor], int(source.name)) for source in self.inputs]
        self._parameters = [i for i, source in enumerate(self.program.sources) if source.kind is Kind.PARAMETER]
        # Inductor's kernels write without autograd's knowledge, and its backward pass reads their results.
        compiled = any(calls.launches for calls in self.program.calls)
        # In the order in which they begin: what measures a step, its arena, and the rollback of one that fails.
        self._observers: list[tuple[Stage, Code | None]] = []
        self._rollback = Rollback.of(self.graph, self.program, versions_follow=compiled)
        place, missing = self.devices.places.__getitem__, StateNotMade(self.graph, self.training_step)
        self.memory = PlannedMemory(self.graph, self.launched.lines, self.program.calls, place, missing)
        self._wrap_in_stages()
        self._divide_inputs(capture.copied, compiled=compiled)
        self._written_over = find_overwritten_saved(self.graph, schedule)

    @cached_property
    def _expected(self) -> list[tuple[object, ...]]:
        """Facts that the step needs of its inputs, as ``_describe_leaf``."""
        planned = ((self.graph.tensors[source.tensor], int(source.name)) for source in self.inputs)
        return [
            (tensor.shape, getattr(torch, tensor.dtype), self.signature.devices[leaf], self.signature.trained[leaf])
            for tensor, leaf in planned
        ]

    @cached_property
    def _plan(self) -> Hashable:
        """The step and its schedule, whose hash is the same on all processes: that of numbers."""
        return self.graph.fingerprint, hash(self.schedule)

    @property
    def accumulates(self) -> bool:
        """True if gradients are added to those of earlier steps."""
        return self.graph.provenance.accumulate

    def _divide_inputs(self, copied: Collection[int], *, compiled: bool) -> None:
        """Divide the inputs that the backward pass reads by how a write to them in between is noticed."""
        sources = self.program.sources
        overwritten = {t for op in self.graph.ops for t in op.mutates}
        self._untold = [i for i, source in enumerate(sources) if compiled and source.tensor in overwritten]
        if compiled:
            overwritten = set()
        read = [i for i, reads in enumerate(self.code.backward_reads) if reads and i != self._tangent]
        self._unchecked = [i for i in read if sources[i].tensor in overwritten]
        unwritten = [i for i in read if sources[i].tensor not in overwritten]
        self.changed_inputs = ChangedInputs(self.graph, [sources[i].tensor for i in unwritten], copied)
        place = {sources[i].tensor: i for i in unwritten}
        self._recomputed_from = [place[t] for t in self.changed_inputs.recomputed_from]
        self._checked = [i for i in unwritten if i not in self._recomputed_from]

    def start_training(self, budget_bytes: int, *, check_writes: bool) -> None:
        """Enable the checks for a training loop, and the counting in it; measurements before are of the step alone."""
        self.earlier_gradients.budget_bytes = budget_bytes
        if isinstance(self.arena, Arena):
            self.arena.budget_bytes = budget_bytes - self.graph.static_bytes
        self.check_writes, self._trains = check_writes, True
        if not isinstance(self.arena, DeviceArena):  # else there is no room between the passes; a slab gives idle pages back
            allowed_bytes = simulate(self.graph, self.schedule).peak_bytes if self.sharding.keeps_peak else budget_bytes
            self.changed_inputs.begin(allowed_bytes - self.graph.static_bytes - count_kept_bytes(self.graph, self.schedule))

    def use_arena(self, shared: SharedSlab | SharedPool, offsets: Sequence[int] = ()) -> None:
        """Run the following steps in an arena: ``planner.runtime.arena``, or on CUDA ``planner.runtime.device_arena``.

        Args:
            shared: its memory, shared with other plans of the model.
            offsets: of the plan (``Plan.arena_offsets``); without them the first step is recorded on the CPU.

        Raises:
            PlannerError: its allocator cannot be put in place.
        """
        if isinstance(shared, SharedSlab):
            self.arena = Arena(shared, accumulate=self.accumulates)
            if (expected := predict_step(self.graph, self.schedule, offsets)) is not None:
                self.arena.expect(*expected)
        else:
            self.arena = DeviceArena(shared, DeviceTraining.of(self.graph, self.schedule).arena, accumulate=self.accumulates)
            self.launched = self._compile_passes()
        self._wrap_in_stages()

    def observe(self, observer: Stage, tick: Callable[[int], None] | None = None) -> None:
        """Run the following passes within `observer` too; `tick` is called with the id of each op, on one device only."""
        self._observers.insert(0, (observer, None if tick is None else self._compile_passes(tick)))
        self._wrap_in_stages()

    def stop_observing(self, observer: Stage) -> None:
        """Run the following passes without `observer`; nothing if they do already."""
        self._observers = [(other, ticking) for other, ticking in self._observers if other is not observer]
        self._wrap_in_stages()

    def run_recorded(self, forward: Forward, backward: Backward) -> None:
        """Run recordings of both passes in place of the passes and their stages."""
        self._recorded = replace(self.launched, forward=forward, backward=backward, saved=(), returned=())
        self._wrap_in_stages()

    def _compile_passes(self, tick: Callable[[int], None] | None = None) -> Code:
        """Compile both passes of the schedule, with the calls that the arena needs."""
        call_before = self.arena.call_before if isinstance(self.arena, DeviceArena) else None
        return compile_schedule(self.graph, self.program, self.schedule, self.devices, tick=tick, call_before=call_before)

    def _wrap_in_stages(self) -> None:
        """Run the following passes within all their stages; errors are described by the lines of these passes."""
        observers = [observer for observer, _ in self._observers]
        if self._recorded is not None:
            self.code = self._recorded.wrap_in_stages(*observers)
        else:
            launched = next((ticking for _, ticking in self._observers if ticking is not None), self.launched)
            arena = None if self.arena is None else self.arena.build_stage()
            self.code = launched.wrap_in_stages(*observers, arena, self._rollback)
        self.memory = replace(self.memory, lines=self.code.lines)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run one forward pass on a batch.

        Under ``torch.no_grad()`` the step is evaluated by eager PyTorch, without the plan: any batch, train or eval mode.

        Raises:
            MismatchError: the batch or the model is not as it was when the step was captured.
            CopyError: a copy between memories has failed; so does ``backward()``.
            DeviceError: an op has failed on another device than the main one; likewise.
            OutOfMemoryError: an op has found no memory; likewise.
        """
        if not torch.is_grad_enabled():
            return self.evaluate(*args, **kwargs)
        self.entered_s = time.perf_counter()
        static = self.check(*args, **kwargs)
        try:
            results = self.run(static)
        except RuntimeError as error:  # which has undone the step
            if UNPLANNED not in str(error):
                raise
            warn_caller(f"this step ran by eager PyTorch, which may take more than the budget: {first_line(error)}")
            return self.evaluate(*args, **kwargs)
        self.left_s = time.perf_counter()
        return results

    def evaluate(self, *args: object, **kwargs: object) -> Any:
        """Return the step's result by eager PyTorch, without saved tensors."""
        return join_returned(*self.training_step(*args, **kwargs))

    def run(self, static: list[Any]) -> Any:
        """Run one forward pass on static tensors and numbers that were checked."""
        warn_of_saved_hooks()
        check_earlier_gradients = self._check_earlier_gradients(static)
        for i in self._untrained:  # which are saved, but are no inputs: autograd would call their hooks
            if static[i] is not None and static[i].requires_grad:
                static[i] = static[i].detach()
        trained = [static[i] for i in self.trained]
        step, library = _Step(self, check_earlier_gradients, static), find_library()
        results: Sequence[torch.Tensor]
        results = apply_function(_Function, step, *trained) if library is None else library.run_step(step, trained)
        if self._trains and self._guards is not None:
            self._guards.call_later(self.training_step, self.signature.list_for_later(results))
            self._guards.count(self.training_step, static[len(self.program.sources) :])
        return self.signature.build_results(results)

    def check(self, *args: object, **kwargs: object) -> list[Any]:
        """Return the static tensors and the numbers of the program, after checking that the step was planned for a batch.

        Raises:
            MismatchError: as in a call of the step, on all processes that run it together.
            PlannerError: it is called under a transform of ``torch.func``, or in a block of ``planner.rematerialize``.
        """
        check_no_transform("a planned step is called")
        check_no_block("a planned step is called")
        return self.sharding.agree(self._plan, kwargs or args, partial(self._check_call, args, kwargs))

    def _check_call(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[Any]:
        leaves = self.signature.flatten(*args, **kwargs)
        self._check(leaves)
        with self.sharding.enter_captured_state():
            numbers, static = ((), []) if self._step_guards is None else self._step_guards.check(args, kwargs)
        if self._conditions:
            self._conditions.check(self.training_step, leaves)
        if not static:
            static = self.program.gather(self.training_step, leaves)
        for i, leaf in self._leaves:
            static[i] = leaves[leaf]
        return [*static, *numbers]

    def find_changed_numbers(self, batch: Batch) -> set[str]:
        """Return the names of the numbers that differ from those that the step was planned for, as Dynamo writes them."""
        with self.sharding.enter_captured_state():
            return (
                set() if self._guards is None else self._guards.find_changed_numbers(self.training_step, *split_arguments(batch))
            )

    @property
    def free_numbers(self) -> frozenset[str]:
        """Names of the numbers that the step reads, whatever their values are."""
        return frozenset() if self._guards is None or self._guards.numbers is None else self._guards.numbers.free

    def _check(self, leaves: Sequence[object]) -> None:
        if differs := [_describe_leaf(leaves[leaf]) for _, leaf in self._leaves] != self._expected:
            self._check_sizes(leaves)
        self.signature.check_values(leaves)
        if differs:
            self._check_inputs(leaves)
        if _describe_autocast(self._device_type) != self._autocast:
            raise MismatchError(
                f"autocast is {_describe_autocast(self._device_type)}, but the step was planned with autocast {self._autocast}: "
                "the casts are part of its graph; call planner.compile and the step under the same torch.autocast"
            )

    def _check_inputs(self, leaves: Sequence[object]) -> None:
        for source in self.inputs:
            planned, index = self.graph.tensors[source.tensor], int(source.name)
            given, name = leaves[index], self.signature.names[index]
            if not isinstance(given, torch.Tensor):
                raise MismatchError(
                    f"{name} of the batch is {type(given).__name__}, but the step was planned for a tensor "
                    f"{planned.dtype}{list(planned.shape)}"
                )
            if given.device.type != (device := self.signature.devices[index]):
                raise MismatchError(
                    f"{name} of the batch is on {given.device}, but the step was planned for {device}: move it there with "
                    f".to({device!r})"
                )
            if tuple(given.shape) != planned.shape or _format_dtype(given) != planned.dtype:
                raise MismatchError(
                    f"{name} of the batch is {_format_dtype(given)}{list(given.shape)}, but the step was planned for "
                    f"{planned.dtype}{list(planned.shape)}",
                    ": make another plan for such batches (planner.compile), or plan with replan=True, which does so by itself",
                )
            if given.requires_grad is not self.signature.trained[index]:
                raise MismatchError(
                    f"{name} of the batch has requires_grad={given.requires_grad}, but the step was planned for "
                    f"{not given.requires_grad}: make a plan with such a batch, or "
                    f"{'detach() it' if given.requires_grad else 'let it require a gradient'}"
                )

    def _check_sizes(self, leaves: Sequence[object]) -> None:
        """Raise if the batch differs from the planned one in sizes only.

        Raises:
            SmallerBatchError: it is smaller in first dimensions only, such as the last batch of an epoch. Numbers may differ too.
            MismatchError: it has another size, such as another length.
        """
        other: list[tuple[str, torch.Tensor, Tensor]] = []
        for source in self.inputs:
            planned, index = self.graph.tensors[source.tensor], int(source.name)
            given = leaves[index]
            if not isinstance(given, torch.Tensor) or given.device.type != self.signature.devices[index]:
                return
            if _format_dtype(given) != planned.dtype or given.dim() != len(planned.shape):
                return
            if tuple(given.shape) != planned.shape:
                other.append((self.signature.names[index], given, planned))
        if other:
            differing = "; ".join(
                f"{name} of the batch is {planned.dtype}{list(given.shape)}, but the step was planned for "
                f"{planned.dtype}{list(planned.shape)}"
                for name, given, planned in other
            )
            smaller = all(has_fewer_rows(tuple(given.shape), planned.shape) for _, given, planned in other)
            if smaller and self.signature.is_equal_but_for_numbers(leaves):
                raise SmallerBatchError(differing, f". {_SMALLER}{_OTHER_SIZES}")
            raise MismatchError(differing, f". {_OTHER_SIZES}")

    def save(self, step: "_Step", static: Sequence[Any]) -> list[torch.Tensor]:
        """Save what the backward pass reads; return the tensors of it of which autograd checks that they are not changed.

        Those that it reads only to recompute may be changed (``ChangedInputs``). Buffers that the step overwrites are exempt: a
        second forward pass may have changed them, and the backward pass reads them only where values do not matter. With
        compiled kernels they do matter.
        """
        increment_version([static[i] for i in self._untold])
        step.unchecked = [static[i] for i in self._unchecked]
        step.numbers = static[len(self.program.sources) :]
        step.inputs = self.changed_inputs.save(lambda t: static[self._static_order[t]])
        read = (*self._checked, *self._recomputed_from)
        step.unseen = UnseenWrites((self._name(i), static[i]) for i in read) if self.check_writes else None
        return [static[i] for i in self._checked]

    def _check_earlier_gradients(self, static: Sequence[Any]) -> Callable[[], object]:
        """Check earlier gradients before the forward pass; return the check before the backward pass."""
        parameters = [static[i] for i in self._parameters]
        if not self.earlier_gradients.count("forward", parameters):
            return lambda: None  # gradients added in between belong to other steps
        return lambda: self.earlier_gradients.count("backward", parameters)

    def hand_over(self, step: "_Step") -> list[Any]:
        """Return the forward pass's values for the backward pass, which empties the list and may overwrite its contents.

        If the backward pass may run again (``retain_graph=True``), all saved tensors stay in memory, and overwritten ones are
        copied first.

        Raises:
            PlannerError: it may run again, and the plan uses transfers to the host or other devices.
        """
        alive = step.alive
        assert alive is not None
        if not backward_retains_graph():
            # The step outlives the pass: what it holds could not be freed as the pass goes on.
            step.alive = None
            return alive
        if self.devices.channels:
            raise PlannerError(
                "backward(retain_graph=True) of a plan that copies to the host, or to other devices, cannot run a second "
                "time: leave it out, or plan without the options offload and placement"
            )
        again = list(alive)
        for i, tensor in enumerate(self.code.saved):
            if tensor in self._written_over:
                again[i] = alive[i].clone()
        return again

    def restore(self, step: "_Step", saved: Sequence[torch.Tensor], tangent: torch.Tensor | None) -> list[Any]:
        """Return the static tensors for the backward pass.

        Raises:
            PlannerError: one was written without autograd's knowledge, if `check_writes` is set; or the plan recomputes from one
                that was written.
        """
        static: list[Any] = [*[None] * len(self.program.sources), *step.numbers]
        for i, tensor in zip(self._checked, saved, strict=True):
            static[i] = tensor
        for i, tensor in zip(self._unchecked, step.unchecked, strict=True):
            static[i] = tensor
        static[self._tangent] = tangent
        if step.unseen is not None:
            step.unseen.check([*saved, *(given.value for given in step.inputs[: len(self._recomputed_from)])])
        values = self.changed_inputs.restore(step.inputs, self._name_tensor)
        for i, tensor in zip(self._recomputed_from, values, strict=True):
            static[i] = tensor
        if not backward_retains_graph():
            step.inputs = ()
        return static

    @property
    def changed_names(self) -> str:
        """Names of the tensors that were written between the passes."""
        return ", ".join(map(self._name_tensor, sorted(self.changed_inputs.changed)))

    def _name_tensor(self, tensor: int) -> str:
        return self._name(self._static_order[tensor])

    def _name(self, index: int) -> str:
        """Return the name of the static tensor at `index` for messages."""
        source = self.program.sources[index]
        if source.kind is Kind.INPUT:
            return f"{self.signature.names[int(source.name)]} of the batch"
        return source.name.removeprefix("model.")


class _Step:
    """A call of the step, with what its forward pass leaves for its backward pass.

    Attributes:
        alive: what the passes themselves keep; None once that is used up.
        unchecked, numbers, inputs, unseen: what ``Executor.save`` keeps.
    """

    unchecked: Sequence[torch.Tensor]
    numbers: Sequence[Any]
    inputs: Sequence[Input]
    unseen: UnseenWrites | None

    def __init__(self, executor: Executor, check_earlier_gradients: Callable[[], object], static: Sequence[Any]) -> None:
        """Initialize for `static` tensors and numbers."""
        self._executor, self._check_earlier_gradients = executor, check_earlier_gradients
        self._static = static
        self.alive: list[Any] | None = None

    def run_forward(self) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
        """Return the results, the loss first, and the tensors that autograd saves for ``run_backward``."""
        executor = self._executor
        local, self._shardings = executor.sharding.unwrap(self._static, executor.trained)
        self._static = ()
        with ErrorReport(executor.memory, "forward"), _disable_autocast(local):
            loss, extras, self.alive = executor.code.forward(local)
        self._versions = [self.alive[i]._version for i in executor.code.returned]
        return (loss, *extras), executor.save(self, local)

    def run_backward(self, saved: Sequence[torch.Tensor], tangent: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Return the gradients of what is trained. `saved` are the tensors that autograd has saved, none if it has freed them."""
        executor = self._executor
        executor.entered_s = time.perf_counter()
        if torch.is_grad_enabled():
            raise RuntimeError(
                "gradients of a planned step have no graph, and create_graph=True asks for one: compute what needs gradients of "
                "gradients (a penalty) with model(...) itself"
            )
        if self.alive is None:
            raise RuntimeError(
                "backward() was called twice on one planned step, whose tensors are freed after the first: call the first with "
                "retain_graph=True"
            )
        if self._versions != [self.alive[i]._version for i in executor.code.returned]:
            raise RuntimeError(
                "one of the tensors that the step returned was modified in place, and its backward pass reads it: clone() it "
                "before writing to it, or write after backward()"
            )
        self._check_earlier_gradients()
        alive = executor.hand_over(self)
        static = executor.restore(self, saved, tangent)
        with ErrorReport(executor.memory, "backward"), _disable_autocast(static):
            gradients = [*executor.sharding.wrap(executor.code.backward(static, alive), self._shardings)]
        if executor.arena is not None and executor.accumulates:
            # Until autograd has added them: it copies out of the arena what others hold too.
            at_end_of_backward([*gradients].clear)
        return gradients


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: _Step, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.step = step
        results, saved = step.run_forward()
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    def backward(ctx: Any, tangent: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
        return (None, *ctx.step.run_backward(() if ctx.step.alive is None else ctx.saved_tensors, tangent))


def check_no_transform(what: str) -> None:
    """Raise a PlannerError that begins with `what` under a transform of ``torch.func``, such as ``vmap``."""
    if (transform := current_transform()) is not None:
        raise PlannerError(
            f"{what} under torch.func.{transform.key().name.lower()}, which cannot transform a plan: use model(...) itself there"
        )


def _describe_leaf(leaf: object) -> tuple[object, ...] | None:
    """Return what a step needs of an input; None if it is no tensor."""
    return (leaf.shape, leaf.dtype, leaf.device.type, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else None


def _format_dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _describe_autocast(device_type: str) -> str:
    """Return the state of autocast: "off", or the dtype it casts to."""
    if not torch.is_autocast_enabled(device_type):
        return "off"
    return f"to {str(torch.get_autocast_dtype(device_type)).removeprefix('torch.')}"


def _disable_autocast(static: Sequence[Any]) -> AbstractContextManager[None]:
    """Disable autocast inside the context: casts are in the graph. `static` are tensors on the main device, or None."""
    device_type: str = next(t.device.type for t in static if t is not None)
    if not torch.is_autocast_enabled(device_type):  # to disable it takes 10 us
        return nullcontext()
    return torch.autocast(device_type, enabled=False)
