"""Steps of an eager loop that repeat: recognized by their ops, solved in a separate process, and run by their plans.

A step that had to evict and comes a second time is handed to the solver. When it comes again, its plan says before each op what
to evict and what to recompute. An op that differs ends that, within the step: the plan of another step that began in the same way
takes over, or the heuristic. Bits do not depend on it, as plans only say which recorded ops run again, and when. Never imports
torch.
"""

import math
import time
from dataclasses import dataclass, replace

from graphs.errors import PlannerError
from graphs.schedule import Compute, Schedule
from planner.background import BackgroundSolve, Job
from planner.eager.step_log import LoggedOp, RecordedStep, StepLog, recorded_step
from planner.plans.plan import Plan
from planner.settings import SolveSettings

_POLL_S = 0.2
_MOST_STEPS = 64  # different steps that are remembered


@dataclass(frozen=True, slots=True)
class Action:
    """What a plan does with a storage of the step: evict it, or recompute it."""

    storage: int
    evict: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A plan as the runtime follows it.

    Attributes:
        plan: the plan.
        step: the graph that it is for.
        actions: before each op of the step, and at its end, what to do in this order.
    """

    plan: Plan
    step: RecordedStep
    actions: tuple[tuple[Action, ...], ...]


def step_plan(plan: Plan, step: RecordedStep) -> StepPlan:
    """Return a plan as the runtime follows it.

    Raises:
        PlannerError: its schedule does not execute the ops of the step in their order.
    """
    return StepPlan(plan, step, actions(step, plan.schedule))


def actions(step: RecordedStep, schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Return what to do before each op of the step, and at its end, to run it by a schedule.

    What the program lets go of is not evicted, unless it was recomputed after that. Contents that were written over since are not
    recomputed by themselves, but with the present contents.

    Raises:
        PlannerError: the schedule does not execute the ops of the step in their order.
    """
    graph, storages = step.graph, step.storages
    found: list[list[Action]] = [[] for _ in range(len(graph.ops) + 1)]
    current: dict[int, int] = {}  # tensor with the present contents of each storage
    live: set[int] = set()
    recomputed: set[int] = set()  # storages that the program has let go of
    done = 0
    for place in schedule.steps:
        if isinstance(place, Compute):
            outputs = graph.ops[place.op].outputs
            if place.op == done:
                done += 1
                current.update((storages[t], t) for t in outputs)
            elif place.op > done:
                raise PlannerError(f"the schedule executes op {graph.ops[place.op].name!r} before those ahead of it in the step")
            else:
                again = [storages[t] for t in outputs if t not in live and current[storages[t]] == t]
                found[done] += [Action(storage, evict=False) for storage in again]
                recomputed.update(storage for storage in again if step.released.get(storage, math.inf) <= done)
            live.update(outputs)
        else:
            live.discard(place.tensor)
            storage = storages[place.tensor]
            if current[storage] == place.tensor and (storage in recomputed or step.released.get(storage, math.inf) > done):
                recomputed.discard(storage)
                found[done].append(Action(storage, evict=True))
    return tuple(map(tuple, found))


@dataclass(slots=True)
class _Seen:
    """A step that has come before.

    Attributes:
        step: its graph.
        chains: the hashes after each of its ops.
        times: how often it has come.
        evicted: it has evicted tensors.
        plan: the best plan so far; None until there is one.
        solved: its solve has ended.
        failure: why there is no plan.
    """

    step: RecordedStep
    chains: tuple[int, ...]
    times: int = 1
    evicted: bool = False
    plan: StepPlan | None = None
    solved: bool = False
    failure: str = ""


