"""Planned steps of one model: capture, profile, solve, and measure.

A measured peak above the budget lowers the budget of the next solve by the excess; that is done here, and not by
``planner.memory.fit``, since it has to run a step each time. Known weakness: capture runs in the training process, and training
waits for it.
"""

import re
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from planner.capture.lowering.lower import Capture
from planner.capture.options.traced import measure_uses, needs_measuring, replace_graph
from planner.capture.replay import RealStep
from planner.capture.signature import Batch
from planner.capture.step import LossFn, TrainingStep
from planner.capture.workload.models import Workload
from planner.graphs.errors import BudgetError, InfeasibleError, LimitError, PlannerError, TraceError, first_line
from planner.graphs.ir import Graph
from planner.graphs.pools import HOST
from planner.graphs.short_tracebacks import warn_caller
from planner.graphs.units import format_bytes
from planner.measure.pool_memory import measure_peak
from planner.measure.tracing import profile_capture, restore_recorded
from planner.memory.release import release_large_blocks, release_unused
from planner.memory.reserved import choose_memory
from planner.plans.keep_everything import explain_not_fitting, is_memory_tight
from planner.plans.plan import Plan
from planner.plans.record import plan_line
from planner.plans.search import StepSearch
from planner.plans.summary import check_same_graph, summarize
from planner.progress import Stage, Stages
from planner.progress.stages import StageReport
from planner.runtime.arena import SharedSlab
from planner.runtime.arena_allocator import install_if_compiled
from planner.runtime.changed_inputs import keep_copies
from planner.runtime.cuda.device_arena import SharedPool
from planner.runtime.cuda.graphed_step import FunctionRecorder, prepare_for_recording, record, remove_host_times
from planner.runtime.executor import Executor
from planner.runtime.libraries import get_workspaces, library_users, warm_up_libraries
from planner.runtime.out_of_memory import report_errors
from planner.runtime.tight_memory import warn_of_missing_memory
from planner.runtime.transfers.channels import HostChannels
from planner.settings.budget import Budget, Bytes, Overhead
from planner.settings.counted_memory import CountedMemory
from planner.settings.option_settings import apply_recorded_options
from planner.settings.plan import PlanSettings
from planner.torch_private.core import clear_cublas_workspaces
from planner.train.compile.compare_eager import compare_with_eager, warn_of_differences
from planner.train.compile.graph_room import GraphBudget, make_room_for_pool
from planner.train.compile.improvement import Consultation, Improvement, describe_over_budget, set_arena
from planner.train.compile.step import PlannedStep
from planner.train.distributed.wrappers import Unwrapped

if TYPE_CHECKING:
    from planner.capture.kernels.variants import CompileVariant  # importing Inductor takes a second

# How often a budget is lowered by the excess of the measured peak.
_CORRECTIONS = 2
# Typical seconds of stages, for the estimate of the time left: numbers of steps, and of turns with eager PyTorch.
_CHECK_STEPS, _COMPARE_STEPS, _COMPARE_S = 1.5, 6.0, 0.5


