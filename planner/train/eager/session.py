"""``planner.rematerialize``: a block in which PyTorch code of any kind runs within a memory budget."""

import atexit
import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Self

import torch

from planner.capture.program.draws import LOCK
from planner.graphs.errors import BudgetError, PlannerError, UsageError, first_line
from planner.graphs.io.formats import write_graph
from planner.graphs.short_tracebacks import shorten, shorten_in_properties, shorten_traceback, show_as_eager
from planner.graphs.units import format_bytes, format_enough, format_seconds
from planner.memory.auto_budget import compute_auto_budget_bytes
from planner.memory.release import keep_freed_blocks
from planner.memory.reserved import choose_memory_on
from planner.native.library import wait_for_library
from planner.plans.solve import solve_graph
from planner.runtime.allocator import limit_allocator, measure_cuda_context_bytes
from planner.runtime.eager_block import ACTIVE, is_in_block
from planner.settings.budget import Auto, Budget, Bytes, Share, read_budget
from planner.settings.counted_memory import CountedMemory
from planner.settings.plan import PlanSettings
from planner.show.facts.timeline import Timeline
from planner.solvers.baselines.dtr import DtrParams
from planner.solvers.baselines.megengine import MegEngineParams
from planner.solvers.online.heuristics import MEGENGINE, NAMES, make_heuristic
from planner.torch_private.core import (
    find_higher_order_operator,
    is_functional_tensor,
    is_functorch_wrapped,
)
from planner.train.eager.device_costs import create_costs
from planner.train.eager.enough_budget import find_enough_bytes
from planner.train.eager.native_recording import NativeRecording, prepare_library
from planner.train.eager.recording import Recorder
from planner.train.eager.sizes import OutputSizes
from planner.train.eager.step_follower import StepFollower
from planner.train.eager.step_log import StepGraph
from planner.train.eager.step_plans import StepPlans
from planner.train.eager.storages import Memory

_SHOWN = 5  # operators and modules in the report


