"""One budget for all the graphs of a compiled model.

Graphs are compiled when they are reached: the first is planned before the others are known, and nothing says that one is the
last, as the model may be called again before the backward pass. So each graph of a step that is not known runs by a provisional
plan: of the schedules that fit, the one that keeps least until its backward pass. It leaves room for the gradients of all
parameters of the model. After the step all graphs and the memory that each needs are known, and they are planned together, with
those of other steps that have a graph in common.

Before, graphs that nothing followed had the whole budget at once, and a share was one of each graph's own peak: first steps took
up to twice their budget where others followed all the same, and so did each step of a model called once and twice in turns.

If a step has only one graph, it is planned for the memory that the budget counts. Several graphs of a step are planned for
allocated bytes, which are lowered until the memory that they reserve together fits the budget.

Known weaknesses: first steps are slower than the budget asks. A step that begins as a known one, and has more graphs, exceeds the
budget by what the graphs known keep.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from planner.capture.lowering.lower import Capture
from planner.graphs.errors import InfeasibleError, LimitError
from planner.graphs.ir import Graph
from planner.graphs.optimizers import OPTIMIZERS
from planner.graphs.options.option import Feature
from planner.graphs.schedule import Schedule, count_kept_bytes
from planner.graphs.short_tracebacks import warn_caller
from planner.graphs.simulate import simulate
from planner.graphs.units import UNLIMITED_BYTES, format_bytes, format_enough
from planner.graphs.walks import walk
from planner.memory.auto_budget import compute_auto_budget_bytes
from planner.memory.fit import Bracket, fit
from planner.memory.release import release_unused
from planner.memory.reserved import (
    choose_memory,
    choose_memory_on,
    predict_eager_bytes,
    predict_kept_beside_passes,
    predict_reserved_for_passes,
)
from planner.plans.record import describe_saved
from planner.plans.search import StepSearch
from planner.plans.summary import summarize
from planner.progress import Stage, Stages, list_views
from planner.runtime.arena import Arena, SharedSlab
from planner.runtime.changed_inputs import has_memory
from planner.settings.budget import Auto, Budget, Bytes, Share
from planner.settings.compatibility import check_compatible
from planner.settings.counted_memory import CountedMemory
from planner.settings.option_settings import OptionSettings
from planner.train.backend.joint_planning import JointPlanning
from planner.train.backend.model_calls import CALL, get_outside, list_model_tensors
from planner.train.backend.planned_graph import PlannedGraph, get_graph_device
from planner.train.backend.rest_of_step import add_rest, build_keep_everything, find_lean_schedule, find_least_schedule
from planner.train.backend.settings import BackendSettings
from planner.train.backend.shared_channels import SharedChannels, compute_host_room, set_host_bytes
from planner.train.backend.step_memory import (
    PassStorages,
    UnplannedGraph,
    collect_storages,
    compute_bytes_of_others,
    compute_peak_bytes,
    compute_peak_of_unplanned,
    count_bytes_beside_requests,
    find_left_out,
    find_unread,
    list_sizes_beside_requests,
)

_log = logging.getLogger(__name__)

_OBSERVED = 8  # steps that run by provisional plans after one that began as a known step and had more graphs
_FITS = 5  # attempts to plan the graphs of a step together so that they reserve no more than the budget


@dataclass(slots=True)
class _ForwardRun:
    """A forward pass; `alive` until its backward pass has run.

    Attributes:
        copies: those of inputs that its plan does not count.
    """

    graph: PlannedGraph
    seen: PassStorages
    schedule: Schedule
    plan: StorageWeakRef | None = None
    copies: Sequence[ref[torch.Tensor]] = ()

    @property
    def alive(self) -> bool:
        return self.plan is None or not self.plan.expired()

    @property
    def kept_bytes(self) -> int:
        """The bytes in memory until its backward pass, without static memory."""
        copied_bytes = sum(copy.untyped_storage().nbytes() for copy in self._list_copies())
        return count_kept_bytes(self.graph.captured.graph, self.schedule) + copied_bytes

    def free_copies(self) -> bool:
        """Free the copies; False if there are none."""
        copies = self._list_copies()
        for copy in copies:
            copy.untyped_storage().resize_(0)
        return bool(copies)

    def _list_copies(self) -> list[torch.Tensor]:
        found = (copy() for copy in self.copies)
        return [copy for copy in found if copy is not None and has_memory(copy)]


@dataclass(slots=True)
class _KnownStep:
    """A step whose graphs are known.

    Attributes:
        seen: storages that each of its forward passes uses.
        planned_bytes: budget for which its graphs are planned together.
        requested_bytes: the most that they may request at once, in an arena and outside of it.
        less_bytes: by how much `planned_bytes` was last lowered because the arena was too large.
    """

    seen: Sequence[PassStorages]
    planned_bytes: int
    requested_bytes: int
    less_bytes: int = 0


_Step = tuple[PlannedGraph, ...]  # the graphs of its forward passes, in order


class SharedBudget:
    """The memory on the device and the host that one ``torch.compile`` call may use.

    Attributes:
        settings: of the plan of each graph.
        budget: the budget; ``auto`` is replaced by bytes when they are known.
        memory: the memory that it counts; the default depends on the device of the first graph.
        learning: True in steps whose graphs and what they keep are not known.
    """

    def __init__(self, settings: BackendSettings) -> None:
        self.settings, self.memory = settings.plan, CountedMemory.ALLOCATED
        self.budget: Budget = settings.budget
        self._options = options = self.settings.options
        self._shared_channels = None if options.host_bytes is None else SharedChannels(options.host_bytes)
        self.forward_runs: list[_ForwardRun] = []
        self._known: dict[_Step, _KnownStep] = {}  # steps whose graphs are planned together
        self._following: Collection[_Step] = ()  # known steps that begin as the present one
        self._unseen: dict[_Step, int] = {}  # steps that began as known ones, and how many more are observed in case they come
        self._replaced: dict[PlannedGraph, Schedule] = {}  # plans for known steps that the present one does without
        self._is_partly_seen = False  # the present step began as a known one
        self.learning, self._warned = False, False
        self._largest_bytes = 0  # peak of a step without recomputation
        self.known_graphs: dict[PlannedGraph, PassStorages] = {}
        self._before: dict[UnplannedGraph, PassStorages] = {}  # the last pass of each, before planned graphs
        self._left_on: torch.device | None = None  # where the last step was one of eager PyTorch
        self._slab = SharedSlab() if self.settings.arena else None
        is_first = not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0
        self._views = list_views(settings.on_progress) if is_first else ()

    def build_graph(self, joint: fx.GraphModule, captured: Capture, *, outputs: int) -> PlannedGraph:
        """Return the graph of a capture of `joint`, with the requested options."""
        device = get_graph_device(joint)
        if device.type == "cuda":
            check_compatible({*self.settings.features, Feature.SHARED_GPU})
        asked = self.settings.memory
        self.memory = choose_memory_on(device.type, None) if asked is None else choose_memory(captured.graph, asked)
        captured = replace(captured, graph=self._options.apply(captured.graph))
        channels = None if self._shared_channels is None else self._shared_channels.open_channels(device)
        return PlannedGraph(joint, captured, channels, self._choose_arena(), outputs=outputs)

    def _choose_arena(self) -> Arena | None:
        """Return the arena of a new graph: that of graphs whose backward pass has not run, else a new one in the slab."""
        if self._slab is None:
            return None
        waiting = next((run for run in self.forward_runs if run.alive), None)
        return Arena(self._slab) if waiting is None else waiting.graph.arena

    def create_stages(self) -> Stages:
        """Return the progress stages of a planning, without capture and execution; all are shown in one place."""
        return Stages(*self._views, stages=(Stage.MEASURE, Stage.SOLVE))

    def add(self, graph: PlannedGraph, inputs: Sequence[object], model: Iterable[torch.Tensor], *, more: bool) -> None:
        """Plan a graph that was just reached, before the graphs that follow are known.

        Args:
            model: parameters and buffers that it and other graphs may read.
            more: another graph follows in the same step.

        Raises:
            InfeasibleError, LimitError: no schedule fits beside the memory that earlier graphs keep.
        """
        if isinstance(self.budget, Auto):
            self.budget = Bytes(_compute_auto_bytes(inputs, model := list(model)))
        self.forward_runs = [run for run in self.forward_runs if run.alive]
        graph.watch = lambda args: self._begin(graph, args)
        self._plan_provisionally(graph, self._collect_storages(inputs), [*model, *list_model_tensors()], more=more)

    def _plan_provisionally(
        self, graph: PlannedGraph, seen: PassStorages, model: Iterable[torch.Tensor], *, more: bool = True
    ) -> None:
        """Let `graph` keep as little as it can, in a step whose graphs are not known; see ``add``.

        A plan that was made for no more room stays. If nothing fits, the graph takes as little as it can: earlier graphs of the
        step keep too much by plans for other steps, or the budget is a share of a peak to which graphs that follow will add.
        """
        earlier = [run for run in self.forward_runs if run.alive]
        order, runs = [*(run.graph for run in earlier), graph], [*(run.seen for run in earlier), seen]
        behind = find_unread(model, runs)
        whole = self.compute_whole_bytes(order, runs)
        waits = isinstance(self.budget, Share) and (bool(earlier) or more or bool(behind and behind.trained))
        may_refuse = not waits and all(run.graph.provisional for run in earlier)

        def compute_room(*later: PassStorages) -> int:
            others = compute_bytes_of_others([*runs, *later], len(earlier), [run.kept_bytes for run in earlier])
            alone = not earlier and not more
            return self._compute_room(order, whole, alone=alone) - others

        room = compute_room()
        if earlier:
            self._warn_of_several(room, whole)
        elif room <= 0 and may_refuse:
            raise InfeasibleError(
                f"memory outside of the graph to be planned already takes {format_bytes(whole - room)}, and the budget is "
                f"{format_bytes(whole)}: autograd holds it for ops that are not compiled. Raise the budget, or remove the graph "
                "breaks (TORCH_LOGS=graph_breaks shows them)"
            )
        if graph.provisional and graph.room_bytes <= room:
            return
        rooms = [room] if behind is None else [compute_room(behind), room]  # the model may have parameters that it never reads
        found = self._find_lean(order, runs, rooms)
        if found is None and any(run.free_copies() for run in earlier):
            found = self._find_lean(order, runs, [compute_room()])
        if found is None and not may_refuse:
            if self._is_partly_seen:
                warn_caller(_MORE_GRAPHS.format(format_bytes(whole)))
            found = self._find_lean(order, runs, [find_least_schedule(graph.captured.graph, graph.tangents)[0]])
        if found is None:
            found = room, self._find_with_options(graph, room, whole)
        if graph.has_plan and not graph.provisional:
            self._replaced[graph] = graph.schedule
        graph.plan_provisionally(*found)

    def _find_lean(
        self, order: Sequence[PlannedGraph], runs: Sequence[PassStorages], rooms: Iterable[int]
    ) -> tuple[int, Schedule] | None:
        """Return the first of `rooms` in which the last graph fits, with the schedule there that keeps least; or None."""
        graph = order[-1]

        def solve(budget: Bytes) -> tuple[int, Schedule]:
            room = budget.size_bytes
            lean = find_lean_schedule(graph.captured.graph, graph.tangents, room, time_limit_s=self.settings.time_limit_s)
            if lean is None:
                raise InfeasibleError(f"nothing was found within {format_bytes(room)}")
            return room, lean

        def measure(found: tuple[int, Schedule]) -> int:
            schedules = [*(each.schedule for each in order[:-1]), found[1]]
            parts = [(each.captured.graph, schedule) for each, schedule in zip(order, schedules, strict=True)]
            return self._predict_reserved(order, runs, parts)

        for room in rooms:
            with suppress(InfeasibleError):
                found = solve(Bytes(room))
                if self.memory is not CountedMemory.ALLOCATED:
                    bracket = Bracket(self.budget.resolve(self._largest_bytes))
                    found, _ = fit(found, solve, measure, bracket, allocated=itemgetter(0), tries=_FITS)
                return found
        return None

    def _find_with_options(self, graph: PlannedGraph, room: int, whole: int) -> Schedule:
        """Return a schedule within `room`, of the `whole` budget, with options, where those without them do not fit."""
        order, captured = [*(run.graph for run in self.forward_runs), graph], graph.captured.graph
        there = compute_host_room(order, graph, {each: each.on_host for each in order[:-1]}, self._host_bytes)
        is_first = len(order) == 1
        memory = self.memory if is_first else CountedMemory.ALLOCATED
        try:
            return self._solve(set_host_bytes(captured, there), max(1, room), memory)
        except (InfeasibleError, LimitError) as error:
            if is_first:
                raise
            kept_bytes = sum(run.kept_bytes for run in self.forward_runs)
            enough_bytes = whole - room + find_least_schedule(captured, graph.tangents)[0]
            raise type(error)(
                f"budget {format_bytes(whole)} is too small for graph {len(order)} of the model, which is captured as several: "
                f"those before it keep {format_bytes(kept_bytes)} until the backward pass, and with {format_enough(enough_bytes)}"
                " it would fit. Removing graph breaks saves memory (TORCH_LOGS=graph_breaks shows them). Of what they leave: "
                f"{error}"
            ) from error

    def list_alone(self) -> list[PlannedGraph]:
        """Return the graphs that are alone in their steps; none while another step runs, or where more than they count."""
        if self._slab is not None or self._before or any(run.alive for run in self.forward_runs):
            return []
        alone = [step[0] for step in (tuple(run.graph for run in self.forward_runs), *self._known) if len(step) == 1]
        return [graph for graph in dict.fromkeys(alone) if not self.known_graphs[graph].followed_by]

    def compute_room_beside(self, inputs: Sequence[object]) -> int:
        """Return the bytes of the budget for a graph with these inputs, alone in its step."""
        others = compute_bytes_of_others([self._collect_storages(inputs)], 0, [])
        return self.budget.resolve(self._largest_bytes) - others

    def run_eagerly(self, module: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
        """Return the function that runs a graph by eager PyTorch; the memory that steps before and after reserve is freed."""

        def run(*args: Any) -> Any:
            _release(device)
            self._left_on = device
            return module(*args)

        return run

    def _warn_of_several(self, room_bytes: int, whole_bytes: int) -> None:
        """Warn, once, that the model has a second graph."""
        if not self._warned:
            self._warned = True
            warn_caller(
                f"the model is captured as several graphs: the second one gets {format_bytes(max(1, room_bytes))} of "
                f"{format_bytes(whole_bytes)}, and each what those before it leave, until all are planned together after the "
                "first step. Removing graph breaks saves memory (TORCH_LOGS=graph_breaks shows them)",
            )

    def _solve(self, graph: Graph, budget_bytes: int, memory: CountedMemory = CountedMemory.ALLOCATED) -> Schedule:
        """Return a schedule of `graph` within a budget of `memory`; the graph already has the requested options."""
        settings = replace(self.settings, options=OptionSettings(self.settings.traced_options), memory=memory)
        return StepSearch(settings).find_first_plan(graph, Bytes(budget_bytes)).schedule

    def _compute_room(self, order: Sequence[PlannedGraph], whole: int, *, alone: bool) -> int:
        """Return the part of the budget for which the graphs of a step are planned: all of it if there is only one."""
        return whole if alone else whole - predict_kept_beside_passes([graph.captured.graph for graph in order], self.memory)

    @property
    def _host_bytes(self) -> int:
        return 0 if self._shared_channels is None else self._shared_channels.host_bytes

    def compute_whole_bytes(self, graphs: Sequence[PlannedGraph], runs: Sequence[PassStorages]) -> int:
        """Return the budget in bytes for a step of these graphs; a share refers to the largest step so far.

        So a smaller last batch does not get a smaller budget.
        """
        captured = [graph.captured.graph if graph.eager is None else graph.eager for graph in graphs]
        if self.memory is CountedMemory.ALLOCATED:
            step_bytes = _compute_eager_peak_bytes(captured, runs)
        elif len(graphs) == 1:
            step_bytes = predict_eager_bytes(captured[0], self.memory) + compute_bytes_of_others(runs, 0, [])
        else:
            step_bytes = self._predict_reserved(graphs, runs, [(graph, build_keep_everything(graph)) for graph in captured])
        self._largest_bytes = max(self._largest_bytes, step_bytes)
        return self.budget.resolve(self._largest_bytes) if self._largest_bytes else 1  # all tensors are empty

    def _describe_plans(self, graphs: Sequence[PlannedGraph], runs: Sequence[PassStorages]) -> str:
        """Return the plans of the graphs of a step in one line."""
        plans = [(graph.captured.graph, graph.schedule) for graph in graphs]
        time_s, base_s = sum(simulate(*plan).step_s for plan in plans), sum(summarize(graph).predicted_s for graph, _ in plans)
        overhead = time_s / base_s - 1 if base_s else 0.0
        return describe_saved(
            compute_peak_bytes(plans, runs), _compute_eager_peak_bytes([graph for graph, _ in plans], runs), overhead, None
        )

    def _predict_reserved(
        self, order: Sequence[PlannedGraph], seen: Sequence[PassStorages], parts: Sequence[tuple[Graph, Schedule]]
    ) -> int:
        """Return the bytes of the counted memory that a step reserves if its graphs follow the schedules in `parts`."""
        last = order[-1]
        tangents = [last.captured.graph.tensors[t].size_bytes for t in last.tangents]  # made by ops outside of graphs
        return predict_reserved_for_passes(parts, [*list_sizes_beside_requests(seen), *tangents], self.memory)

    def _begin(self, graph: PlannedGraph, args: Sequence[object]) -> Callable[[list[Any], torch.Tensor], None]:
        """Record the start of a forward pass; if a step has ended, plan the graphs of that step together."""
        if self.forward_runs and not any(run.alive for run in self.forward_runs):
            self._end_step()
        if self._left_on is not None:
            _release(self._left_on)
            self._left_on = None
        if graph.changed or graph.laid_out:
            self._plan_again(graph)
        if (call := CALL.get()) is not None:
            call.count_left_out = self.count_left_out
        self._follow(graph)
        if self.learning:
            self.known_graphs[graph] = self._collect_storages(args)
        if not self._following:
            self._plan_provisionally(graph, self.known_graphs[graph], list_model_tensors())
        run = _ForwardRun(graph, self.known_graphs[graph], graph.schedule)

        def end(returned: list[Any], plan: torch.Tensor) -> None:
            if self.learning:
                run.seen.add_outputs(returned)
            run.plan = StorageWeakRef(plan.untyped_storage())
            if not self._following:
                run.copies = [ref(copy) for copy in graph.list_copies(plan)]
            self.forward_runs.append(run)

        return end

    def _follow(self, graph: PlannedGraph) -> None:
        """Find the known steps that have begun as the present one, of which `graph` is next."""
        if not self.forward_runs:
            self.learning, self._is_partly_seen = any(step[0] is graph for step in self._unseen), False
            self._following = () if self.learning else self._known
        position = len(self.forward_runs)
        self._following = [step for step in self._following if len(step) > position and step[position] is graph]
        if not self._following and not self.learning:
            self.learning, self._is_partly_seen = True, bool(position)

    def count(self, graph: UnplannedGraph, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return `compiled`, which runs `graph`, such that its memory counts for the planned graphs of its steps."""

        def call(*args: Any) -> Any:
            returned = compiled(*args)
            if self.learning:
                seen = PassStorages.of(args, graph, get_outside())
                seen.add_outputs(returned)
                if any(run.alive for run in self.forward_runs):
                    self.forward_runs[-1].seen.followed_by.append(seen)
                else:
                    self._before[graph] = seen
            return returned

        return call

    def count_left_out(self, nodes: Collection[Any], outside: Collection[Any]) -> None:
        """Count what autograd holds behind `nodes`, the results of the model, for code after the last of its planned graphs."""
        alive = [run.seen for run in self.forward_runs if run.alive]
        left_out = find_left_out(alive, nodes, outside, self._add_recomputed) if self.learning and alive else None
        if left_out is not None:
            alive[-1].followed_by.append(left_out)

    def _add_recomputed(self, left_out: PassStorages) -> None:
        """Count what a backward pass that is not planned has saved again, beside the graphs that wait for theirs now."""
        waiting = [run for run in self.forward_runs if run.alive]
        for run in waiting[-1:] or self.forward_runs[:1]:  # none if another step has begun
            run.seen.followed_by.append(left_out.shrink(0 if waiting else run.kept_bytes))

    def _collect_storages(self, inputs: Iterable[object]) -> PassStorages:
        """Return the storages that are known before a pass of a planned graph."""
        found = PassStorages.of(inputs, outside=get_outside())
        found.held.update(collect_storages(list_model_tensors()))
        for seen in self._before.values():
            found.hold(seen)
        return found

    def _plan_again(self, graph: PlannedGraph) -> None:
        """Plan `graph` for the same room as before, with copies of what changed between its passes, and gradients as they lie."""
        before, old = graph.captured, graph.schedule
        peak_bytes = max(simulate(before.graph, old).peak_bytes, graph.room_bytes)
        _read_changes(graph)
        if graph.provisional:
            graph.room_bytes = UNLIMITED_BYTES  # its plan is another now
            return
        captured = graph.captured.graph
        try:
            if all(len(step) == 1 for step in self._known if graph in step):
                schedule = self._solve(captured, peak_bytes)
            else:
                rest_bytes = max(0, peak_bytes - captured.static_bytes - count_kept_bytes(captured, old))
                schedule = self.solve_leaving(graph, peak_bytes, rest_bytes, old, self._host_bytes)
            fits = simulate(captured, schedule).peak_bytes <= peak_bytes
        except (InfeasibleError, LimitError):
            if graph.captured.copied != before.copied:
                raise
            fits = False
        if fits or graph.captured.copied != before.copied:
            graph.schedule = schedule
            return
        graph.captured = before
        warn_caller(_NO_ROOM_FOR_LAYOUTS.format(graph.rounding))

    def _end_step(self) -> None:
        runs, self.forward_runs = self.forward_runs, []
        for graph, schedule in self._replaced.items():
            graph.schedule = schedule
            graph.copy_inputs(0)
        self._replaced = {}
        step = tuple(run.graph for run in runs)
        if self._is_partly_seen:
            self._unseen[step] = _OBSERVED
        elif step in self._known and self.learning:
            observed = {other: n - (other[0] is step[0]) for other, n in self._unseen.items()}
            self._unseen = {other: n for other, n in observed.items() if n}
        elif not self._following:
            self._unseen.pop(step, None)
            seen = [run.seen for run in runs]
            whole = self.compute_whole_bytes(step, seen)
            known = _KnownStep(seen, whole, whole - count_bytes_beside_requests(seen))
            alone = len(runs) == 1 and not seen[0].followed_by
            self._warn_of_peak(runs, whole)
            for graph in dict.fromkeys(step):
                _read_changes(graph)
            with self.create_stages() as stages:
                activity = "" if alone else f"planning {len(runs)} graphs together"
                with stages.run_stage(Stage.SOLVE, activity):
                    try:
                        self._plan_together(step, known)
                    except InfeasibleError:
                        changed = [graph for graph in step if graph.read_as_results()]
                        if not changed:
                            raise
                        warn_caller(_NO_ROOM_FOR_LAYOUTS.format(changed[0].rounding))
                        self._plan_together(step, known)
                stages.finish(self._describe_plans(step, seen) + ("" if alone else f", {len(runs)} graphs"))
        if self._slab is not None and step in self._known:
            self._fit_arena(runs, self._known[step])

    def _warn_of_peak(self, runs: Sequence[_ForwardRun], whole: int) -> None:
        """Warn if a step whose graphs were not known has exceeded the budget."""
        plans = [(run.graph.captured.graph, run.schedule) for run in runs]
        most = compute_peak_bytes(plans, [run.seen for run in runs])
        if most > whole:
            warn_caller(
                f"the first step took {format_bytes(most)}, more than its budget of {format_bytes(whole)}, because the "
                "order of its graphs was not known yet: from now on they are planned together",
            )

    def _plan_together(self, step: _Step, known: _KnownStep) -> None:
        """Plan the graphs of a step together, and with those of known steps that have a graph of it; then it is known too."""
        self._known[step], whole = known, known.planned_bytes
        steps = self._list_steps_with(step)
        try:
            if len(step) == len(steps) == 1 and not known.seen[0].followed_by:
                self._plan_alone(step[0], whole - compute_bytes_of_others(known.seen, 0, []))
                return
            together = self._build_together(steps, self._compute_room(step, whole, alone=False))
            together.plan()
            self._fit_reserved(steps, whole)
            together.copy_inputs()
        except (InfeasibleError, LimitError):
            del self._known[step]
            raise

    def _list_steps_with(self, step: _Step) -> list[_Step]:
        """Return the known steps that share a graph with `step`, or with one of these, which comes first."""
        return list(walk([step], lambda one: (other for other in self._known if not set(one).isdisjoint(other))))

    def _plan_alone(self, graph: PlannedGraph, room: int) -> None:
        """Plan the only graph of a step within `room` bytes; its provisional plan stays if nothing better is found in time."""
        try:
            graph.schedule = self._solve(graph.captured.graph, room, self.memory)
        except (InfeasibleError, LimitError):
            if self.memory is not CountedMemory.ALLOCATED or not graph.provisional or graph.room_bytes > room:
                raise
            graph.schedule = graph.schedule
        if self.memory is CountedMemory.ALLOCATED:
            graph.room_bytes = room

    def _build_together(self, steps: Sequence[_Step], whole: int) -> JointPlanning:
        return JointPlanning(
            [(step, self._known[step].seen) for step in steps],
            whole,
            self.solve_leaving,
            host_bytes=self._host_bytes,
            limit_s=self.settings.time_limit_s,
        )

    def _fit_reserved(self, steps: Sequence[_Step], whole: int) -> None:
        """Plan the graphs of steps for less memory if they reserve more than the budget; warn if no such plans are found."""
        if self.memory is CountedMemory.ALLOCATED:
            return
        order = tuple(dict.fromkeys(graph for step in steps for graph in step))
        first = self._compute_room(order, whole, alone=False), {graph: graph.schedule for graph in order}
        solve, measure = partial(self._replan, steps, order), partial(self._measure, steps)
        (_, least), least_bytes = fit(first, solve, measure, Bracket(whole), allocated=itemgetter(0), tries=_FITS)
        for graph, schedule in least.items():
            if graph.schedule is not schedule:
                graph.schedule = schedule
        said = (
            f"the {len(steps[0])} graphs of the model reserve {format_bytes(least_bytes)} with a budget of {format_bytes(whole)}"
        )
        _log.info("%s, according to the model of PyTorch's allocator", said)
        if least_bytes > whole:
            warn_caller(
                f"{said}, according to the model of PyTorch's allocator: no plans that reserve less were found. Raise the "
                f"budget, let it count only tensors (memory={CountedMemory.ALLOCATED.value!r}), or remove the graph breaks "
                "(TORCH_LOGS=graph_breaks shows them)",
            )

    def _replan(self, steps: Sequence[_Step], order: _Step, budget: Bytes) -> tuple[int, dict[PlannedGraph, Schedule]]:
        """Plan the graphs of steps together; return the allocated bytes that they were planned for, and their schedules."""
        self._build_together(steps, budget.size_bytes).plan()
        return budget.size_bytes, {graph: graph.schedule for graph in order}

    def _measure(self, steps: Sequence[_Step], found: tuple[int, dict[PlannedGraph, Schedule]]) -> int:
        """Return the most bytes that a step reserves by the schedules that were found."""
        return max(
            self._predict_reserved(step, self._known[step].seen, [(graph.captured.graph, found[1][graph]) for graph in step])
            for step in steps
        )

    def _fit_arena(self, runs: Sequence[_ForwardRun], budget: _KnownStep) -> None:
        """Plan the graphs of a step for less memory if their arena exceeds the budget, as there are gaps between addresses."""
        arena = runs[0].graph.arena
        assert arena is not None
        arena.budget_bytes = budget.requested_bytes
        over_bytes = (arena.step_bytes or 0) - budget.requested_bytes
        if over_bytes <= 0:
            return
        if len(runs) == 1:
            graph = runs[0].graph
            captured = graph.captured.graph
            graph.schedule = self._solve(captured, simulate(captured, graph.schedule).peak_bytes - over_bytes)
            return
        try:
            self._lower(runs, budget, max(over_bytes, 2 * budget.less_bytes))
        except InfeasibleError:
            try:
                self._lower(runs, budget, over_bytes)
            except InfeasibleError as error:
                raise InfeasibleError(
                    f"in an arena the graphs of the model take {format_bytes(over_bytes)} more than the budget, and no plans "
                    f"that need this much less were found: raise the budget, or leave out arena=True ({error})"
                ) from error

    def _lower(self, runs: Sequence[_ForwardRun], budget: _KnownStep, less_bytes: int) -> None:
        """Plan the graphs of a step together for `less_bytes` less than before."""
        steps = self._list_steps_with(tuple(run.graph for run in runs))
        self._build_together(steps, budget.planned_bytes - less_bytes).plan()
        budget.planned_bytes -= less_bytes
        budget.less_bytes = less_bytes

    def solve_leaving(
        self, graph: PlannedGraph, budget_bytes: int, rest_bytes: int, known: Schedule, host_bytes: int
    ) -> Schedule:
        """Return a schedule within `budget_bytes` that leaves `rest_bytes` of it free between the passes, like `known`.

        It uses at most `host_bytes` of host memory.
        """
        captured = graph.captured.graph
        roomy = add_rest(set_host_bytes(captured, host_bytes), graph.tangents, rest_bytes)
        try:
            schedule = roomy.map_back(self._solve(roomy.graph, budget_bytes))
        except (InfeasibleError, LimitError):
            return known
        allowed = max(budget_bytes - captured.static_bytes - rest_bytes, count_kept_bytes(captured, known))
        return schedule if count_kept_bytes(captured, schedule) <= allowed else known