@dataclass(frozen=True, slots=True)
class Compiler:
    """Compiler of planned steps of one model, one for each batch whose sizes differ.

    Attributes:
        wrapper: the model with its wrapper for one or several processes.
        loss_fn: as in ``compile``.
        settings: of capture, solves and runs.
        recorder: makes the recorder of a step that is replayed; None: steps run op by op.
        compare_eager: True to compare steps with eager PyTorch.
        channels: channels for transfers to and from the host in all its steps; None if no graph offers them.
        stages: receiver of progress reports.
        slab: the memory of all its steps that run in an arena.
        follows: True if a step is captured again when a number that it read has changed.
        named: the numbers that warnings have named.
        numbers: those that have changed, as Dynamo writes them: they become inputs of the steps that are captured again.
        constants: those of them that cannot be inputs.
        chose_arena: True if steps run in an arena because memory is tight, not because that was asked for.
        in_arena: the compiler of steps in an arena, for which no plan was found soon: its plans replace those of this one.
    """

    wrapper: Unwrapped
    loss_fn: LossFn | None
    settings: PlanSettings
    recorder: Callable[[], FunctionRecorder] | None = None
    compare_eager: bool = True
    channels: HostChannels | None = None
    stages: Stages = field(default_factory=Stages)
    slab: SharedSlab | SharedPool = field(default_factory=SharedSlab)
    follows: bool = False
    named: set[str] = field(default_factory=set)
    numbers: set[str] = field(default_factory=set)
    constants: set[str] = field(default_factory=set)
    chose_arena: bool = False
    in_arena: "Compiler | None" = None

    def choose_arena(self, graph: Graph, budget: Budget) -> "Compiler":
        """Return the compiler of the step of `graph`: in an arena on the CPU if memory is tight, unless `arena` was given.

        Processes that train a model together choose the same: one whose memory is tight decides for all.

        Plans for an arena fit without one too: steps run in none until the library is compiled that has the allocator.
        """
        if self.settings.arena is not None or not isinstance(self.slab, SharedSlab):
            return self
        if not any(self.wrapper.ranks.gather(is_memory_tight(graph, torch.device("cpu")))):
            return self
        if isinstance(budget, Overhead):
            return replace(self, settings=self.settings.leave_arena("max_overhead= plans no addresses, budget= does"))
        return replace(self, settings=replace(self.settings, arena=True), chose_arena=True)

    def plan_at_once(self) -> "Compiler":
        """Return a compiler of steps that run soon: if a better plan may replace it, by the first that fits, timed once."""
        return replace(self, compare_eager=False, settings=self.settings.at_once)

    def capture(self, batch: Batch) -> Capture:
        """Return the step on `batch` with the sizes of its shapes, the same on all processes; nothing is executed."""
        return self.wrapper.capture_on_all(partial(self._capture_here, batch))

    def _capture_here(self, batch: Batch) -> Capture:
        """Return the step on `batch` as this process captures it."""
        return self._capture(batch, None)

    def adapt_capture(self, plan: Plan, captured: Capture, batch: Batch) -> Capture:
        """Return the step on `batch` with the sizes and kernels that `plan` was made for; `captured` is from ``capture``."""
        del batch
        restored = restore_recorded(captured, plan.graph.provenance, self.settings.traced_options)
        return self.wrapper.add_units(restored, self.settings)

    def make(self, captured: Capture, batch: Batch, budget: Budget) -> PlannedStep:
        """Return the fastest step on `batch` within the budget; `captured` is what ``capture`` returned."""
        profiled = self.profile(captured, batch)
        # Some sizes are known from the profile only: those of workspaces that oneDNN's LSTM keeps for its backward pass.
        compiler = self.choose_arena(profiled.graph, budget) if self.wrapper.ranks.is_alone else self
        return compiler.plan(profiled, batch, budget)

    def plan(self, captured: Capture, batch: Batch, budget: Budget) -> PlannedStep:
        """Return the fastest step on `batch` within the budget; `captured` is profiled."""
        return self.solve(captured, batch, budget)

    def _capture(self, batch: Batch, variant: "CompileVariant | None") -> Capture:
        with self.stages.run_stage(Stage.CAPTURE):
            captured = self.wrapper.capture(self.loss_fn, batch, self.settings, variant)
        return captured if self.recorder is None else prepare_for_recording(captured)

    def profile(self, captured: Capture, batch: Batch) -> Capture:
        """Return `captured` with measured times, workspaces and sizes, and with the options that are found in it."""
        self.slab.drop()  # of a step of other sizes
        with self.stages.run_stage(Stage.MEASURE) as stage:
            measured = self.wrapper.together.run_first(
                partial(self._measure, captured, Workload(self.wrapper.module, self.loss_fn, batch), stage),
                share=lambda found: found.graph,
                adopt=partial(self._adopt_graph, captured),
            )
        if self.recorder is not None:
            measured = remove_host_times(measured)
        return self.wrapper.add_units(measured, self.settings)

    def _measure(self, captured: Capture, workload: Workload, stage: StageReport) -> Capture:
        with self.wrapper.sharding.enter_captured_state():
            return profile_capture(captured, workload, self.settings, on_op=stage.advance)

    def _adopt_graph(self, captured: Capture, graph: Graph) -> Capture:
        """Return `captured` with the profiled `graph` of another process."""
        restored = restore_recorded(captured, graph.provenance, self.settings.traced_options)
        check_same_graph(summarize(graph), summarize(restored.graph))
        return replace(restored, graph=graph)

    def solve(self, captured: Capture, batch: Batch, budget: Budget) -> PlannedStep:
        """Return the step of a profiled capture, solved until the measured peak is within the budget.

        If eager PyTorch does not fit, the peak is measured in the first training step, to spare the time of an extra one.
        """
        try:
            return self._solve(captured, batch, budget)
        except (BudgetError, LimitError) as error:
            if not self.chose_arena:
                raise
            later = self if isinstance(error, LimitError) else None
            left = replace(self, settings=self.settings.leave_arena(first_line(error)), chose_arena=False, in_arena=later)
            return left.solve(captured, batch, budget)

    def _solve(self, captured: Capture, batch: Batch, budget: Budget) -> PlannedStep:
        rehearses = self._must_rehearse(captured.graph)
        counted = self._build_graph_budget(captured.graph, budget)
        allowed = budget if counted is None else Bytes(counted.allocated_bytes)
        try:
            plan = self._find_first_plan(captured.graph, allowed, rehearses=rehearses)
        except InfeasibleError as error:
            if counted is None:
                raise
            raise counted.explain(error) from error
        if not rehearses:
            executor = self._make_executor(captured, plan)
            plan = self._compare(captured, batch, plan if executor.arena else set_arena(plan, None), executor)
            warn_of_missing_memory(captured.graph, plan.peak_bytes, executor.device)
            return self._step(captured, plan, executor, budget, solved_bytes=plan.budget_bytes)
        wanted_bytes = plan.budget_bytes
        if self.recorder is not None:
            counted = counted or GraphBudget(wanted_bytes, CountedMemory.ALLOCATED, plan.eager_bytes, 0)
            libraries = get_workspaces(next(self.wrapper.module.parameters()).device)
            solve = partial(self._find_first_plan, captured.graph)
            plan = make_room_for_pool(captured.graph, plan, libraries, counted, solve)
        for left in reversed(range(_CORRECTIONS + 1)):
            executor, peak_bytes = self._build_executor(captured, batch, plan)
            needed_bytes = max(self.wrapper.together.gather(plan.compute_needed_bytes(peak_bytes)))
            if needed_bytes <= wanted_bytes:
                solved_bytes = plan.budget_bytes
                plan = set_arena(replace(plan, budget_bytes=wanted_bytes, measured_peak_bytes=peak_bytes), executor.arena)
                if counted is not None:
                    plan = counted.plan_of(captured.graph, plan, peak_bytes - captured.graph.static_bytes)
                plan = self._compare(captured, batch, plan, executor)
                return self._step(captured, plan, executor, budget, solved_bytes=solved_bytes)
            del executor  # with the memory of its recording
            over = describe_over_budget(plan, needed_bytes, wanted_bytes)
            if left:
                try:
                    plan = self._find_first_plan(captured.graph, Bytes(plan.predicted_bytes - (needed_bytes - wanted_bytes)))
                except BudgetError as error:
                    raise InfeasibleError(f"{over}; no plan is found that needs that much less: raise the budget") from error
        raise BudgetError(f"{over}; lower the budget")

    def _step(self, captured: Capture, plan: Plan, executor: Executor, budget: Budget, *, solved_bytes: int) -> PlannedStep:
        """Return the step that `executor` runs by `plan`, which was solved for `solved_bytes`."""
        executor.start_training(plan.budget_bytes, check_writes=self.settings.check_writes)
        return PlannedStep(
            plan,
            self.wrapper.wrap(executor),
            captured.graph,
            refreshed=self._build_refresher(captured, budget),
            copying=self._build_copier(captured, plan.budget_bytes, measured=True),
            executor=executor,
            improving=self._start_improvement(captured, plan, executor, solved_bytes, finds=self.wrapper.together.is_first),
        ).follow_with(self._follow if self.follows else None)

    def _build_graph_budget(self, graph: Graph, budget: Budget) -> GraphBudget | None:
        """Return the budget of reserved memory for a step that is recorded; None for others, and for other budgets."""
        memory = choose_memory(graph, self.settings.memory)
        if self.recorder is None or memory is CountedMemory.ALLOCATED or isinstance(budget, Overhead):
            return None
        return GraphBudget.of(graph, budget, memory)

    def _find_first_plan(self, graph: Graph, budget: Budget, *, rehearses: bool = True) -> Plan:
        compare_s = _COMPARE_STEPS * graph.time_s + _COMPARE_S if self.compare_eager and rehearses else 0.0
        self.stages.expect({Stage.CHECK: _CHECK_STEPS * graph.time_s if rehearses else 0.0, Stage.COMPARE: compare_s})
        if self.settings.wait.seconds is not None:
            self.stages.expect({Stage.SOLVE: self.settings.wait.seconds})
        with self.stages.run_stage(Stage.SOLVE) as stage:
            settings = self.settings
            if self.recorder is not None:  # the rest of the budget is outside of the plan
                settings = replace(settings, memory=CountedMemory.ALLOCATED)
            return self.wrapper.together.share(lambda: self._build_search(settings).find_first_plan(graph, budget, stage))

    def _build_search(self, settings: PlanSettings) -> StepSearch:
        return StepSearch(settings, chose_arena=self.chose_arena)

    def _must_rehearse(self, graph: Graph) -> bool:
        """Return True if planning runs a step to measure its peak."""
        if not self._swaps or not self.wrapper.ranks.is_alone:
            return True  # a plan over the budget would stay
        if self.settings.arena and not self.chose_arena and isinstance(self.slab, SharedSlab):
            return True  # its first step is recorded
        return not explain_not_fitting(graph, next(self.wrapper.module.parameters()).device)

    @property
    def _swaps(self) -> bool:
        """True if the plans of steps are swapped while they train."""
        return self.settings.goes_on and self.recorder is None and not self.settings.other_devices

    def _start_improvement(
        self, captured: Capture, plan: Plan, executor: Executor, solved_bytes: int, *, finds: bool
    ) -> Consultation | None:
        """Return the search for better plans while the step trains; None if plans are not swapped."""
        if not self._swaps:
            return None
        later = self.in_arena or self
        improvement = Improvement(
            captured,
            plan,
            executor,
            solved_bytes=solved_bytes,
            search=later._build_search(later.settings),
            make_executor=later._make_executor,
            finds=finds,
        )
        return Consultation(self.wrapper.ranks, improvement, self.wrapper.wrap)

    def _build_refresher(self, captured: Capture, budget: Budget) -> Callable[[Batch], PlannedStep] | None:
        """Return the function that measures resource uses on a batch again and replans; None if no resource is limited."""
        if not needs_measuring(captured) or type(self.wrapper) is not Unwrapped:
            return None
        return partial(self._refresh, captured, budget)

    def _refresh(self, captured: Capture, budget: Budget, batch: Batch) -> PlannedStep:
        real = RealStep(captured, TrainingStep(self.wrapper.module, self.loss_fn), batch)
        graph = measure_uses(captured, real)
        with self.stages.restart() as stages:
            step = replace(self, stages=stages).solve(replace(captured, graph=graph), batch, budget)
            stages.finish(plan_line(step.plan))
        return step

    def _build_copier(
        self, captured: Capture, budget_bytes: int, *, measured: bool
    ) -> Callable[[Batch, Set[int]], PlannedStep] | None:
        """Return the function that replans a step, `measured` or not, with copies of changed tensors; None on several ranks."""
        if not self.wrapper.ranks.is_alone:
            return None
        return partial(self._replan_with_copies, captured, Bytes(budget_bytes), measured)

    def _replan_with_copies(
        self, captured: Capture, budget: Budget, measured: object, batch: Batch, changed: Set[int]
    ) -> PlannedStep:
        with self.stages.restart() as stages:
            compiler = replace(self.plan_at_once(), stages=stages)
            plan = compiler.solve if measured else compiler.make
            step = plan(keep_copies(captured, changed), batch, budget)
            stages.finish(plan_line(step.plan))
        return step

    def _follow(self, what: str, batch: Batch, steps: Sequence[PlannedStep]) -> PlannedStep:
        """Return a step for numbers that have changed: `what` says which."""
        began, name = time.perf_counter(), re.split(" (?:was|is) ", what)[0]
        with self.wrapper.open():
            try:
                step = self._build_with_numbers(batch, steps)
            except TraceError as error:
                raise TraceError(f"{what}, and {error}") from error
        if name not in self.named:
            self.named.add(name)
            again = "captured again: " if any(step.plan is other.plan for other in steps) else "planned again: "
            cost = f"about {time.perf_counter() - began:.1g} s"
            later = f"it is read in each step from now on, after {cost}"
            if " was set since " in what or " gives " in what:
                later = f"it took {cost}"
            elif step._executor is None or name not in step._executor.free_numbers:
                later = f"each new value takes {cost}, a tensor in its place none"
            warn_caller(f"{again}{what} (said once; {later})")
        return step

    def _capture_with_inputs(self, step: PlannedStep, batch: Batch) -> Capture:
        """Return the step on `batch` with the numbers as inputs that have changed since `step`, and before."""
        assert step._executor is not None
        self.numbers.update(*self.wrapper.together.gather(step._executor.find_changed_numbers(batch)))
        names = frozenset(self.numbers - self.constants)
        if names:
            try:
                return replace(self, settings=replace(self.settings, numbers=names))._capture_here(batch)
            except TraceError:  # together with branches on data, say
                self.constants.update(names)
        return self._capture_here(batch)

    def _build_with_numbers(self, batch: Batch, steps: Sequence[PlannedStep]) -> PlannedStep:
        """Return the step on `batch` with the present numbers, by the plan of one of `steps` if the graph is the same."""
        quiet = replace(self, stages=Stages())
        capture = partial(quiet._capture_with_inputs, steps[0]) if self.settings.reads_numbers else quiet._capture_here
        captured = self.wrapper.capture_on_all(partial(capture, batch))
        for step in steps:
            try:
                same = self.adapt_capture(step.plan, captured, batch)
                check_same_graph(step.plan.graph, summarize(apply_recorded_options(same.graph, step.plan.settings)))
            except PlannerError:  # a number has chosen other ops
                continue
            if self.settings.arena and isinstance(self.slab, SharedSlab):  # its first step is recorded
                executor, _ = quiet._build_executor(same, batch, step.plan)
            else:
                executor = self._make_executor(same, step.plan)
            executor.start_training(step.plan.budget_bytes, check_writes=self.settings.check_writes)
            copying = self._build_copier(same, step.plan.budget_bytes, measured=False)
            return PlannedStep(step.plan, self.wrapper.wrap(executor), step.measured, copying=copying, executor=executor)
        with self.stages.restart() as stages:
            made = replace(self.plan_at_once(), stages=stages).make(captured, batch, Bytes(steps[0].plan.budget_bytes))
            stages.finish(plan_line(made.plan))
        return made

    def reuse(
        self, captured: Capture, batch: Batch, plan: Plan, measured: Graph | None, *, improves: bool = False
    ) -> PlannedStep:
        """Return the step of a plan that was loaded from the cache or received from another rank.

        Args:
            improves: True if another rank searches for better plans while the step trains.

        Raises:
            MismatchError, ScheduleError: it is not one for this step.
            BudgetError: its measured peak is over its budget here, or it exceeds the host memory.
        """
        check_same_graph(plan.graph, summarize(apply_recorded_options(captured.graph, plan.settings)))
        host_bytes = plan.pool_peaks_bytes.get(HOST, 0)
        if self.channels is not None and host_bytes > self.channels.memory.capacity_bytes:
            raise BudgetError(
                f"it takes {format_bytes(host_bytes)} of the host's memory, and may take "
                f"{format_bytes(int(self.channels.memory.capacity_bytes))} here"
            )
        executor, peak_bytes = self._build_executor(captured, batch, plan)
        if plan.compute_needed_bytes(peak_bytes) > plan.budget_bytes:
            raise BudgetError(
                f"its measured peak here is {format_bytes(peak_bytes)}, over its budget of {format_bytes(plan.budget_bytes)}"
            )
        plan = set_arena(replace(plan, measured_peak_bytes=peak_bytes), executor.arena)
        plan = self._compare(captured, batch, plan, executor)
        executor.start_training(plan.budget_bytes, check_writes=self.settings.check_writes)
        improving = self._start_improvement(captured, plan, executor, plan.budget_bytes, finds=False) if improves else None
        copying = self._build_copier(captured, plan.budget_bytes, measured=False)
        run = self.wrapper.wrap(executor)
        step = PlannedStep(plan, run, measured, copying=copying, executor=executor, improving=improving)
        return step.follow_with(self._follow if self.follows else None)

    def _compare(self, captured: Capture, batch: Batch, plan: Plan, executor: Executor) -> Plan:
        """Return `plan` with its comparison with eager PyTorch, if requested; return freed memory to the system."""
        eager = None
        if self.compare_eager and not self.wrapper.sums_gradients:
            step, planned = TrainingStep(self.wrapper.module, self.loss_fn), partial(self._run_sharded, executor)
            with self.stages.run_stage(Stage.COMPARE):
                eager = compare_with_eager(captured, planned, step, batch, plan=plan, together=self.wrapper.together)
        if executor.device.type == "cuda" and not library_users:
            clear_cublas_workspaces()  # which measuring eager PyTorch has allocated
        release_unused(executor.device)
        plan = replace(plan, eager=eager)
        warn_of_differences(plan)
        return plan

    def _run_sharded(self, executor: Executor, *args: object, **kwargs: object) -> Any:
        """Run a step by its plan, which takes shards: FSDP2's own step before it leaves parameters gathered."""
        self.wrapper.reshard()
        return executor(*args, **kwargs)

    def _build_executor(self, captured: Capture, batch: Batch, plan: Plan) -> tuple[Executor, int]:
        """Return the executor of `plan`, and its measured peak."""
        with self.stages.run_stage(Stage.CHECK), report_errors("rehearsing the plan to measure its peak"), release_large_blocks():
            executor = self._make_executor(captured, plan)
            step = TrainingStep(self.wrapper.module, self.loss_fn)
            if self.recorder is None:
                return executor, measure_peak(captured, executor, step, batch).peak_bytes
            recorder = self.recorder()
            record(captured, executor, step, batch, recorder)
            if library_users:  # which recording has left without workspaces
                warm_up_libraries(executor.device)  # into segments of their own, as nothing is cached now
            return executor, captured.graph.static_bytes + recorder.count_held_bytes()

    def _make_executor(self, captured: Capture, plan: Plan) -> Executor:
        offered = replace_graph(captured, apply_recorded_options(captured.graph, plan.settings))
        executor = Executor(
            offered, plan.schedule, self.wrapper.module, self.loss_fn, self.channels, sharding=self.wrapper.sharding
        )
        asked = plan.arena_bytes is not None or (self.settings.arena and plan.settings.no_arena is None)
        if asked and (not self.chose_arena or install_if_compiled()):
            executor.use_arena(self.slab, plan.arena_offsets)
        elif isinstance(self.slab, SharedPool) and self.slab.pool is not None:  # of an earlier plan
            self.slab.drop()
            release_unused(executor.device)
        return executor
