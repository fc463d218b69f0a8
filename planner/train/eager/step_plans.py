"""Repeated steps of an eager loop: recognized by their ops, solved in a separate process, and run by their plans.

A step that had to evict and occurs a second time is solved. When it occurs again and needs room, it evicts what its plan has
evicted by then, in the same order; evicted tensors are recomputed when they are used. So the runtime evicts at most what the plan
evicts, and if it evicts all of that, the step fits the budget as the plan does. If an op differs from the plan, the plan of
another step with the same first ops takes over within the step, or the heuristic does. The results do not depend on it: plans
only decide what is evicted.

Steps that differ only in sizes share plans. The largest is solved first, then those for which there is no plan for a slightly
larger step. A step without a plan of its own borrows the plan of the next larger step, with the same rule. So a smaller step
evicts less, and a step that fits evicts nothing. No sizes have to be predicted.

Never imports torch.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter

from planner.graphs.errors import PlannerError
from planner.graphs.schedule import Compute, Schedule
from planner.plans.background import BackgroundSolve, SolveJob
from planner.plans.plan import Plan
from planner.settings.budget import Bytes
from planner.settings.plan import PlanSettings
from planner.train.eager.step_log import StepGraph, StepLog, build_recorded_step

_POLL_S = 0.2
_MOST_STEPS = 64  # limit on the number of different steps that are stored
_NEAR = 1.1  # steps of other sizes use a plan, and are not solved, if the planned step makes at most this many times their bytes


@dataclass(frozen=True, slots=True)
class Action:
    """An action of a plan on a storage of the step: evict it or recompute it."""

    storage: int
    evict: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A plan as the runtime follows it.

    Attributes:
        plan: the plan.
        step: the graph that it is for.
        actions: the actions before each op of the step, and at its end, in order.
    """

    plan: Plan
    step: StepGraph
    actions: tuple[tuple[Action, ...], ...]