class StepPlans:
    """The steps of a loop so far, their plans, and the one that is followed now.

    Attributes:
        log: the current step.
        planned_steps: number of steps that ran by a plan to the last op.
        left_steps: number of steps that began by a plan and went on by the heuristic, as an op differed.
    """

    def __init__(self, budget_bytes: int, settings: SolveSettings | None = None) -> None:
        """Begin without plans.

        Args:
            budget_bytes: for which steps are solved.
            settings: of the solves. Ops are never reordered.
        """
        self.budget_bytes = budget_bytes
        self.settings = replace(settings or SolveSettings(), reorder=False)
        self.planned_steps = self.left_steps = 0
        self.log = StepLog(0)
        self._seen: dict[int, _Seen] = {}  # by the hash of all ops; the one that came last is the last
        self._solving: tuple[int, BackgroundSolve] | None = None
        self._following: _Seen | None = None
        self._left = False
        self._acted = 0  # ops before which the actions have been taken

    # Steps.

    def begin(self, held_bytes: int) -> None:
        """Begin a step with `held_bytes` in memory, and follow the plan of the step that came last, if it has one."""
        self._receive(0.0)
        self.log = StepLog(held_bytes)
        self._left, self._acted = False, 0
        self._following = next((seen for seen in reversed(self._seen.values()) if seen.plan is not None), None)

    def add_op(self, op: LoggedOp, signature: object) -> None:
        """Add an op to the step; if it differs from the plan, follow another that began in the same way, or none."""
        chain = self.log.add_op(op, signature)
        if self._following is None:
            return
        place = len(self.log.ops) - 1
        if place < len(self._following.chains) and self._following.chains[place] == chain:
            return
        self._following = next(
            (
                seen
                for seen in reversed(self._seen.values())
                if seen.plan is not None and place < len(seen.chains) and seen.chains[place] == chain
            ),
            None,
        )
        self._left = self._following is None

    def due(self) -> tuple[Action, ...]:
        """Return what the plan does before the next op, once; nothing if no plan is followed."""
        place = len(self.log.ops)
        if self._following is None or self._acted > place:
            return ()
        self._acted = place + 1
        assert self._following.plan is not None
        return self._following.plan.actions[place]

    @property
    def is_following(self) -> bool:
        """True while the step runs by a plan."""
        return self._following is not None

    def end(self) -> None:
        """End the step: remember it, and have it solved if it has come before and evicted tensors."""
        log = self.log
        if not log.ops:
            return
        followed = self._following is not None and len(log.ops) == len(self._following.chains)
        self.planned_steps += followed
        self.left_steps += self._left or (self._following is not None and not followed)
        self._following = None
        seen = self._seen.pop(log.chain, None)
        if seen is None:
            seen = _Seen(recorded_step(log), tuple(log.chains))
        else:
            seen.times += 1
        self._seen[log.chain] = seen
        if len(self._seen) > _MOST_STEPS:
            del self._seen[next(iter(self._seen))]
        seen.evicted = seen.evicted or log.evictions > 0
        self._start()

    # Plans.

    @property
    def plans(self) -> tuple[StepPlan, ...]:
        """The plans so far, the one of the latest step last."""
        return tuple(seen.plan for seen in self._seen.values() if seen.plan is not None)

    @property
    def failures(self) -> tuple[str, ...]:
        """For steps that repeat and have no plan, the reason."""
        return tuple(seen.failure for seen in self._seen.values() if seen.failure)

    @property
    def longest_step(self) -> RecordedStep | None:
        """The step of most ops of those that have ended; None if there was none."""
        return max((seen.step for seen in self._seen.values()), key=lambda step: len(step.graph.ops), default=None)

    def wait(self, seconds: float | None = None) -> None:
        """Wait until all steps that repeat are solved, at most `seconds`."""
        until = math.inf if seconds is None else time.monotonic() + seconds
        self._start()
        while self._solving is not None and (left_s := until - time.monotonic()) > 0:
            self._receive(min(_POLL_S, left_s))

    def stop(self) -> None:
        """End the solve in progress."""
        if self._solving is not None:
            self._solving[1].stop()
            self._solving = None

    def _start(self) -> None:
        """Start to solve a step that repeats, the latest first; one at a time."""
        if self._solving is not None:
            return
        for chain, seen in reversed(self._seen.items()):
            if seen.evicted and seen.times > 1 and not seen.solved:
                try:
                    solve = BackgroundSolve(Job(seen.step.graph, self.budget_bytes, self.settings))
                except OSError as error:  # no process can be started: heuristics go on
                    seen.solved, seen.failure = True, str(error)
                    return
                self._solving = chain, solve
                return

    def _receive(self, most_s: float) -> None:
        """Take the better plan that the solve has found since, waiting up to `most_s` seconds, and start the next solve."""
        if self._solving is None:
            return
        chain, solve = self._solving
        plan = solve.receive(most_s)
        seen = self._seen.get(chain)
        if seen is not None and plan is not None:
            try:
                seen.plan = step_plan(plan, seen.step)
            except PlannerError as error:
                seen.failure = str(error)
        if solve.ended is not None:
            if seen is not None:
                seen.solved, seen.failure = True, solve.ended.failure or seen.failure
            self._solving = None
            self._start()