@shorten_traceback
def rematerialize(
    budget: str | int,
    *,
    heuristic: str = "dtr",
    device: torch.device | str | None = None,
    max_recomputation: float = 10.0,
    memory: str | None = None,
) -> "Rematerialization":
    """Return a context manager in which tensors that autograd saves are evicted and recomputed to stay within `budget`.

    Losses, gradients, parameters, buffers and random numbers are those of plain eager PyTorch, to the last bit. No trace and no
    static graph is needed: use it for models that ``planner.compile`` refuses.

        with planner.rematerialize(budget="8GB") as session:
            for x, y in loader:
                loss_fn(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        print(session)

    Args:
        budget: memory for all tensors on the device, parameters and optimizer state included: ``"8GB"``, bytes, or ``"auto"``.
        heuristic: the name of the baseline that chooses the tensor to evict: ``planner solvers`` lists them.
        device: the device whose memory is counted; by default the current CUDA device, or the CPU if there is none.
        max_recomputation: the most ops that may be recomputed in a step, as a multiple of the ops of the step. Above
            that the block raises an error that names a budget.
        memory: kind of memory that the budget counts, as in ``planner.compile``: on CUDA what PyTorch's allocator reserves, and
            the allocator is capped inside the block. With ``"device"`` CUDA's context is part of the budget; ``"allocated"``, the
            default on the CPU, counts tensors and what kernels take while they run.

    Raises:
        BudgetError: the budget cannot be read, or is a share of a peak that is not known.
        PlannerError: there is no C++ compiler. The library is compiled by the first call on a machine, in about a minute.
        UsageError: the heuristic or the kind of memory does not exist, or `max_recomputation` is not above 0.

    Examples:
        >>> with planner.rematerialize(budget="1GB") as session:
        ...     loss_fn(model(x), y).backward()
    """
    if not (isinstance(max_recomputation, int | float) and max_recomputation > 0):
        raise UsageError(f"max_recomputation is {max_recomputation!r}: must be above 0, such as 10 for ten times the step's ops")
    if heuristic not in NAMES:
        raise UsageError(f"unknown heuristic {heuristic!r}: choose from {', '.join(NAMES)}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.empty(0, device=device).device  # with its index
    except (RuntimeError, AssertionError, TypeError) as error:
        raise UsageError(f"device is {device!r}: must be one that PyTorch finds, such as 'cpu' ({first_line(error)})") from None
    counted = choose_memory_on(device.type, CountedMemory.of(memory))
    wanted = read_budget(budget)
    if isinstance(wanted, Share):
        raise BudgetError(
            f"budget '{wanted}' is a share of the peak of plain eager PyTorch, which is not known before the model has run: "
            "give an amount such as '8GB', or 'auto' for the free memory of the device"
        )
    prepare_library()
    return Rematerialization(wanted, heuristic=heuristic, device=device, max_recomputation=max_recomputation, counted=counted)


@shorten_in_properties
class Rematerialization:
    """A block within a memory budget, and its statistics; ``str`` returns them as text."""

    def __init__(
        self, budget: Budget, *, heuristic: str, device: torch.device, max_recomputation: float, counted: CountedMemory
    ) -> None:
        self._budget = budget
        self._heuristic = heuristic
        self._max_recomputation = max_recomputation
        self._device = device
        self._counted = counted
        self._recorder: Recorder | None = None
        self._recording: NativeRecording | None = None
        self._block = ExitStack()

    @shorten_traceback
    def __enter__(self) -> Self:
        """Start to record."""
        if is_in_block():
            raise UsageError("planner.rematerialize is already active in this thread: blocks cannot be nested, use one of them")
        gc.collect()
        tensors = list(_iterate_tensors(self._device))
        if isinstance(self._budget, Auto):
            budget_bytes = compute_auto_budget_bytes(self._device, tensors)
        else:
            context_bytes = measure_cuda_context_bytes(self._device) if self._counted.counts_context else 0
            budget_bytes = self._budget.resolve(0) - context_bytes
        sizes = OutputSizes(self._device)
        library = wait_for_library()
        new_ledger = partial(library.ledger, self._heuristic, make_heuristic(self._heuristic))
        memory: Memory = library.memory(budget_bytes, sizes, new_ledger)
        costs = create_costs(self._device)
        recomputation = library.recomputation(memory, self._max_recomputation, costs, LOCK)
        follower = StepFollower(StepPlans(memory.budget_bytes, library.step_log), memory)
        self._recorder = recorder = Recorder(
            memory, sizes, recomputation, library.sources(memory, recomputation), self._max_recomputation, follower, costs
        )
        self._recording = recording = NativeRecording(recorder)
        for tensor in tensors:
            if memory.find_bytes(tensor) is None:
                memory.add(tensor)
        del tensors
        memory.live_bytes = max(memory.live_bytes, costs.get_in_use_bytes())  # including memory that Python does not know of
        memory.make_room(0, "entering the block")
        if self._device.type == "cpu":
            keep_freed_blocks()
        with ExitStack() as block:
            if self._counted is not CountedMemory.ALLOCATED:
                block.enter_context(limit_allocator(self._device, memory.budget_bytes))
            block.callback(recorder.close)
            block.callback(follower.close)
            block.enter_context(recorder.module)
            block.enter_context(recording.enter())
            self._block = block.pop_all()
        atexit.register(self._block.close)  # if nothing leaves it, such as a suspended generator: Python tears modules down then
        ACTIVE.session = self
        return self

    @shorten_traceback
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop recording. Saved tensors that are still evicted are recomputed when a backward pass reads them."""
        ACTIVE.session = None
        atexit.unregister(self._block.close)
        if isinstance(error, BudgetError):
            error.add_note(self._build_advice())
        self._block.__exit__(kind, error, trace)
        if isinstance(error, AssertionError | NotImplementedError) and (name := find_higher_order_operator(error)) is not None:
            raise UsageError(
                f"planner.rematerialize does not support {name}, a higher-order operator: run that part of the model outside of "
                "the block, or train with planner.checkpoint"
            ) from error
        if isinstance(error, PlannerError):
            shorten(error)
        elif isinstance(error, Exception):
            show_as_eager(error)

    @property
    def _entered(self) -> Recorder:
        if self._recorder is None:
            raise UsageError("the block has not been entered yet: use it as `with planner.rematerialize(...) as session:`")
        return self._recorder

    @property
    def debug(self) -> Recorder:
        """The object that has all that is known of the block; for tests and debugging, and may change."""
        return self._entered

    @property
    def budget_bytes(self) -> int:
        """The budget in bytes."""
        return self._entered.memory.budget_bytes

    @property
    def peak_bytes(self) -> int:
        """The peak so far, in bytes, of all tensors that the runtime has seen."""
        return self._entered.memory.peak_bytes

    @property
    def eager_peak_bytes(self) -> int:
        """The approximate peak of plain eager PyTorch so far, in bytes."""
        return self._entered.memory.eager_peak_bytes

    @property
    def evictions(self) -> int:
        """The number of evictions so far."""
        return self._entered.memory.evictions

    @property
    def ops(self) -> int:
        """The number of ops of the loop so far, without views and recomputed ops."""
        return self._entered.memory.ops

    @property
    def recomputed_ops(self) -> int:
        """The number of recomputed ops so far."""
        return self._entered.recomputation.ops

    @property
    def recomputed_s(self) -> float:
        """The time of recomputed ops so far, in seconds; on CUDA from the times of their first executions."""
        return self._entered.recomputation.seconds

    @property
    def recomputed_by_module(self) -> dict[str, tuple[int, float]]:
        """The number and the time of recomputed ops by the module in which they first ran; see ``train.eager.modules``."""
        return dict(self._entered.recomputation.by_module)

    @property
    def kept_ops(self) -> int:
        """The number of ops whose outputs cannot be recomputed, and are kept."""
        recorder = self._entered
        return recorder.memory.kept_ops + recorder.sources.pinned

    @property
    def host_reads(self) -> int:
        """The number of values that Python has read from tensors, for example with ``.item()``."""
        return self._entered.memory.host_reads

    @property
    def plans(self) -> StepPlans:
        """The steps that have ended so far, and the plans of those that repeat."""
        return self._entered.follower.plans

    @shorten_traceback
    def wait_for_plans(self, seconds: float | None = None) -> None:
        """Wait at most `seconds` until the steps that repeat are solved; from then on they follow their plans."""
        recorder = self._entered
        if not recorder.sources.saved:
            recorder.follower.end()
        self.plans.wait(seconds)

    @shorten_traceback
    def least_budget(self) -> int:
        """Return a budget in bytes that is enough for the longest step so far: the least of a few with which it was replayed.

        It includes what was in memory when the step began. That of a first step does not include the optimizer's state. It is
        also enough for the ops that ran while autograd held no tensor, such as those of frozen layers, as far as they were seen.

        Raises:
            UsageError: no step has ended.
        """
        return max(self._find_enough_bytes(self._get_longest_step()), self._entered.memory.between_peak_bytes)

    @shorten_traceback
    def save_graph(self, path: str | os.PathLike[str]) -> None:
        """Write the longest step so far as a graph, which ``planner solve`` and ``planner compare`` take.

        Raises:
            UsageError: no step has ended.
        """
        write_graph(self._get_longest_step().graph, path)

    @shorten_traceback
    def report(self, path: str | os.PathLike[str], *, trace: str | os.PathLike[str] | None = None) -> None:
        """Write the report page of the longest step so far to `path`, and its Chrome trace to `trace`: docs/report.md.

        It shows the plan of the step; if it has none, what the heuristic does, replayed on the recorded step.

        Raises:
            LimitError: the replay does not fit the budget.
            OutputError: a file cannot be written.
            UsageError: no step has ended.
        """
        from planner.show.report.page import write_pages  # with Jinja, whose memory training spares

        found, step = self.plans.longest_plan, self._get_longest_step()
        if found is not None:
            plan, step = found.plan, found.step
        else:
            params = (MegEngineParams if self._heuristic == MEGENGINE else DtrParams)(thrash_factor=1 + self._max_recomputation)
            settings = PlanSettings(solver=self._heuristic, params=params, memory=CountedMemory.ALLOCATED)
            plan = solve_graph(step.graph, Bytes(self.budget_bytes), settings)
        write_pages(Timeline(step.graph, plan), path, trace)

    def _find_enough_bytes(self, step: StepGraph) -> int:
        return find_enough_bytes(step, self._heuristic, self._max_recomputation)

    def _build_advice(self) -> str:
        """Return advice on the budget of a step that ran out of memory."""
        found_bytes = self._entered.follower.estimate_enough_bytes(self._find_enough_bytes)
        if found_bytes > self.budget_bytes:  # else memory was short for what a replay does not see, as gaps in the allocator
            return f"If this step continues like an earlier one, a budget of {format_enough(found_bytes)} is enough for all of it"
        return (
            "Later ops of the step may need more. How much is known only after a step has ended: run one with a larger budget, "
            "and session.least_budget() returns a budget that is enough for it"
        )

    def _get_longest_step(self) -> StepGraph:
        step = self.plans.longest_step
        if step is None:
            raise UsageError("no step has ended yet: run a forward and a backward pass inside the block first")
        return step

    def __repr__(self) -> str:
        if self._recorder is None:
            return "Rematerialization(not entered yet)"
        memory = self._recorder.memory
        budget, peak = format_bytes(memory.budget_bytes), format_bytes(memory.peak_bytes)
        return f"Rematerialization(budget {budget}, peak {peak}, {memory.evictions} evictions)"

    def __str__(self) -> str:
        if self._recorder is None:
            return repr(self)
        recorder = self._recorder
        memory, again = recorder.memory, recorder.recomputation
        first = format_seconds(memory.clock_s - again.seconds)
        lines = [
            f"budget           {format_bytes(memory.budget_bytes)}",
            f"peak             {format_bytes(memory.peak_bytes)}, in eager PyTorch about {format_bytes(memory.eager_peak_bytes)}",
            f"evictions        {memory.evictions}",
            f"recomputed ops   {again.ops} in {format_seconds(again.seconds)}, in addition to {memory.ops} in {first}",
            f"kept             outputs of {self.kept_ops} ops that cannot be recomputed",
            f"copied           {recorder.sources.copies} tensors before they were overwritten",
            f"read by Python   {memory.host_reads} values",
        ]
        if self.plans.plans:
            lines.append(
                f"planned          {self.plans.planned_steps} steps by their own plan, {self.plans.borrowed_steps} by a plan for "
                f"other sizes; {len(self.plans.plans)} plans"
            )
        if memory.retries:
            lines.append(f"out of memory    {memory.retries} times; the ops were run again after evictions")
        for what, by in (("operator", again.by_operator), ("module", again.by_module)):
            most = sorted(by.items(), key=lambda item: -item[1][1])[:_SHOWN]
            lines += [f"recomputed most, by {what}"] if most else []
            lines += [f"    {name}: {count} times, {format_seconds(seconds)}" for name, (count, seconds) in most]
        return "\n".join(lines)


def _iterate_tensors(device: torch.device) -> Iterator[torch.Tensor]:
    """Yield the tensors on `device` that Python knows of, and their gradients; none that wrap others, as captures leave some."""
    saved = wait_for_library().memory.list_aliases()  # in other blocks
    for value in chain(saved, gc.get_objects()):
        if issubclass(type(value), torch.Tensor) and type(value) in (torch.Tensor, torch.nn.Parameter):
            if is_functorch_wrapped(value) or is_functional_tensor(value):
                continue
            for tensor in (value, value.grad if value.is_leaf else None):
                if tensor is not None and tensor.layout is torch.strided and tensor.device == device:
                    yield tensor
