"""Plans that reserve no more than a budget: solved with less in memory, where and by as much as the model of the allocator says.

First only at the ops at which what is reserved grows above the budget, then everywhere.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from graphs.errors import InfeasibleError, LimitError
from graphs.pools import DEVICE
from graphs.schedule import Compute
from graphs.simulate import simulate
from graphs.units import format_bytes
from planner.memory import CountedMemory
from planner.plans.plan import Plan
from planner.reserved import Beside, growth_above_budget
from solvers.clock import Clock, left
from solvers.margins import Margins, between, most_above
from solvers.result import SolveProgress, Status, is_within

_SOLVES = 10  # without margins
_FIRST = 0.5  # of the clock, for the first solve, whose bound holds for all schedules that fit
_NEXT = 0.3  # of what is left, for each of the others
_LOCAL_SOLVES, _LOCAL_BETTER = 6, 3  # with margins, until a plan fits, and then with smaller ones
_LOCAL_NEXT = 0.2  # of what is left, for each of them
_LESS = 0.75  # of the excess before: margins that leave more are no way to the budget
_CLOSE = 0.005  # of the budget: budgets of allocated bytes, or margins, that differ by no more are not told apart
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


Solve = Callable[[int, Clock, Watch, Margins], Plan]  # for a budget of allocated bytes


def plan_reserved(
    budget_bytes: int, memory: CountedMemory, beside: Beside, solve: Solve, clock: Clock, watch: Watch, *, arena: bool = False
) -> Plan:
    """Return the fastest plan found that reserves at most `budget_bytes`.

    What is allocated is reserved, so that the bound of the first solve, for all of the budget but workspaces of libraries, is a
    bound for what is wanted. If its plan reserves too much, the ops at which what is reserved grows above the budget are given
    margins, as long as that helps. Then budgets of allocated bytes below are solved, which count for all ops: first less by the
    excess, then between those that were too much and those that were not.

    Args:
        memory: what the budget counts.
        beside: memory that is reserved beside any plan.
        solve: returns a plan with what it reserves.
        arena: the step runs in an arena, where no single op is to blame for what is reserved.

    Raises:
        InfeasibleError: proved: no schedule fits.
        LimitError: no plan was found that reserves so little.
    """
    beside.check(budget_bytes)
    kept_bytes = beside.kept_bytes
    most_bytes = budget_bytes - kept_bytes
    search = _Search(budget_bytes, memory, watch)
    try:
        first = solve(most_bytes, clock.part(_FIRST * left(clock)), search.watch(), {})
    except InfeasibleError as error:
        said = f" Of the {format_bytes(budget_bytes)}, {beside.lines()}."
        raise InfeasibleError(f"{error}{said if kept_bytes else ''}") from error
    search.bound_s = first.bound_s
    search.learn(most_bytes, first)
    if search.best is None and not arena:
        _solve_with_margins(first, _LocalMargins(budget_bytes, most_bytes, memory), search, solve, clock)
    for _ in range(1, _SOLVES):
        asked_bytes = search.next_bytes()
        if asked_bytes is None or search.is_over(clock):
            break
        try:
            plan = solve(asked_bytes, clock.part(_NEXT * left(clock)), search.watch(), {})
        except (InfeasibleError, LimitError):
            search.floor_bytes = asked_bytes
        else:
            search.learn(asked_bytes, plan)
    if search.best is None:
        raise LimitError(search.nothing_found(arena=arena))
    return replace(search.budgeted(search.best), seconds=clock.seconds)


def _solve_with_margins(first: Plan, margins: "_LocalMargins", search: "_Search", solve: Solve, clock: Clock) -> None:
    """Solve with local margins, as long as they promise better plans; `first` is the plan without any, which does not fit."""
    plan: Plan | None = first
    while margins.learn(plan) and not search.is_over(clock):
        try:
            plan = solve(margins.most_bytes, clock.part(_LOCAL_NEXT * left(clock)), search.watch(), margins.now)
        except (InfeasibleError, LimitError):
            plan = None
        else:
            search.offer(plan)


@dataclass(slots=True)
class _LocalMargins:
    """The margins at ops at which what is reserved grows above the budget.

    Attributes:
        budget_bytes: of reserved memory.
        most_bytes: the budget of allocated bytes.
        memory: what the budget counts.
        now: the margins of the next solve.
        failed, fitted: margins with which the plan did not fit, the largest, and with which it did, the smallest.
        excess_bytes: reserved above the budget by the last plan that did not fit; None if there is none yet.
        solves: how often margins were chosen until a plan fitted; `better`: and since.
    """

    budget_bytes: int
    most_bytes: int
    memory: CountedMemory
    now: Margins = field(default_factory=dict)
    failed: Margins = field(default_factory=dict)
    fitted: Margins | None = None
    excess_bytes: int | None = None
    solves: int = 0
    better: int = 0

    def learn(self, plan: Plan | None) -> bool:
        """Choose the next margins, given the plan with the present ones, if there is one; return False if none can gain."""
        excess_bytes = None if plan is None or plan.reserved_bytes is None else plan.reserved_bytes - self.budget_bytes
        if excess_bytes is not None and excess_bytes <= 0:
            self.fitted = self.now
        elif excess_bytes is not None:
            self.failed = self.now
        if self.fitted is not None:
            self.better += 1
            self.now = between(self.failed, self.fitted)
            return self.better <= _LOCAL_BETTER and most_above(self.fitted, self.now) > _CLOSE * self.budget_bytes
        self.solves += 1
        if plan is None or excess_bytes is None:
            self.now = between(self.failed, self.now)
            return self.solves <= _LOCAL_SOLVES
        before, self.excess_bytes = self.excess_bytes, excess_bytes
        larger = {op: size for op, size in self._wanted(plan).items() if size > self.now.get(op, 0)}
        self.now = {**self.now, **larger}
        return self.solves <= _LOCAL_SOLVES and bool(larger) and (before is None or excess_bytes <= _LESS * before)

    def _wanted(self, plan: Plan) -> Margins:
        """Return the margins with which each op at which what is reserved grows too much has as much less in memory.

        An op that needs more for itself has none.
        """
        graph = plan.source
        assert graph is not None
        in_memory = simulate(graph, plan.schedule).memory_bytes
        found: dict[int, int] = {}
        for index, more_bytes in growth_above_budget(graph, plan.schedule, self.memory, self.budget_bytes).items():
            step = plan.schedule.steps[index]
            assert isinstance(step, Compute)  # which alone asks for memory
            op = graph.ops[step.op]
            own = (graph.tensors[t] for t in {*op.inputs, *op.outputs})
            own_bytes = op.workspace_bytes + sum(t.size_bytes for t in own if t.pool == DEVICE and not t.static)
            rest_bytes = in_memory[index] - more_bytes
            if rest_bytes >= graph.static_bytes + own_bytes:
                found[op.id] = max(found.get(op.id, 0), self.most_bytes - rest_bytes)
        return found


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

    def is_over(self, clock: Clock) -> bool:
        """Return True if the clock is at its limit, or the caller stops and has a plan, or the best is as good as the bound."""
        if self.best is None:
            return left(clock) <= 0
        stop = self._watch.should_stop
        return left(clock) <= 0 or self._status(self.best) is Status.OPTIMAL or (stop is not None and stop())

    def next_bytes(self) -> int | None:
        """Return the budget of allocated bytes to solve for next; None if the plan cannot gain any more."""
        if self._misses is None:
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

    def nothing_found(self, *, arena: bool) -> str:
        """Return the message that no plan fits."""
        known = "" if self._least_bytes is None else f": the least that one reserves is {format_bytes(self._least_bytes)}"
        none = f"no plan was found that reserves at most {format_bytes(self._budget_bytes)}{known}"
        if arena:
            return f"{none}. Raise the budget or the time limit"
        return (
            f"{none}. Raise the budget, let it count "
            f"expandable segments (memory={CountedMemory.RESERVED_EXPANDABLE.value!r}, with expandable_segments:True in "
            f"PYTORCH_CUDA_ALLOC_CONF), or only what tensors take (memory={CountedMemory.ALLOCATED.value!r})"
        )
