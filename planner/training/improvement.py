"""Better plans for a step while it trains: solved in a process of its own, swapped in between two steps.

The first steps are timed op by op, in context; where costs differ from those that were measured alone, the solve is repeated
with the corrected ones. The first step of a plan that is swapped in is watched: one whose peak is over the budget is taken back.
Bits do not depend on which plan runs.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from graphs.capture.lower import Capture
from graphs.eager import EagerComparison
from graphs.ir import Graph
from graphs.plan import Plan
from planner.background import BackgroundSolve
from planner.choices import with_recorded
from planner.runtime.executor import Executor
from planner.runtime.observation import OpTimer, PeakWatch
from planner.solving import judged_on
from planner.training.search import Search

_TIMED_STEPS = 3
_GAIN = 0.002  # of the step: what a plan must be faster by to be swapped in while the solve goes on or at its end
# A process is started at once where so much is lost in a step to what is not optimal yet, or may not be; else once as much
# has been lost in all as starting it costs.
_LOST_AT_ONCE_S, _LOST_IN_ALL_S = 0.005, 0.5


@dataclass(frozen=True, slots=True)
class Swap:
    """A plan that takes the place of another.

    Attributes:
        plan, executor: what runs from now on.
        graph: with the costs that it was solved with.
        reason: in words, for ``PlannedStep.history``.
    """

    plan: Plan
    executor: Executor
    graph: Graph
    reason: str


class Improvement:
    """Looks for a better plan for one step.

    Attributes:
        plan: the one in use, as far as is known of it by now.
    """

    def __init__(
        self,
        captured: Capture,
        plan: Plan,
        executor: Executor,
        *,
        solved_bytes: int,
        search: Search,
        make_executor: Callable[[Capture, Plan], Executor],
    ) -> None:
        """Look for a better plan than `plan`, which `executor` runs.

        Args:
            captured: the profiled step.
            solved_bytes: the budget that it was solved for; below that of the plan where its peak was above its prediction.
            make_executor: an executor for a plan.
        """
        self.plan = plan
        self._captured, self._executor = captured, executor
        self._solved_bytes, self._search = solved_bytes, search
        self._make_executor = make_executor
        self._device = executor.device
        self._steps = 0
        self._solve: BackgroundSolve | None = None
        self._candidate: Plan | None = None
        self._is_solved = plan.status == "optimal"  # with the costs that are known
        self._timer: OpTimer | None = None
        self._watch: PeakWatch | None = None
        self._before: Swap | None = None  # to go back to
        if executor.channels is None:  # the time of an op would include waiting for copies
            self._timer = OpTimer(executor, self._device, steps=_TIMED_STEPS)

    def before_step(self) -> Swap | None:
        """Note that a step begins; return the plan that it and those after it are to run by, where that changes."""
        self._steps += 1
        if (swap := self._checked_peak()) is not None:
            return swap
        self._take_times()
        if not self._is_solved and self._solve is None and self._is_worth_it():
            self._start()
        return self._better(0.0)

    def wait(self, seconds: float | None) -> Swap | None:
        """Wait until the solve ends, or for so long; return the best plan, where it is another than before."""
        self._take_times()
        if not self._is_solved and self._solve is None:
            self._start()
        until = math.inf if seconds is None else time.monotonic() + seconds
        while self._solve is not None and time.monotonic() < until:
            self._receive(min(0.2, max(0.0, until - time.monotonic())))
        return self._better(0.0)

    def stop(self) -> None:
        """Look for nothing any more."""
        self._end_solve()
        self._is_solved = True
        for observer in (self._timer, self._watch):
            if observer is not None and not observer.done:
                observer.stop()
        self._timer = None

    def _is_worth_it(self) -> bool:
        """Return whether what the steps so far have lost, or may have, pays for a process."""
        least_s = self.plan.graph.time_s if self.plan.bound_s is None else self.plan.bound_s
        lost_s = self.plan.time_s - least_s
        return lost_s >= _LOST_AT_ONCE_S or lost_s * self._steps >= _LOST_IN_ALL_S

    def _start(self) -> None:
        self._end_solve()
        try:
            self._solve = BackgroundSolve(self._search.job(self._captured.graph, self._solved_bytes))
        except OSError:  # no process can be started: the plan that is there is good all the same
            self._is_solved = True

    def _end_solve(self) -> None:
        if self._solve is not None:
            self._solve.stop()
        self._solve = self._candidate = None

    def _receive(self, most_s: float) -> None:
        assert self._solve is not None
        self._candidate = self._solve.receive(most_s) or self._candidate
        if self._solve.ended is not None:
            self._solve, self._is_solved = None, True

    def _better(self, most_s: float) -> Swap | None:
        """Return the plan that the solve has found, where it is to take the place of the one in use."""
        if self._solve is not None:
            self._receive(most_s)
        plan, self._candidate = self._candidate, None
        if plan is None or self._watch is not None:
            self._candidate = plan  # one plan after the other
            return None
        gain = 1 - plan.time_s / self.plan.time_s
        if gain < _GAIN or not (self._search.any_rounding or rounds_alike(self._captured.graph, self.plan, plan)):
            if plan.bound_s is not None and self._is_solved and gain > -_GAIN:
                self.plan = replace(self.plan, bound_s=min(plan.bound_s, self.plan.time_s))
            return None
        return self._swapped(plan, f"{gain:.1%} faster, found beside the training")

    def _swapped(self, plan: Plan, reason: str) -> Swap:
        executor = self._make_executor(self._captured, plan)
        if self._timer is not None and not self._timer.done:
            self._timer.stop()
            self._timer = OpTimer(executor, self._device, steps=_TIMED_STEPS)
        self._before = Swap(self.plan, self._executor, self._captured.graph, "the peak of the next one was over the budget")
        self.plan = replace(plan, budget_bytes=self.plan.budget_bytes, eager=_of_another_plan(self.plan.eager))
        self._executor, self._watch = executor, PeakWatch(executor, self._device)
        return Swap(self.plan, executor, self._captured.graph, reason)

    def _checked_peak(self) -> Swap | None:
        """Note the peak of the first step of a plan; return the plan before it, where that was over the budget."""
        watch, before = self._watch, self._before
        if watch is None or not watch.done:
            return None
        self._watch = self._before = None
        if watch.peak_bytes is None:
            return None
        self.plan = replace(self.plan, measured_peak_bytes=watch.peak_bytes)
        over_bytes = watch.peak_bytes - self.plan.budget_bytes
        if over_bytes <= 0 or before is None:
            return None
        self._solved_bytes -= over_bytes
        self._end_solve()
        self._is_solved = False
        self.plan, self._executor = before.plan, before.executor
        return before

    def _take_times(self) -> None:
        """Correct the costs once the timed steps are over, and solve again with them."""
        timer = self._timer
        if timer is None or not timer.done:
            return
        self._timer = None
        names = self._executor.graph.ops
        times_s = {names[op].name: seconds for op, seconds in timer.times_s().items()}
        self._captured = replace(self._captured, graph=with_times(self._captured.graph, times_s))
        graph = with_recorded(self._captured.graph, self.plan.settings)
        self.plan = judged_on(graph, self.plan)
        self._end_solve()
        self._is_solved = self.plan.time_s <= graph.time_s


def with_times(graph: Graph, times_s: Mapping[str, float]) -> Graph:
    """Return `graph` with `times_s` by the names of ops; times of ops that were not executed are scaled as those that were."""
    known_s = math.fsum(op.time_s for op in graph.ops if op.name in times_s)
    scale = math.fsum(times_s.values()) / known_s if known_s > 0 else 1.0
    ops = tuple(replace(op, time_s=times_s.get(op.name, op.time_s * scale)) for op in graph.ops)
    return replace(graph, ops=ops, provenance={**graph.provenance, "times": "measured in training steps"})


def _of_another_plan(eager: EagerComparison | None) -> EagerComparison | None:
    """Return what a comparison says of eager PyTorch and of bits; how a plan compares that it was not made with is not known."""
    return None if eager is None else replace(eager, planned_time_s=0.0, spread=0.0)


def rounds_alike(graph: Graph, one: Plan, other: Plan) -> bool:
    """Return whether two plans make the same bits: the same ops that round, in the same order among what they stand for."""
    return _rounding(graph, one) == _rounding(graph, other)


def _rounding(graph: Graph, plan: Plan) -> Sequence[str]:
    offered = with_recorded(graph, plan.settings)
    rounding = {op.id for op in offered.ops if op.optional and not op.exact}
    replaced = {p for op in rounding for p in offered.ops[op].stands_for}
    return [offered.ops[op].name for op in plan.schedule.computed if op in rounding or op in replaced]
