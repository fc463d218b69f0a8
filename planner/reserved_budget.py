"""Plans that reserve no more than a budget: solved for fewer allocated bytes, by as much as the model of the allocator says."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from graphs.errors import InfeasibleError, LimitError
from graphs.units import format_bytes
from planner.memory import CountedMemory
from planner.plans.plan import Plan
from planner.reserved import Beside
from solvers.clock import Clock, left
from solvers.result import SolveProgress, Status, is_within

_SOLVES = 10
_FIRST = 0.5  # of the clock, for the first solve, whose bound holds for all schedules that fit
_NEXT = 0.3  # of what is left, for each of the others
_CLOSE = 0.005  # of the budget: budgets of allocated bytes that differ by no more are not told apart
_INSIDE = 0.1  # of an interval of budgets: the next one is no closer to its ends


@dataclass(frozen=True, slots=True)
class Watch:
    """The observers of a solve.

    Attributes:
        on_progress: called as it advances.
        should_stop: polled; when it returns True, the best schedule so far is the result.
        on_plan: called with each better plan on the way.
    """

    on_progress: Callable[[SolveProgress], None] | None = None
    should_stop: Callable[[], bool] | None = None
    on_plan: Callable[[Plan], object] | None = None


Solve = Callable[[int, Clock, Watch], Plan]  # for a budget of allocated bytes


def plan_reserved(budget_bytes: int, memory: CountedMemory, beside: Beside, solve: Solve, clock: Clock, watch: Watch) -> Plan:
    """Return the fastest plan found that reserves at most `budget_bytes`.

    What is allocated is reserved, so that the bound of the first solve, for all of the budget but workspaces of libraries, is a
    bound for what is wanted. If its plan reserves too much, budgets of allocated bytes below are solved: first less by the
    excess, then between those that were too much and those that were not.

    Args:
        memory: what the budget counts.
        beside: memory that is reserved beside any plan.
        solve: returns a plan with what it reserves.

    Raises:
        InfeasibleError: proved: no schedule fits.
        LimitError: no plan was found that reserves so little.
    """
    beside.check(budget_bytes)
    kept_bytes = beside.kept_bytes
    search = _Search(budget_bytes, memory, watch)
    try:
        first = solve(budget_bytes - kept_bytes, clock.part(_FIRST * left(clock)), search.watch())
    except InfeasibleError as error:
        said = f" Of the {format_bytes(budget_bytes)}, {beside.lines()}."
        raise InfeasibleError(f"{error}{said if kept_bytes else ''}") from error
    search.bound_s = first.bound_s
    search.learn(budget_bytes - kept_bytes, first)
    for _ in range(1, _SOLVES):
        asked_bytes = search.next_bytes()
        if asked_bytes is None or left(clock) <= 0 or (search.best is not None and watch.should_stop and watch.should_stop()):
            break
        try:
            plan = solve(asked_bytes, clock.part(_NEXT * left(clock)), search.watch())
        except (InfeasibleError, LimitError):
            search.floor_bytes = asked_bytes
        else:
            search.learn(asked_bytes, plan)
    if search.best is None:
        raise LimitError(search.nothing_found())
    return replace(search.budgeted(search.best), seconds=clock.seconds)


class _Search:
    """What is known of the budgets of allocated bytes.

    Attributes:
        best: the fastest plan that fits, None if none is known.
        bound_s: no schedule that fits is faster; None if unknown.
        floor_bytes: no plan was found for this budget of allocated bytes.
    """

    def __init__(self, budget_bytes: int, memory: CountedMemory, watch: Watch) -> None:
        self.best: Plan | None = None
        self.bound_s: float | None = None
        self.floor_bytes = 0
        self._budget_bytes, self._memory, self._watch = budget_bytes, memory, watch
        self._fits: tuple[int, int] | None = None  # the largest budget that was not too much, and what its plan reserves
        self._misses: tuple[int, int] | None = None  # the smallest that was
        self._least_bytes: int | None = None  # that a plan reserves
        self._found = False  # by the current solve

    def watch(self) -> Watch:
        """Return the observers of the next solve, which is stopped only when it has found a schedule.

        They are told that nothing is known of it yet, since whoever stops it may go by the gap of the one before.
        """
        self._found = False
        stop = self._watch.should_stop
        if self._watch.on_progress is not None:
            self._watch.on_progress(SolveProgress(0.0, "starting", None, None))

        def tell(progress: SolveProgress) -> None:
            self._found |= progress.best_s is not None
            if self._watch.on_progress is not None:
                self._watch.on_progress(progress)

        return Watch(tell, None if stop is None else lambda: self._found and stop(), self.offer)

    def offer(self, plan: Plan) -> bool:
        """Take `plan` if it fits and is the fastest of them; return whether it fits."""
        self._found = True
        reserved_bytes = plan.reserved_bytes
        assert reserved_bytes is not None
        self._least_bytes = min(reserved_bytes, self._least_bytes or reserved_bytes)
        fits = reserved_bytes <= self._budget_bytes
        if fits and (self.best is None or plan.time_s < self.best.time_s):
            self.best = plan
            if self._watch.on_plan is not None:
                self._watch.on_plan(self.budgeted(plan))
        return fits

    def learn(self, asked_bytes: int, plan: Plan) -> None:
        """Learn from `plan`, the result of a solve for `asked_bytes`."""
        assert plan.reserved_bytes is not None
        if self.offer(plan):
            self._fits = asked_bytes, plan.reserved_bytes
        else:
            self._misses = min(asked_bytes, plan.peak_bytes), plan.reserved_bytes

    def next_bytes(self) -> int | None:
        """Return the budget of allocated bytes to solve for next; None if the plan cannot gain any more."""
        if self._misses is None or (self.best is not None and self._status(self.best) is Status.OPTIMAL):
            return None
        high_bytes, high_reserved = self._misses
        low_bytes, low_reserved = self._fits or (self.floor_bytes, 0)
        if high_bytes - low_bytes <= (1 if self.best is None else _CLOSE * self._budget_bytes):
            return None
        if self._fits is None:
            asked_bytes = high_bytes - (high_reserved - self._budget_bytes)
        else:
            share = (self._budget_bytes - low_reserved) / max(1, high_reserved - low_reserved)
            asked_bytes = low_bytes + int(share * (high_bytes - low_bytes))
        margin_bytes = int(_INSIDE * (high_bytes - low_bytes))
        return max(low_bytes + margin_bytes, min(high_bytes - margin_bytes if self._fits else high_bytes - 1, asked_bytes))

    def _status(self, plan: Plan) -> Status:
        tolerance = plan.settings.get("tolerance")
        proved = self.bound_s is not None and isinstance(tolerance, float) and is_within(plan.time_s, self.bound_s, tolerance)
        return Status.OPTIMAL if proved else Status.FEASIBLE

    def budgeted(self, plan: Plan) -> Plan:
        """Return `plan` with the budget that counts reserved bytes, and the bound for it."""
        return replace(
            plan,
            budget_bytes=self._budget_bytes,
            memory=self._memory,
            bound_s=plan.bound_s if self.bound_s is None else self.bound_s,
            status=str(self._status(plan)),
            settings={**plan.settings, "allocated_budget_bytes": plan.budget_bytes},
        )

    def nothing_found(self) -> str:
        """Return the message that no plan fits."""
        known = "" if self._least_bytes is None else f": the least that one reserves is {format_bytes(self._least_bytes)}"
        return (
            f"no plan was found that reserves at most {format_bytes(self._budget_bytes)}{known}. Raise the budget, let it count "
            f"expandable segments (memory={CountedMemory.RESERVED_EXPANDABLE.value!r}, with expandable_segments:True in "
            f"PYTORCH_CUDA_ALLOC_CONF), or only what tensors take (memory={CountedMemory.ALLOCATED.value!r})"
        )