_MORE_GRAPHS = (
    "this step calls more graphs of the model than the steps before, whose plans leave no room for them: it exceeds the budget "
    "of {}. If another one follows soon, it runs by plans that keep as little as they can, and is planned for then"
)
_NO_ROOM_FOR_LAYOUTS = (
    "no plan that fits reads gradients of results in layouts other than the results': sums over them may differ from eager "
    "PyTorch's in the last bit ({}). Raise the budget"
)


def _read_changes(graph: PlannedGraph) -> None:
    """Let plans of `graph` read gradients as they lie, and count copies of inputs that were written between its passes."""
    graph.read_laid_out()
    if graph.changed:
        names = graph.format_names(graph.changed)
        graph.count_copies()
        warn_caller(f"planned again: {names} changed between forward and backward pass, so the plan keeps copies")


def _release(device: torch.device) -> None:
    if device.type == "cuda":  # whose allocator keeps what is free
        release_unused(device)


def _compute_eager_peak_bytes(graphs: Sequence[Graph], runs: Sequence[PassStorages]) -> int:
    """Return the peak of the allocated bytes in a step that runs its graphs as eager PyTorch does."""
    kept = [count_kept_bytes(graph, build_keep_everything(graph)) for graph in graphs]
    peaks = [summarize(graph).keep_everything_peak_bytes for graph in graphs]
    most = max(peak + compute_bytes_of_others(runs, i, kept) for i, peak in enumerate(peaks))
    return max(most, compute_peak_of_unplanned(runs, kept))


def _compute_auto_bytes(inputs: Sequence[object], model: Sequence[torch.Tensor]) -> int:
    """Return the bytes of the device that a model may use, with room for AdamW's state, because the optimizer is not known."""
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    trained = {id(t): t for t in (*model, *tensors) if t.requires_grad and t.is_leaf}
    gradients = [t.grad for t in trained.values() if t.grad is not None]
    state_bytes = OPTIMIZERS["adamw"].copies * sum(t.nbytes for t in trained.values())
    return compute_auto_budget_bytes(tensors[0].device, (*model, *gradients), tensors, other_static_bytes=state_bytes)
