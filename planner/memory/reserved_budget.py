"""Schedules that reserve no more than a budget: solved with less in memory, where and by as much as the allocator's model says.

First only at the ops at which what is reserved grows above the budget, then everywhere.

What is reserved is no row of the program: it depends on the order of all requests, and is not monotone in what is allocated.
Fewer allocated bytes alone cost up to ten points more time than a budget of allocated memory, left gaps of 9%, or found nothing.
Therefore a plan that reserves too much runs in an arena where it can, and margins at single ops come first where it cannot. Known
weakness: the bound is that of the budget in allocated bytes, so that without an arena a gap may stay that no schedule can close.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from planner.graphs.pools import DEVICE
from planner.graphs.reordering import keep_program_order
from planner.graphs.schedule import Compute, Schedule
from planner.graphs.simulate import simulate
from planner.graphs.units import format_bytes, format_enough
from planner.memory.fit import Bracket
from planner.memory.reserved import DeviceTraining, choose_arena, predict_beside
from planner.settings.counted_memory import CountedMemory
from planner.solvers.clock import measure_rest
from planner.solvers.margins import Margins, MarginSearch, add_margins
from planner.solvers.order.solve import SolvedOrder
from planner.solvers.request import Request, Start
from planner.solvers.result import SOLVED, Ending, Reason, Result, SolveProgress, SolveSettings, Status, decide_status, is_within
from planner.solvers.tolerance import Tolerance

_SOLVES = 20  # without margins
_FIRST = 0.5  # of the clock, for the first solve, whose bound holds for all schedules that fit
_NEXT = 0.3  # of what is left, for each of the others
_LOCAL_SOLVES, _LOCAL_BETTER = 6, 3  # with margins, until a plan fits, and then with smaller ones
_LOCAL_NEXT = 0.2  # of what is left, for each of them
_LESS = 0.75  # of the excess before: margins that leave more are no way to the budget
_CLOSE = 0.005  # of the budget: margins that differ by no more are not told apart,
_CLOSEST = 0.0003  # nor budgets of allocated bytes
_TIGHTER = 0.1  # of the tolerance: for fewer bytes than the budget, whose solves start from a schedule that is close

Run = Callable[[Request], SolvedOrder]  # a solve whose budget counts allocated bytes


def solve_counted(
    run: Run,
    request: Request,
    memory: CountedMemory,
    *,
    arena: bool | None = None,
    must_stop: Callable[[], bool] | None = None,
    on_least: Callable[[Schedule], None] | None = None,
    proved_bytes: int = 0,
) -> SolvedOrder:
    """Return the fastest schedule that `run` finds for `request`, whose budget counts `memory`.

    On reserved memory: what is allocated is reserved, so that the bound of the first solve, for all of the budget but workspaces
    of libraries, is a bound for what is wanted. If its schedule reserves too much, and can have no arena, the ops at which what
    is reserved grows above the budget are given margins, as long as that helps. Then budgets of allocated bytes below are solved,
    which count for all ops: first less by the excess, then between those that were too much and those that were not. The settings
    of the result have the ``allocated_budget_bytes`` that it was solved for.

    Args:
        run: the solve. Its schedules, and its result, are of the graph that it is given.
        request: `should_stop` is asked for each solve, and heard once there is a schedule that fits; `on_schedule` is called with
            those.
        memory: kind of memory that the budget counts.
        arena: True: reserved memory is that of steps in an arena. No single op is to blame for it there, so that none has a
            margin. False: they run in none. None: a schedule that reserves too much without an arena may have one, where steps
            can (``planner.memory.reserved.choose_arena``).
        must_stop: polled; once it returns True, all ends with what there is, if anything.
        on_least: called with each schedule that reserves less than those before, also where it does not fit; messages then do not
            name the least.
        proved_bytes: allocated bytes that every schedule of `run` needs, if known: fewer are not asked for.
    """
    if memory is CountedMemory.ALLOCATED:
        return run(replace(request, should_stop=combine_stops(request.should_stop, must_stop)))
    graph, budget_bytes, clock = request.graph, request.budget_bytes, request.clock
    arena, beside = choose_arena(graph, memory, asked=arena), predict_beside(graph, memory)
    if refusal := beside.explain_refusal(budget_bytes):
        refused = Result(graph, budget_bytes, Status.INFEASIBLE, None, None, "", clock.seconds, message=refusal)
        return SolvedOrder(refused, keep_program_order(graph))
    most_bytes = budget_bytes - beside.kept_bytes
    bracket = Bracket(budget_bytes, max(0, proved_bytes - 1))
    search = _Search(run, request, memory, must_stop or (lambda: False), arena, on_least, bracket)
    first = search.solve(most_bytes, _FIRST, {})
    if first.result.reason is Reason.TIME and not search.is_over():  # of its share of the clock: the rest is for the same
        first = search.solve(most_bytes, 1.0, {})
    if first.result.schedule is None:
        said = f" Of the {format_bytes(budget_bytes)}, {beside.describe_parts()}." if beside.kept_bytes else ""
        return replace(first, result=first.result.map_to(budget_bytes=budget_bytes, message=first.result.message + said))
    search.bound_s = first.result.bound_s
    excess_bytes = search.learn(most_bytes, first.result)
    if search.best is None and arena is False:
        _solve_with_margins(search, most_bytes, first.result.schedule, excess_bytes)
    for _ in range(1, _SOLVES):
        asked_bytes = search.choose_next_bytes()
        if asked_bytes is None or search.is_over():
            break
        solved = search.solve(asked_bytes, _NEXT if search.is_new(asked_bytes) else 1.0, {})
        search.learn(asked_bytes, solved.result)
        if asked_bytes == most_bytes:
            first = search.add_proof(first, solved)
    return replace(first, result=search.end(first.result))


def _solve_with_margins(search: "_Search", most_bytes: int, schedule: Schedule | None, excess_bytes: int) -> None:
    """Solve for allocated bytes with local margins while they help; `schedule` was found without, `excess_bytes` too large."""
    margins = MarginSearch(_CLOSE * search.request.budget_bytes, _LOCAL_SOLVES, _LOCAL_BETTER)
    before_bytes: int | None = None  # the excess of the last schedule that did not fit

    def raise_margins(now: Margins) -> Margins:
        """Return larger margins than those `now`, with which `schedule` was found; none if they are no way to the budget."""
        nonlocal before_bytes
        assert schedule is not None  # which does not fit
        larger = {op: size for op, size in search.compute_margins(schedule, most_bytes).items() if size > now.get(op, 0)}
        helps = before_bytes is None or excess_bytes <= _LESS * before_bytes
        before_bytes = excess_bytes
        return {**now, **larger} if larger and helps else {}

    while margins.learn(fits=None if schedule is None else excess_bytes <= 0, more=raise_margins) and not search.is_over():
        result = search.solve(most_bytes, _LOCAL_NEXT, margins.now).result
        schedule, excess_bytes = result.schedule, search.offer(result)


@dataclass(slots=True)
class _Search:
    """A search over budgets of allocated bytes for the fastest schedule whose counted memory is within the budget.

    Attributes:
        run, request, memory, must_stop, arena, on_least: the arguments of ``solve_counted``.
        bracket: the budgets of allocated bytes that are still open.
        best: the fastest result that fits the budget; None if none is known.
        bound_s: lower bound on the time of every schedule that fits; None if unknown.
    """

    run: Run
    request: Request
    memory: CountedMemory
    must_stop: Callable[[], bool]
    arena: bool | None
    on_least: Callable[[Schedule], None] | None
    bracket: Bracket
    best: Result | None = None
    bound_s: float | None = None
    _is_unfinished: bool = False  # the solve for the budget that fits had too little time
    _least_bytes: int | None = None  # that a schedule reserves
    # Of the last schedule, above the budget: in an arena as much less is reserved as is allocated, so that it shows a way.
    _arena_excess_bytes: int = 0
    _judged: dict[Schedule, tuple[int, int | None]] = field(default_factory=dict)  # bytes above the budget, of each schedule
    _found: bool = False  # by the current solve
    _start: Start | None = None  # what the last solve has found
    _error: Result | None = None  # of a solve that failed

    def solve(self, asked_bytes: int, share: float, margins: Margins) -> SolvedOrder:
        """Solve for a budget of allocated bytes and a share of the clock; with margins there is no bound.

        The solve is stopped only when it has found a schedule, unless it must stop. Observers are told that nothing is known of
        it yet, since whoever stops it may go by the gap of the one before.
        """
        request = self.request
        self._found = False
        request.tell("starting", None, None)
        solved = self.run(
            replace(
                request,
                graph=add_margins(request.graph, margins),
                budget_bytes=asked_bytes,
                clock=request.clock.start_part(share * measure_rest(request.clock)),
                on_progress=self._note_progress,
                should_stop=lambda: (self._found and request.is_interrupted()) or self.must_stop(),
                on_schedule=partial(self._offer_interim, asked_bytes, margins),
                start=self._start or request.start,
                tolerance=request.tolerance if self.bracket.misses is None else Tolerance.of(_TIGHTER * request.tolerance.first),
            )
        )
        result = solved.result
        if margins:
            result = replace(result, graph=request.graph, bound_s=None)
        return replace(solved, result=result)

    def _offer_interim(self, asked_bytes: int, margins: Margins, schedule: Schedule, bound_s: float) -> None:
        request = self.request
        if schedule in self._judged:
            return
        found = Status.FEASIBLE, schedule, None if margins else bound_s, "", request.clock.seconds, request.settings
        result = Result(request.graph, asked_bytes, *found)
        if self._is_better(result):  # addresses take a second or more
            self.offer(result)

    def _note_progress(self, progress: SolveProgress) -> None:
        self._found |= progress.best_s is not None
        if self.request.on_progress is not None:
            self.request.on_progress(progress)

    def offer(self, result: Result) -> int:
        """Keep `result` if it fits and is the fastest; return the bytes that it reserves above the budget, 0 without a schedule.

        In an arena, bytes above 0 may be a lower bound.
        """
        if result.status is Status.ERROR:
            self._error = result
        request = self.request
        if result.schedule is None:
            return 0
        self._found = True
        excess_bytes = self._predict_excess_bytes(result.schedule)
        if excess_bytes <= 0 and self._is_better(result):
            self.best = result
            if request.on_schedule is not None:
                request.on_schedule(result.schedule, self.bound_s or result.bound_s or 0.0)
        return excess_bytes

    def _predict_excess_bytes(self, schedule: Schedule) -> int:
        """Return the bytes that `schedule` reserves above the budget, in an arena if it may have one."""
        if schedule not in self._judged:  # solves that are close begin with the same schedules, and end with them
            self._judged[schedule] = self._judge(schedule)
        excess_bytes, arena_excess_bytes = self._judged[schedule]
        if arena_excess_bytes is not None:
            self._arena_excess_bytes = arena_excess_bytes
        return excess_bytes

    def _judge(self, schedule: Schedule) -> tuple[int, int | None]:
        """Return the bytes that `schedule` reserves above the budget, and the least in an arena, where it may need one."""
        budget_bytes, training = self.request.budget_bytes, DeviceTraining.of(self.request.graph, schedule, self.memory)
        usual_bytes = None if self.arena else self._note_least(schedule, training.usual_bytes)
        if usual_bytes is not None and (self.arena is False or usual_bytes <= budget_bytes):
            return usual_bytes - budget_bytes, None
        least_bytes = arena_bytes = training.least_arena_bytes
        if arena_bytes <= budget_bytes:  # addresses take a second or more: not for what cannot fit
            arena_bytes = self._note_least(schedule, training.arena_bytes)
        return min(arena_bytes, arena_bytes if usual_bytes is None else usual_bytes) - budget_bytes, least_bytes - budget_bytes

    def _note_least(self, schedule: Schedule, reserved_bytes: int) -> int:
        """Return the bytes reserved for `schedule`, and remember the least."""
        if self._least_bytes is None or reserved_bytes < self._least_bytes:
            self._least_bytes = reserved_bytes
            if self.on_least is not None:
                self.on_least(schedule)
        return reserved_bytes

    def _is_better(self, result: Result) -> bool:
        """Return True if `result` takes less time than the best that fits."""
        return self.best is None or (result.time_s or math.inf) < (self.best.time_s or 0.0)

    def compute_margins(self, schedule: Schedule, most_bytes: int) -> Margins:
        """Return margins that lower the memory at each op where reserved memory grows above the budget by this growth.

        An op whose own tensors and workspace need more than the lowered memory has none.
        """
        graph = self.request.graph
        in_memory = simulate(graph, schedule).memory_bytes
        found: dict[int, int] = {}
        training = DeviceTraining.of(graph, schedule, self.memory)
        for index, more_bytes in training.find_growth_above(self.request.budget_bytes).items():
            step = schedule.steps[index]
            assert isinstance(step, Compute)  # which alone asks for memory
            op = graph.ops[step.op]
            own = (graph.tensors[t] for t in {*op.inputs, *op.outputs})
            own_bytes = op.workspace_bytes + sum(t.size_bytes for t in own if t.pool == DEVICE and not t.static)
            rest_bytes = in_memory[index] - more_bytes
            if rest_bytes >= graph.static_bytes + own_bytes:
                found[op.id] = max(found.get(op.id, 0), most_bytes - rest_bytes)
        return found

    def learn(self, asked_bytes: int, result: Result) -> int:
        """Learn from the result of a solve for `asked_bytes`; return the bytes that it reserves above the budget."""
        excess_bytes = self.offer(result)
        if result.schedule is not None:
            self._start = Start.of(result.schedule, result.settings)
            if excess_bytes <= 0:
                self._is_unfinished = result.ended is Ending.LIMIT
        self.bracket.learn(asked_bytes, result.peak_bytes, excess_bytes + self.request.budget_bytes)
        return excess_bytes

    def is_over(self) -> bool:
        """Return True if the clock is at its limit, a solve failed, or the caller stops, or the best is as good as the bound.

        A caller that does not insist is not heard before a schedule fits.
        """
        if self._error is not None or self._is_late():
            return True
        return self.best is not None and (self._get_status(self.best) in SOLVED or self.request.is_interrupted())

    def is_new(self, asked_bytes: int) -> bool:
        """Return True if no schedule that fits was found for this budget of allocated bytes."""
        return self.bracket.fits is None or asked_bytes != self.bracket.fits[0]

    def choose_next_bytes(self) -> int | None:
        """Return the budget of allocated bytes to solve for next; None if nothing can be gained any more.

        The largest budget that is not too much is solved again if that solve had too little time.
        """
        bracket = self.bracket
        close_bytes = 1 if self.best is None else _CLOSEST * self.request.budget_bytes
        asked_bytes = bracket.choose_next_bytes(close_bytes, self._arena_excess_bytes if bracket.missed > 1 else 0)
        if asked_bytes is None and bracket.fits and self._is_unfinished:
            return bracket.fits[0]
        return asked_bytes

    def add_proof(self, first: SolvedOrder, again: SolvedOrder) -> SolvedOrder:
        """Return the solve for the whole budget whose bound holds for the best schedule: `again`, which went on, or `first`."""
        same = first.order.original == again.order.original
        if not same and (self.best is None or self.best.schedule != again.result.schedule):
            return first
        self.bound_s = max(one.result.bound_s or 0.0 for one in ([first, again] if same else [again]))
        return again

    def end(self, first: Result) -> Result:
        """Return the result of all solves, of which `first` was for the whole budget."""
        request, best = self.request, self.best
        if self._error is not None:
            return self._error
        return first.map_to(
            budget_bytes=request.budget_bytes,
            status=Status.LIMIT if best is None else self._get_status(best),
            schedule=None if best is None else best.schedule,
            time_s=None if best is None else best.time_s,
            peak_bytes=None if best is None else best.peak_bytes,
            bound_s=self.bound_s,  # those of later solves hold for fewer bytes only
            seconds=request.clock.seconds,
            settings=first.settings if best is None else self._build_settings(best),
            message=self._explain_nothing_found() if best is None else best.message,
            reason=None if best is not None else Reason.TIME if self._is_late() else Reason.MEMORY,
            ended=self._get_ending(best, first),
        )

    def _get_ending(self, best: Result | None, first: Result) -> Ending | None:
        """Return the reason for the end; None if the gap is within the tolerance."""
        if best is not None and self._get_status(best) in SOLVED:
            return None
        return Ending.STOPPED if self.must_stop() else self.request.choose_ending(first.ended)

    def _build_settings(self, best: Result) -> SolveSettings:
        tolerance = None if best.settings.tolerance is None else self._get_tolerance(best)
        return replace(best.settings, tolerance=tolerance, allocated_budget_bytes=best.budget_bytes)

    def _is_late(self) -> bool:
        """Return True if the clock is at its limit, or the caller insists on the end."""
        return measure_rest(self.request.clock) <= 0 or self.must_stop()

    def _explain_nothing_found(self) -> str:
        """Return the message that no schedule fits."""
        told = self._least_bytes is None or self.on_least is not None  # the caller names what it is told of
        known = "" if told else f": the least found is {format_enough(self._least_bytes or 0)}"
        none = f"no schedule was found that reserves at most {format_bytes(self.request.budget_bytes)}{known}. Raise the budget"
        if self.arena:
            return f"{none} or the time limit."
        expandable = f"memory={self.memory.expandable.value!r}, with expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF"
        segments = "" if self.memory.is_expandable else f"expandable segments ({expandable}), or "
        return f"{none}, or let it count {segments}only allocated memory (memory={CountedMemory.ALLOCATED.value!r})."

    def _get_status(self, result: Result) -> Status:
        return decide_status(result.time_s, self.bound_s, self._get_tolerance(result))

    def _get_tolerance(self, result: Result) -> float:
        """Return the tolerance that `result` was settled for, by the time of all solves."""
        request = self.request
        return request.tolerance.compute_settled(request.clock.now, partial(is_within, result.time_s, self.bound_s))


def combine_stops(stop: Callable[[], bool] | None, other: Callable[[], bool] | None) -> Callable[[], bool] | None:
    """Return a function that is True if one of the two is; None if both are None."""
    if stop is None or other is None:
        return stop or other
    return lambda: stop() or other()
