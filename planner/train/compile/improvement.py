"""Better plans for a step while it trains: solved in a separate process, swapped in between two steps.

The first steps are timed op by op, and the program is solved again for these times, from the schedule and the windows that are
there. A plan keeps the times, the bound and the gap that were proved together until that solve has proved as much for the new
ones: with new times alone, its time could only be compared with keeping everything. Only the predicted time of a step is
corrected at once: it was 1.4 times the measured one until the solve ended. If the plan was found in a moment, the new solve
begins between two steps, because a short run ends before a process has started, and takes no longer than that start. It took up
to two seconds of the training thread before. What is left is solved in a process, also if there is little to gain, unless the run
is a short trial. The first step of a plan without measured peak is observed; a plan over the budget is taken back. Bits do not
depend on which plan runs.

Where memory is tight and no addresses were found soon, a step begins in no arena, and the first solve looks for a plan in one.
Before, a step waited for it: 17 s for ResNet-50 at half its peak. So it begins while the allocator of arenas is being compiled,
and moves once it is there. Op times of the steps until then are not taken for costs: they include pages that an arena keeps.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any
from weakref import WeakSet

from planner.capture.lowering.lower import Capture
from planner.graphs.errors import BudgetError, InfeasibleError, LimitError
from planner.graphs.ir import Graph
from planner.graphs.units import format_bytes
from planner.measure.observation import OpTimer, PeakWatch
from planner.native.library import is_being_compiled
from planner.plans.background import BackgroundSolve, SolveJob, solve_here
from planner.plans.eager import EagerComparison
from planner.plans.plan import Plan
from planner.plans.search import StepSearch
from planner.plans.solve import judge_on
from planner.runtime.arena import Arena
from planner.runtime.cuda.device_arena import DeviceArena
from planner.runtime.executor import Executor
from planner.settings.budget import Bytes
from planner.settings.counted_memory import CountedMemory
from planner.settings.option_settings import apply_recorded_options
from planner.solvers.result import OPTIMAL_GAP, SOLVED, is_within
from planner.solvers.tolerance import Tolerance
from planner.train.distributed.ranks import SingleProcess

_TIMED_STEPS = 2  # and one more
_GAIN = 0.002  # of the step: gain that a plan must have to be swapped in, during the solve and at its end
_REPAID_STEPS = 10  # in which such a gain must repay the swap; later, in as many steps as have been trained
_START_S = 0.5  # cost of the start of a process: a plan that took no longer is solved again between two steps, for as long
# A process is started at once if a step loses this much to suboptimality, proved or possible; otherwise once the total loss
# is as large as the cost of the start, or after as many steps, for the proof.
_LOST_AT_ONCE_S, _TRIAL_STEPS = 0.005, 10
_POLL_S = 0.2
_SOLVES: WeakSet[BackgroundSolve] = WeakSet()  # started in this process
_FIRST_SHARED = 2  # step before which several processes first exchange their state


class _Awaited(Enum):
    """What a step that is to run in an arena, and runs in none so far, waits for."""

    PLAN = auto()  # in an arena, which is searched
    ALLOCATOR = auto()  # of arenas, which is being compiled


@dataclass(frozen=True, slots=True)
class PlanSwap:
    """A plan that replaces another.

    Attributes:
        graph: the graph with the costs that it was solved with.
        reason: in words, for ``PlannedStep.history``.
    """

    plan: Plan
    executor: Executor
    graph: Graph
    reason: str


class Improvement:
    """The search for better plans for a step, which swaps them in.

    If several processes train, one of them finds plans for all; each has an object of this class.

    Attributes:
        plan: the current plan, with all that is known of it, at the costs that its bound holds for.
    """

    def __init__(
        self,
        captured: Capture,
        plan: Plan,
        executor: Executor,
        *,
        solved_bytes: int,
        search: StepSearch,
        make_executor: Callable[[Capture, Plan], Executor],
        finds: bool,
    ) -> None:
        """Start with `plan`, which `executor` runs.

        Args:
            captured: the profiled step.
            solved_bytes: the budget that it was solved for; below the plan's budget if its peak was above its prediction.
            finds: True if better plans are searched for here, and not by another process.
        """
        self.plan = plan
        self._captured, self._executor = captured, executor
        self._solved_bytes, self._search, self._make_executor = solved_bytes, search, make_executor
        self._solve: BackgroundSolve | None = None
        self._candidate: Plan | None = None
        self._steps, self._due = 0.0, 0.0  # steps so far, and those after which the candidate repays its swap
        self._time_s, self._bound_s = plan.time_s, plan.bound_s  # of the current plan, at the latest costs
        self._awaited = self._find_awaited(plan)
        self._is_solved = plan.status in SOLVED and self._awaited is not _Awaited.PLAN  # at the latest costs
        # The order of ops stays if it was preferred to program order, or a solve had its time.
        self._is_settled = self._is_solved or bool(plan.settings.reordered)
        self._timer: OpTimer | None = None
        self._before: PlanSwap | None = None  # the plan to return to
        if finds and not executor.devices.channels:  # otherwise op times would include waits for copies
            self._timer = OpTimer(executor, steps=_TIMED_STEPS)
        self._watch = PeakWatch(executor) if plan.measured_peak_bytes is None else None

    def advance(self, steps: int) -> Plan | None:
        """Return a plan that is to replace the current one after so many trained `steps`, if one has been found."""
        self._steps = steps
        self._take_times()
        others = any(solve.is_running for solve in _SOLVES)  # for other sizes or models: one solve at a time
        if not self._is_solved and self._solve is None and not others and self._is_worth_it(steps):
            self._start()
        if self._awaited is _Awaited.ALLOCATOR and self._watch is None and not is_being_compiled():
            self._awaited = None
            return self.plan
        return self._take_better()

    def wait(self, seconds: float | None) -> Plan | None:
        """Wait until the solve ends, at most `seconds`; return a plan as ``advance`` does."""
        self._steps = math.inf  # who waits wants the best plan
        self._take_times()
        if not self._is_solved and self._solve is None:
            self._start()
        until = math.inf if seconds is None else time.monotonic() + seconds
        while self._solve is not None and time.monotonic() < until:
            self._receive(min(_POLL_S, max(0.0, until - time.monotonic())))
        return self._take_better()

    def adopt(self, plan: Plan) -> PlanSwap:
        """Replace the current plan by `plan`, and observe the peak of its first step."""
        gain = 1 - (1 + plan.overhead) / (1 + self.plan.overhead)
        executor = self._make_executor(self._captured, plan)
        moves = executor.arena is not None and self._executor.arena is None
        why = "in an arena, which keeps its pages" if moves else f"{gain:.1%} faster"
        self._time_ops_of(executor)
        self._before = PlanSwap(self.plan, self._executor, self._captured.graph, "the peak of the next one was over the budget")
        self.plan = replace(
            set_arena(plan, executor.arena),
            budget_bytes=self.plan.budget_bytes,
            measured_peak_bytes=None,
            eager=_remove_planned_time(self.plan.eager),
        )
        self._time_s, self._bound_s = plan.time_s, plan.bound_s
        executor.start_training(self.plan.budget_bytes, check_writes=self._executor.check_writes)
        self._executor, self._watch = executor, PeakWatch(executor)
        self._awaited = self._find_awaited(plan)
        return PlanSwap(self.plan, executor, self._captured.graph, f"{why}, found during training: {plan.proof}")

    def compute_over_bytes(self) -> int | None:
        """Return by how much the peak of the first step of a plan was over the budget; None until it is known."""
        watch = self._watch
        if watch is None or not watch.done:
            return None
        self._watch = None
        if watch.peak_bytes is None:
            return None
        self.plan = set_arena(replace(self.plan, measured_peak_bytes=watch.peak_bytes), self._executor.arena)
        return self.plan.compute_needed_bytes(watch.peak_bytes) - self.plan.budget_bytes

    def take_back(self, over_bytes: int) -> PlanSwap:
        """Return to the plan before the one that exceeded the budget; lower the solved budget by `over_bytes`."""
        if self._watch is not None:
            self._watch.stop()
        before, self._watch, self._before = self._before, None, None
        self._solved_bytes -= over_bytes
        self._end_solve()
        self._is_solved = self._is_settled = False
        if before is None:
            return self._replace_first_plan(self.plan.budget_bytes + over_bytes)
        self._time_ops_of(before.executor)
        self.plan, self._executor = before.plan, before.executor
        self._judge()
        return before

    def _replace_first_plan(self, needed_bytes: int) -> PlanSwap:
        try:
            found = self._search.find_first_plan(self._captured.graph, Bytes(self._solved_bytes))
        except (BudgetError, LimitError) as error:
            over = describe_over_budget(self.plan, needed_bytes, self.plan.budget_bytes)
            if self._search.chose_arena:
                self._search = self._search.leave_arena(f"in one {over}")
                self._solved_bytes = self.plan.budget_bytes
                return self._replace_first_plan(needed_bytes)
            if isinstance(error, LimitError):
                raise
            raise InfeasibleError(f"{over}; no plan is found that needs that much less: raise the budget") from error
        swap = replace(self.adopt(found), reason="the peak of the first one was over the budget")
        self._before = None
        return swap

    def follow(self, executor: Executor) -> None:
        """Observe `executor`, which runs the current plan with other numbers from now on."""
        self._time_ops_of(executor)
        if self._watch is not None:
            self._watch.stop()
            self._watch = PeakWatch(executor)
        self._executor = executor

    def stop(self) -> None:
        """Stop the search."""
        self._end_solve()
        self._is_solved = True
        for observer in (self._timer, self._watch):
            if observer is not None and not observer.done:
                observer.stop()
        self._timer = self._watch = None

    def _find_awaited(self, plan: Plan) -> _Awaited | None:
        """Return what the executor of `plan` waits for; None if it is in an arena, or is to be in none."""
        if not self._search.chose_arena or self._executor.arena is not None:
            return None
        if plan.settings.no_arena is not None:
            return _Awaited.PLAN
        return _Awaited.ALLOCATOR if is_being_compiled() else None

    def _is_worth_it(self, steps: int) -> bool:
        """Return True if the time that the steps so far have lost, or may have, justifies a process."""
        if self._awaited is _Awaited.PLAN:
            return True
        lost_s = self._time_s - (self.plan.graph.time_s if self._bound_s is None else self._bound_s)
        return steps >= _TRIAL_STEPS or lost_s >= _LOST_AT_ONCE_S or lost_s * steps >= _START_S

    def _start(self) -> None:
        self._end_solve()
        try:
            self._solve = BackgroundSolve(self._build_job())
            _SOLVES.add(self._solve)
        except OSError:  # no process can be started: the current plan stays
            self._is_solved = True

    def _solve_here(self) -> None:
        """Solve again between two steps, for the gap that is shown; a process goes on if the result is above the tolerance."""
        job = self._build_job()
        enough = job.settings.tolerance.first
        shown = Tolerance.of(enough if self.plan.gap is None else min(enough, self.plan.gap))
        found = solve_here(replace(job, settings=replace(job.settings, tolerance=shown)), _START_S).plan
        if found is not None:
            self._candidate, self._due = replace(found, settings=replace(found.settings, tolerance=enough)), 0.0
            self._is_solved = self._candidate.status in SOLVED
            self._is_settled |= self._is_solved

    def _build_job(self) -> SolveJob:
        """Return the next solve, in the order of the current plan if that is settled."""
        keeps_order = self._is_settled and (self._offered.plain or not self.plan.settings.reordered)
        return self._search.build_job(self._captured.graph, self._solved_bytes, self.plan, keeps_order=keeps_order)

    def _end_solve(self) -> None:
        if self._solve is not None:
            self._solve.stop()
        self._solve = self._candidate = None

    def _receive(self, most_s: float) -> None:
        assert self._solve is not None
        if (found := self._solve.receive(most_s)) is not None:
            self._candidate, self._due = found, 0.0
        if (ended := self._solve.ended) is not None:
            self._is_settled |= ended.plan is not None
            self._solve, self._is_solved = None, True
            if self._awaited is _Awaited.PLAN and self._candidate is None:
                self._leave_arena(ended.failure)

    def _leave_arena(self, why: str) -> None:
        """Look for plans in no arena from now on."""
        self._search = self._search.leave_arena(why.partition("\n")[0])
        self._awaited, self._is_solved = None, self.plan.status in SOLVED

    def _take_better(self) -> Plan | None:
        """Return the plan that the solve has found, if it is to replace the current one; otherwise take over what it proves.

        While the current plan's gap was proved at other costs, a plan with a larger one waits for the end of the solve.
        """
        if self._solve is not None:
            self._receive(0.0)
        found = self._candidate
        if found is None or self._watch is not None or self._steps < self._due:  # one swap at a time
            return None
        if not (self._is_shown(found) or self._is_solved or self._awaited is _Awaited.PLAN):
            return None
        self._candidate = None
        now = self._add_proof(found)
        if self._awaited is _Awaited.PLAN:
            return self._take_in_arena(found, now)
        gain = 1 - found.time_s / now.time_s
        lacks_proof = not _is_as_close(now, self.plan) and (now.gap is None or now.gap > OPTIMAL_GAP)
        # A plan that is as fast may have other first executions: its bound does not hold for the current one.
        proves_more = self._is_solved and gain >= 0 and lacks_proof
        fits = self._executor.earlier_gradients.fit_with(
            apply_recorded_options(self._captured.graph, found.settings), found.schedule
        )
        alike = self._search.any_rounding or is_rounded_alike(self._captured.graph, self.plan, found)
        if (gain >= _GAIN or proves_more) and fits and alike:
            due = 0.0 if proves_more else self._count_repaying_steps(now.time_s - found.time_s)
            if due <= max(self._steps, _REPAID_STEPS):
                self.plan = now
                return found
            self._candidate, self._due = found, due
        self._bound_s = now.bound_s
        if self._is_shown(now):
            self.plan = now
        return None

    def _take_in_arena(self, found: Plan, now: Plan) -> Plan | None:
        """Return `found`, the first plan in an arena, unless steps by the plan `now`, in none, take less time as measured."""
        timer = self._timer
        if timer is not None and timer.done:
            times_s = timer.compute_times_s()
            if found.time_s > math.fsum(times_s.get(op, 0.0) for op in self._executor.schedule.computed):
                self._leave_arena("steps are faster without one")
                self._end_solve()
                return None
        self.plan = now
        same_order = _list_first_executions(found) == _list_first_executions(now)
        return replace(found, bound_s=now.bound_s) if same_order else found

    def _count_repaying_steps(self, gain_s: float) -> float:
        """Return the steps after which a plan that is faster by `gain_s` has repaid its swap: both passes are compiled twice."""
        return 2 * self._executor.compile_s / gain_s

    @property
    def graph(self) -> Graph:
        """The graph at the latest costs, without the options that are added when it is solved."""
        return self._captured.graph

    @property
    def _offered(self) -> Graph:
        """The graph at the latest costs, with the options of the plan."""
        return apply_recorded_options(self.graph, self.plan.settings)

    def _judge(self) -> None:
        """Compute time and bound of the current plan at the latest costs; show the plan with them if its proof is no worse."""
        judged = judge_on(self._offered, self.plan)
        same = judged.graph == self.plan.graph
        self._time_s, self._bound_s = judged.time_s, self.plan.bound_s if same else judged.bound_s
        now = replace(judged, bound_s=self._bound_s)
        self.plan = now if self._is_shown(now) else replace(self.plan, corrected_s=now.predicted_s)

    def _is_shown(self, plan: Plan) -> bool:
        """Return True if `plan`, at the latest costs, may be shown in place of the current one: its proof is no worse."""
        return plan.graph == self.plan.graph or _is_as_close(plan, self.plan)

    def _add_proof(self, found: Plan) -> Plan:
        """Return the current plan at the latest costs, for which `found` was solved, with its bound if that holds for both."""
        now = self.plan if found.graph == self.plan.graph else judge_on(self._offered, self.plan)
        bounds = [self._bound_s, found.bound_s if _list_first_executions(found) == _list_first_executions(now) else None]
        known = [min(bound_s, now.time_s) for bound_s in bounds if bound_s is not None]
        settings = replace(now.settings, tolerance=found.settings.tolerance)
        return replace(now, bound_s=max(known, default=None), settings=settings, seconds=found.seconds, ended=found.ended)

    def _time_ops_of(self, executor: Executor) -> None:
        """Restart the timing of ops with `executor`, unless their times have been taken."""
        if self._timer is not None:
            self._timer.stop()
            self._timer = OpTimer(executor, steps=_TIMED_STEPS)

    def _take_times(self) -> None:
        """Correct the costs once the timed steps are over, and solve again with them."""
        timer = self._timer
        if timer is None or not timer.done or self._awaited is not None:
            return
        self._timer = None
        self._captured = replace(self._captured, graph=timer.correct_costs(self._captured.graph))
        self._end_solve()
        self._judge()
        self._is_solved = self._time_s <= self._offered.time_s
        if not self._is_solved and self.plan.seconds <= _START_S:
            self._solve_here()


class Consultation:
    """The decision between two steps on the next plan, the same on all processes that train a model.

    A single process decides before every step. Several processes exchange their state before steps 2, 4, 8 and so on.

    Attributes:
        wrapped: returns an executor as the training loop calls it.
    """

    def __init__(self, ranks: SingleProcess, improvement: Improvement, wrapped: Callable[[Executor], Callable[..., Any]]) -> None:
        self.improvement, self.wrapped = improvement, wrapped
        self._ranks, self._steps = ranks, 0

    @property
    def plan(self) -> Plan:
        """The current plan."""
        return self.improvement.plan

    def begin_step(self) -> PlanSwap | None:
        """Record that a step begins; return the plan to run it by if the plan changes."""
        self._steps += 1
        steps = self._steps
        if not self._ranks.is_alone and (steps < _FIRST_SHARED or steps & (steps - 1)):
            return None
        return self._consult(lambda: self.improvement.advance(steps))

    def wait(self, seconds: float | None) -> PlanSwap | None:
        """Wait for the end of the solve, at most `seconds`; return the best plan if it differs from the current one."""
        return self._consult(lambda: self.improvement.wait(seconds))

    def _consult(self, find: Callable[[], Plan | None]) -> PlanSwap | None:
        over = [over_bytes for over_bytes in self._ranks.gather(self.improvement.compute_over_bytes()) if over_bytes is not None]
        if over and max(over) > 0:
            return self.improvement.take_back(max(over))
        found, in_use = self._ranks.share(lambda: (find(), self.improvement.plan))
        if not self._ranks.is_alone:  # measured costs are shared by all processes; the peak is per process
            measured = self.improvement.plan.measured_peak_bytes
            self.improvement.plan = replace(in_use, measured_peak_bytes=measured)
        return None if found is None else self.improvement.adopt(found)


def describe_over_budget(plan: Plan, needed_bytes: int, budget_bytes: int) -> str:
    """Return the message that `plan` needs more than the budget by its measured peak (``Plan.needed_bytes``)."""
    measured = (
        "the measured peak is" if plan.memory is CountedMemory.ALLOCATED else "by the measured peak, the memory reserved is"
    )
    return (
        f"{measured} {format_bytes(needed_bytes)}, over the budget of {format_bytes(budget_bytes)}, though "
        f"{format_bytes(plan.predicted_bytes)} was predicted: some op takes memory that its profile did not show, a CUDA graph "
        "keeps segments that its tensors do not fill, or addresses in an arena leave gaps"
    )


def set_arena(plan: Plan, arena: Arena | DeviceArena | None) -> Plan:
    """Return `plan` with the memory of the arena that its step runs in; without if it runs in none, or that is not known."""
    if arena is None:
        return replace(plan, arena_bytes=None, outside_arena_bytes=None)
    return replace(plan, arena_bytes=arena.size_bytes, outside_arena_bytes=arena.outside_bytes)


def _is_as_close(plan: Plan, other: Plan) -> bool:
    """Return True if the gap of `plan` is no larger than that of `other`."""
    return other.gap is None or is_within(plan.time_s, plan.bound_s, other.gap)


def _list_first_executions(plan: Plan) -> Sequence[int]:
    """Return the ops of a plan in the order of their first executions, for which its bound holds."""
    return tuple(dict.fromkeys(op for op in plan.schedule.computed if op < plan.graph.ops))


def _remove_planned_time(eager: EagerComparison | None) -> EagerComparison | None:
    """Return the comparison without the time of the planned step, which was measured for another plan."""
    return None if eager is None else replace(eager, planned_time_s=0.0, spread=0.0)


def is_rounded_alike(graph: Graph, one: Plan, other: Plan) -> bool:
    """Return True if two plans give the same bits: the same rounding ops, in the same order among alternatives."""
    return _list_rounding_ops(graph, one) == _list_rounding_ops(graph, other)


def _list_rounding_ops(graph: Graph, plan: Plan) -> Sequence[str]:
    offered = apply_recorded_options(graph, plan.settings)
    rounding = {op.id for op in offered.ops if op.optional and not op.exact}
    replaced = {p for op in rounding for p in offered.ops[op].replaces}
    return [offered.ops[op].name for op in plan.schedule.computed if op in rounding or op in replaced]
