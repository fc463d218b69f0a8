"""The fastest schedule whose buffers fit an arena: schedules and addresses in turn.

If the buffers of a schedule do not fit, ops at which the arena was too large are given more workspace in the next solve: a local
margin, which finds schedules that fit and leaves the bound alone. Tried and given up: to prove which few buffers do not fit
together and to exclude them from the next solve. No plan of a model was other than with margins alone; only graphs of a few ops
had better bounds.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from planner.graphs.addresses import Offsets
from planner.graphs.schedule import Compute, Schedule
from planner.graphs.simulate import simulate
from planner.graphs.units import format_bytes, format_enough
from planner.solvers.addresses.solve import solve_by
from planner.solvers.arena.needs import ArenaRules, Needs, count_known_moments
from planner.solvers.clock import Clock, measure_rest
from planner.solvers.margins import Margins, MarginSearch, add_margins
from planner.solvers.request import Request
from planner.solvers.result import SOLVED, Reason, Result, SolveProgress, Status, decide_status

_SOLVES = 12  # with margins, until a schedule fits
_BETTER = 3  # after that, with smaller margins
_FIRST, _NEXT = 0.4, 0.3  # of what is left of the clock, for the first solve and each of the others
_CLOSE = 0.0005  # of the budget: margins that differ by no more are not told apart
# Shares of the limit, and most of the clock: for the smallest arena, and for addresses within the capacity.
_QUICK, _PLACE = (0.02, 1.0), (0.05, 5.0)
# Schedules that are placed while a solve goes on: until some do not fit, and only those that are faster by so much.
_MISFITS, _FASTER = 3, 0.002

Solve = Callable[[Request], Result]


def solve_in_arena(solve: Solve, request: Request, rules: ArenaRules) -> Result:
    """Search for the fastest schedule whose static memory, arena, and memory outside the arena are within the budget.

    The bound holds for all such schedules: it is that without addresses. The settings have ``arena_bytes`` and
    ``outside_arena_bytes``, and the number of ``arena_solves``.

    Args:
        solve: a solver, which counts the bytes in use.
        request: the budget is that of the whole step.
    """
    margins = MarginSearch(_CLOSE * request.budget_bytes, _SOLVES, _BETTER)
    return _Joint(solve, request, rules, margins).run()


@dataclass(frozen=True, slots=True)
class _Placed:
    """A schedule that fits the budget, with its step time, the addresses in the arena and the bytes outside."""

    schedule: Schedule
    time_s: float
    offsets: Offsets
    outside_bytes: int


@dataclass(slots=True)
class _Joint:
    """A solve of schedules and addresses.

    Attributes:
        best: the fastest schedule that fits, None if none is known.
        bound_s: lower bound on the time of every schedule that fits; None if unknown.
        margins: those of the next solve, and what is known of others.
        needed_bytes: the least that a schedule was found to need; None if none was found.
        solves, grown: number of solves, and of enlargements of the margins.
        seen: schedules of the current solve, each better than the one before.
    misfits: number of them without addresses.
    """

    solve: Solve
    request: Request
    rules: ArenaRules
    margins: MarginSearch
    best: _Placed | None = None
    bound_s: float | None = None
    needed_bytes: int | None = None
    solves: int = 0
    grown: int = 0
    seen: list[Schedule] = field(default_factory=list)
    misfits: int = 0

    def run(self) -> Result:
        """Solve until a schedule fits, or the clock is at its limit."""
        share = _FIRST
        while True:
            result = self._solve_once(share)
            share = _NEXT
            if not self.margins.now:
                if result.status in (Status.INFEASIBLE, Status.ERROR):
                    return self._build_result(result)
                self.bound_s = max(result.bound_s or 0.0, self.bound_s or 0.0)
            if self.request.is_interrupted() and (self.best is not None or self.seen):  # each was placed when it was seen
                return self._build_result(result)
            if not self._learn(result) or self._is_over(result):
                return self._build_result(result)

    def _is_over(self, result: Result) -> bool:
        """Return True if the clock or the caller ends the solve, or the best schedule is as good as the bound."""
        if self.best is None:
            return measure_rest(self.request.clock) <= 0 or (result.schedule is None and self.request.is_interrupted())
        return self.request.is_stopped() or self._choose_status(result) in SOLVED

    def _solve_once(self, share: float) -> Result:
        """Solve for schedules with the margins so far, for a share of the time that is left."""
        request = self.request
        self.solves += 1
        self.misfits = 0
        self._tell("planning schedule and addresses", None)
        return self.solve(
            replace(
                request,
                graph=add_margins(request.graph, self.margins.now),
                clock=request.clock.start_part(share * measure_rest(request.clock)),
                on_progress=self._pass_on,
                on_schedule=self._see,
            )
        )

    def _see(self, schedule: Schedule, bound_s: float) -> None:
        """Look for addresses at once, for a short time: with a schedule that fits the caller may end the solve."""
        del bound_s
        self.seen.append(schedule)
        time_s = simulate(self.request.graph, schedule).time_s
        is_faster = self.best is None or time_s < (1 - _FASTER) * self.best.time_s
        if self.misfits < _MISFITS and is_faster and not self._take(schedule, time_s, _QUICK):
            self.misfits += 1

    def _tell(self, activity: str, bound_s: float | None) -> None:
        known = [bound for bound in (self.bound_s, bound_s) if bound is not None]
        self.request.tell(activity, None if self.best is None else self.best.time_s, max(known, default=None))

    def _pass_on(self, progress: SolveProgress) -> None:
        self._tell(progress.activity, None if self.margins.now else progress.bound_s)

    def _allot_part(self, limits: tuple[float, float]) -> Clock:
        share, most = limits
        return self.request.clock.start_part(min(most, share * self.request.clock.limit))

    def _take(self, schedule: Schedule, time_s: float, limits: tuple[float, float] = _PLACE) -> bool:
        """Return True if addresses are found; keep the schedule if they are and it is the fastest."""
        request = self.request
        if self.best is not None and self.best.schedule == schedule:
            return True
        needs = Needs.of(request.graph, schedule, self.rules, request.budget_bytes)
        found = needs.find_addresses(self._allot_part(limits))
        needed_bytes = needs.static_bytes + found.height_bytes + needs.outside_bytes
        self.needed_bytes = min(needed_bytes, self.needed_bytes or needed_bytes)
        if found.offsets is None:
            return False
        if self.best is None or time_s < self.best.time_s:
            self.best = _Placed(schedule, time_s, found.offsets, needs.outside_bytes)
            if request.on_schedule is not None:
                request.on_schedule(schedule, self.bound_s or 0.0)
        return True

    def _learn(self, result: Result) -> bool:
        """Set the margins of the next solve; return False if none can gain."""
        schedule = self._take_result(result)
        if schedule is None and not self.margins.now:
            return False
        fits = None if result.schedule is None else schedule is None
        return self.margins.learn(fits=fits, more=partial(self._enlarge_margins, schedule))

    def _take_result(self, result: Result) -> Schedule | None:
        """Take the schedule of `result`, or return it if it has no addresses; the first one of the solve may have some then."""
        seen, self.seen = self.seen, []
        if result.schedule is None:
            return None
        assert result.time_s is not None
        if self._take(result.schedule, result.time_s):
            return None
        if self.best is None and seen:
            self._take(seen[0], simulate(self.request.graph, seen[0]).time_s)
        return result.schedule

    def _enlarge_margins(self, schedule: Schedule | None, now: Margins) -> Margins:
        """Return larger margins than those `now`, at the ops that run while a buffer of `schedule` is above the capacity.

        They are what the arena has too much, and twice as much each time.
        """
        assert schedule is not None  # it does not fit
        request = self.request
        needs = Needs.of(request.graph, schedule, self.rules, request.budget_bytes)
        found = solve_by(self._allot_part(_QUICK), needs.inside)
        assert found.offsets is not None  # any arena will do
        more_bytes = max(1, found.height_bytes - needs.capacity_bytes) * 2**self.grown
        self.grown += 1
        above = [
            buffer
            for buffer, offset in zip(found.offsets.buffers, found.offsets.offsets, strict=True)
            if offset + buffer.size > needs.capacity_bytes
        ]
        moments = count_known_moments(request.graph)
        steps = {index for buffer in above for index in range(buffer.lower // moments, -(-buffer.upper // moments))}
        ops = {step.op for index, step in enumerate(schedule.steps) if isinstance(step, Compute) and index in steps}
        return {**now, **{op: now.get(op, 0) + more_bytes for op in ops}}

    def _choose_status(self, result: Result) -> Status:
        assert self.best is not None
        return decide_status(self.best.time_s, self.bound_s, result.settings.tolerance)

    def _build_result(self, result: Result) -> Result:
        """Return the result of the whole; `result` is that of the last solve."""
        request, best = self.request, self.best
        settings = replace(result.settings, limit=request.settings.limit, arena_solves=self.solves)
        if best is not None:
            settings = replace(
                settings,
                arena_bytes=best.offsets.height_bytes,
                outside_arena_bytes=best.outside_bytes,
                arena_offsets=best.offsets.offsets,
            )
            status, message = self._choose_status(result), self._describe_defect(result)
        elif result.status in (Status.INFEASIBLE, Status.ERROR) and not self.margins.now:
            status, message = result.status, result.message
        else:
            status, message = Status.LIMIT, self._describe_failure(result)
        return replace(
            result,
            graph=request.graph,
            status=status,
            schedule=None if best is None else best.schedule,
            bound_s=self.bound_s if status is not Status.INFEASIBLE else None,
            seconds=request.clock.seconds,
            settings=settings,
            message=message,
            reason=Reason.TIME if status is Status.LIMIT else None,
            ended=request.choose_ending(result.ended) if status is Status.FEASIBLE else None,
        )

    def _describe_defect(self, result: Result) -> str:
        """Return the error of the last solve, given that a schedule is known: a failure or a proof of infeasibility; else ""."""
        if result.status is Status.ERROR:
            return result.message
        return "a proof that there is no schedule" if result.status is Status.INFEASIBLE and not self.margins.now else ""

    def _describe_failure(self, result: Result) -> str:
        """Return the message that no schedule was found that fits."""
        budget = format_bytes(self.request.budget_bytes)
        if self.needed_bytes is None:
            return result.message
        return (
            f"no schedule was found whose arena is within the budget of {budget}: the least that one needs is "
            f"{format_enough(self.needed_bytes)}. Raise the budget or the time limit, or plan without an arena"
        )