def list_actions(step: StepGraph, schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Return the actions before each op of the step, and at its end, with which it follows a schedule.

    Storages that the program has released are not evicted, unless they were recomputed after that. Contents that were overwritten
    later are not recomputed alone, but together with the current contents: at once, while their inputs are in memory.

    Raises:
        PlannerError: the schedule does not execute the ops of the step in their order.
    """
    graph, storages = step.graph, step.storages
    found: list[list[Action | None]] = [[] for _ in range(len(graph.ops) + 1)]
    current: dict[int, int] = {}  # tensor with the current contents of each storage
    live: set[int] = set()
    recomputed: set[int] = set()  # storages that were recomputed after the program released them
    begun: dict[int, tuple[int, int]] = {}  # where first contents were recomputed: the place for current ones
    done = 0
    for scheduled in schedule.steps:
        if isinstance(scheduled, Compute):
            op = graph.ops[scheduled.op]
            if op.id > done:
                raise PlannerError(f"the schedule executes op {op.name!r} before ops that precede it in the step")
            if op.id == done:
                done += 1
                current.update((storages[t], t) for t in op.outputs)
                live.update(op.outputs)
            rewritten = {t for t, _ in op.overwrites}
            for t in (t for t in op.outputs if t not in live):
                storage = storages[t]
                if current[storage] == t:
                    place, index = begun.pop(storage, (done, len(found[done])))
                    found[place][index : index + 1] = [Action(storage, evict=False)]
                    if step.released.get(storage, math.inf) <= done:
                        recomputed.add(storage)
                elif t not in rewritten:
                    begun[storage] = done, len(found[done])
                    found[done].append(None)
            live.update(op.outputs)
        else:
            live.discard(scheduled.tensor)
            storage = storages[scheduled.tensor]
            if current[storage] == scheduled.tensor and (storage in recomputed or step.released.get(storage, math.inf) > done):
                recomputed.discard(storage)
                found[done].append(Action(storage, evict=True))
    return tuple(tuple(action for action in before if action is not None) for before in found)


@dataclass(slots=True, eq=False)
class _Seen:
    """A step that has occurred.

    Attributes:
        log: its ops.
        times: number of its occurrences.
        evicted: it has evicted tensors.
        plan: the best plan so far; None until there is one.
        solved: its solve has ended.
        failure: the reason why there is no plan.
    """

    log: StepLog
    times: int = 1
    evicted: bool = False
    plan: StepPlan | None = None
    solved: bool = False
    failure: str = ""

    def is_begun_alike(self, log: StepLog) -> bool:
        """Return True if its first ops are those of an unfinished step, with any shapes."""
        return len(log) <= len(self.log) and self.log.get_total(len(log)).structure == log.total.structure

    def compute_excess(self, log: StepLog) -> float:
        """Return the bytes that it made in as many ops as `log` has, divided by those of `log`."""
        return (self.log.get_total(len(log)).made_bytes + 1) / (log.total.made_bytes + 1)


@dataclass(slots=True)
class _Progress:
    """The progress of a plan in the current step.

    Attributes:
        plan: the plan.
        acted: the number of places (ops and the end) whose actions were taken.
        evicted: the storages that it has evicted by then and not recomputed since, in order.
    """

    plan: StepPlan
    acted: int = 0
    evicted: dict[int, None] = field(default_factory=dict)

    def advance(self, place: int) -> None:
        """Take the actions before the op at `place`, and before all earlier ops."""
        for before in self.plan.actions[self.acted : place + 1]:
            for action in before:
                self.evicted.pop(action.storage, None)
                if action.evict:
                    self.evicted[action.storage] = None
        self.acted = place + 1


class StepPlans:
    """The steps of a loop so far, their plans, and the plan of the current step.

    Attributes:
        log: the log of the current step.
        planned_steps: number of steps that followed a plan to the last op.
        left_steps: number of steps that began with a plan and continued with the heuristic, because an op differed.
        borrowed_steps: number of steps that evicted what the plan of a step of other sizes evicts.
        borrows: the current step has done so.
        has_plans: there was a plan.
        settings: settings of the solves. Ops are never reordered.
    """

    def __init__(self, budget_bytes: int, new_log: Callable[[int], StepLog]) -> None:
        """Initialize without plans; steps are solved for `budget_bytes`, and `new_log` returns a log from the bytes in memory."""
        self.budget_bytes = budget_bytes
        self._new_log = new_log
        self.settings = PlanSettings(reorder=False)
        self.planned_steps = self.left_steps = self.borrowed_steps = 0
        self.log = new_log(0)
        self.borrows = self.has_plans = False
        self._seen: dict[int, _Seen] = {}  # by the hash of all ops; the latest step is the last
        self._solving: tuple[int, StepGraph, BackgroundSolve] | None = None
        self._following: _Seen | None = None
        self._progress: _Progress | None = None  # of the followed or borrowed plan
        self._left = False

    # Steps.

    def begin(self, held_bytes: int) -> None:
        """Begin a step with `held_bytes` in memory, and follow the plan of the latest step that has one."""
        self._receive(0.0)
        self.log = self._new_log(held_bytes)
        self._left, self.borrows, self._progress = False, False, None
        self._follow(next(self._iterate_planned(), None))

    def follow_matching_plan(self) -> None:
        """If the last op differs from the plan, follow the plan of a step with the same first ops, or none."""
        if self._following is not None and not self._following.log.is_begun_as(self.log):
            self._follow(next((seen for seen in self._iterate_planned() if seen.log.is_begun_as(self.log)), None))
            self._left = self._following is None

    def advance_offered(self) -> dict[int, None]:
        """Advance to the last op, and return the storages that the plan has evicted by then, in order.

        It is the step's own plan, or one for other sizes. The caller removes what it has evicted.
        """
        if not len(self.log) or (seen := self._following or self._find_lender()) is None:
            return {}
        assert seen.plan is not None
        if self._progress is None or self._progress.plan is not seen.plan:
            self._progress = _Progress(seen.plan)
        self._progress.advance(len(self.log))
        return self._progress.evicted

    def end(self) -> None:
        """End the step: store it, and solve it if it has evicted tensors and has occurred before, with any sizes."""
        log = self.log
        if not len(log):
            return
        followed = self._following is not None and len(log) == len(self._following.log)
        self.planned_steps += followed
        self.borrowed_steps += self.borrows
        self.left_steps += not self.borrows and (self._left or (self._following is not None and not followed))
        self._progress = None
        self._follow(None)
        seen = self._seen.pop(log.total.chain, None)
        if seen is None:
            seen = _Seen(log)
        else:
            seen.times += 1
        self._seen[log.total.chain] = seen
        if len(self._seen) > _MOST_STEPS:
            self._drop_one()
        seen.evicted = seen.evicted or bool(log.evicted)
        self._start()

    # Plans.

    @property
    def plans(self) -> tuple[StepPlan, ...]:
        """The plans so far; that of the latest step is the last."""
        return tuple(seen.plan for seen in self._seen.values() if seen.plan is not None)

    @property
    def failures(self) -> tuple[str, ...]:
        """The reasons why repeated steps have no plan."""
        return tuple(seen.failure for seen in self._seen.values() if seen.failure)

    @property
    def longest_step(self) -> StepGraph | None:
        """The ended step with the most ops; None if no step has ended."""
        longest = self._find_longest()
        return None if longest is None else build_recorded_step(longest.log)

    @property
    def earlier(self) -> StepLog | None:
        """The largest earlier step with the same first ops, in sizes up to the current ones; None if there is none."""
        alike = (seen for seen in self._seen.values() if len(self.log) and seen.is_begun_alike(self.log))
        not_larger = (seen.log for seen in alike if seen.compute_excess(self.log) <= 1)
        return max(not_larger, key=lambda log: log.total.made_bytes, default=None)

    @property
    def longest_plan(self) -> StepPlan | None:
        """The plan of `longest_step`; None if it has none."""
        longest = self._find_longest()
        return None if longest is None else longest.plan

    def wait(self, seconds: float | None = None) -> None:
        """Wait at most `seconds` until all repeated steps are solved."""
        until = math.inf if seconds is None else time.monotonic() + seconds
        self._start()
        while self._solving is not None and (left_s := until - time.monotonic()) > 0:
            self._receive(min(_POLL_S, left_s))

    def stop(self) -> None:
        """Stop the solve in progress."""
        if self._solving is not None:
            self._solving[-1].stop()
            self._solving = None

    def _follow(self, seen: _Seen | None) -> None:
        """Follow the plan of a step from now on, or none."""
        self._following = seen
        self.log.followed = None if seen is None else seen.log

    def _find_longest(self) -> _Seen | None:
        return max(self._seen.values(), key=lambda seen: len(seen.log), default=None)

    def _iterate_planned(self) -> Iterator[_Seen]:
        """Yield the steps that have a plan, the latest first."""
        return (seen for seen in reversed(self._seen.values()) if seen.plan is not None)

    def _find_lender(self) -> _Seen | None:
        """Return the planned step with the same first ops in other sizes: the next larger one so far, else the largest."""
        alike = [(seen.compute_excess(self.log), seen) for seen in self._iterate_planned() if seen.is_begun_alike(self.log)]
        larger = [(excess, seen) for excess, seen in alike if excess >= 1]
        _, lender = min(larger, key=itemgetter(0)) if larger else max(alike, key=itemgetter(0), default=(0.0, None))
        return lender

    def _drop_one(self) -> None:
        """Drop the oldest step without a plan or a solve in progress; if there is none, the oldest step."""
        solving = None if self._solving is None else self._solving[0]
        *before, _ = self._seen
        dropped = next((chain for chain in before if self._seen[chain].plan is None and chain != solving), before[0])
        del self._seen[dropped]

    def _start(self) -> None:
        """Start to solve a repeated step, if no solve is in progress."""
        if self._solving is not None or (seen := self._find_next_to_solve()) is None:
            return
        step = build_recorded_step(seen.log)
        try:
            solve = BackgroundSolve(SolveJob(step.graph, Bytes(self.budget_bytes), self.settings))
        except OSError as error:  # no process can be started: the heuristic is used
            seen.solved, seen.failure = True, str(error)
        else:
            self._solving = seen.log.total.chain, step, solve

    def _find_next_to_solve(self) -> _Seen | None:
        """Return the latest repeated step, else the largest one that occurs in several sizes and has no plan to borrow."""
        unsolved = [seen for seen in reversed(self._seen.values()) if seen.evicted and not seen.solved]
        for seen in unsolved:
            if seen.times > 1:
                return seen
        times = Counter(seen.log.total.structure for seen in self._seen.values())
        sizes = (seen for seen in unsolved if times[seen.log.total.structure] > 1 and self._compute_least_excess(seen) > _NEAR)
        return max(sizes, key=lambda seen: seen.log.total.made_bytes, default=None)

    def _compute_least_excess(self, seen: _Seen) -> float:
        """Return the bytes of the next larger planned step, divided by those of `seen`; infinite if there is none."""
        log = seen.log
        alike = (other for other in self._iterate_planned() if len(other.log) == len(log) and other.is_begun_alike(log))
        return min((excess for other in alike if (excess := other.compute_excess(log)) >= 1), default=math.inf)

    def _receive(self, most_s: float) -> None:
        """Receive a better plan of the solve, waiting up to `most_s` seconds; start the next solve if it has ended."""
        if self._solving is None:
            return
        chain, step, solve = self._solving
        plan = solve.receive(most_s)
        seen = self._seen.get(chain)
        if seen is not None and plan is not None:
            try:
                seen.plan = StepPlan(plan, step, list_actions(step, plan.schedule))
                self.has_plans = True
            except PlannerError as error:
                seen.failure = str(error)
        if solve.ended is not None:
            if seen is not None:
                seen.solved, seen.failure = True, solve.ended.failure or seen.failure
            self._solving = None
            self._start()
