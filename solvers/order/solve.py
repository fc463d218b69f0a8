"""Solves that may change the order of the ops: in program order first, then in a better order if that can gain.

A bound, or a proof of infeasibility, holds for schedules whose first executions are in the order of the solve. So schedule and
bound of a result are of the same order: a schedule in another order may be faster than the bound, and a gap between the two would
have no meaning.

Tried and given up: to search an order first, for up to a quarter of the limit. On graphs of 6,000 ops and more that took longer
than the proof in program order, and it gained nothing on transformers. Known weakness: the bound is that of one order. No other
bound holds for all orders than those of ``planner.solvers.bounds`` and ``planner.solvers.order.peak``.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from planner.graphs.ir import Graph
from planner.graphs.reordering import Reordering, keep_program_order
from planner.solvers.bounds import find_any_order_need
from planner.solvers.clock import BackgroundThread, Clock
from planner.solvers.order.reorder import find_order, lowers_peak, map_result_back, may_lower_peak, reorder_by
from planner.solvers.registry import Solver
from planner.solvers.request import Request, Start
from planner.solvers.result import SOLVED, Ending, Result, SolveProgress, Status, decide_status, is_within

_POLL = 0.05  # of the clock
_GRACE_S = 5.0  # wait for its end after a request to stop


class OrderSearch:
    """A search for an order in the background of a solve. Further solves of the same graph know what it found.

    Attributes:
        found: the order that it ended with, if that is not program order; None before.
        lowers_peak: True if keeping everything has a notably lower peak in it than in program order; None before this is known.
    """

    def __init__(self) -> None:
        self.found: Reordering | None = None
        self.lowers_peak: bool | None = None
        self._failure: Exception | None = None

    @contextmanager
    def run(self, graph: Graph, clock: Clock) -> Iterator[None]:
        """Search while the ``with`` statement is executed, unless an order of `graph` is known."""
        if self.found is None or self.found.source is not graph:
            self.found = self.lowers_peak = self._failure = None
        self._clock, self._cancelled = clock, False
        self._thread: BackgroundThread = clock.start(partial(self._search, graph))
        try:
            yield
        finally:
            self._cancelled = True
            self._thread.end(_GRACE_S)

    def wait(self, most: float) -> None:
        """Wait until it is known if an order lowers the peak, up to `most` of the clock."""
        until = self._clock.now + most
        while self._thread.running and self.lowers_peak is None and self._clock.now < until:
            self._thread.wait(_POLL)
        if self._failure is not None:
            raise self._failure

    def _search(self, graph: Graph) -> None:
        if self.found is not None:
            return
        try:
            promising = may_lower_peak(graph)
            self.lowers_peak = None if promising else False
            found = find_order(graph, self._clock, lambda: self._cancelled)
            self.found = found if found.changed else None
            self.lowers_peak = promising and lowers_peak(found)
        except Exception as error:  # noqa: BLE001 (raised in the thread that waits)
            self._failure = error


SEARCH_SHARE = 0.25  # share of the limit for the search of an order
_SEARCH_LEAST = 2.0  # of the clock: least time of a search that was begun with a shorter solve
_AGAIN, _AGAIN_LEAST = 4.0, 10.0  # time of a solve in another order: a multiple of the proof in program order, and at least
_REFUTED = 0.1  # of the tolerance: a solve in another order ends when it could gain no more
_TRIVIAL = 1e-9  # by which a bound is above the time of keeping everything, apart from rounding
_PATIENCE, _PATIENCE_SHARE = 30.0, 0.25  # of the clock, and of its limit: without any schedule in an order


@dataclass(frozen=True, slots=True)
class SolvedOrder:
    """A result, and the order of the ops in which it was found.

    Attributes:
        result: its schedule is one of the original graph.
    """

    result: Result
    order: Reordering


def solve_in(order: Reordering, solve: Solver, request: Request) -> SolvedOrder:
    """Solve `request`, with the ops of its graph in `order`."""
    asked = request.map_to(order.graph, order.map_back, order.schedule_of_graph)
    return SolvedOrder(map_result_back(order, solve(asked)), order)


def solve_reordered(solve: Solver, request: Request) -> SolvedOrder:
    """Search an order and solve in it; if nothing fits, solve in program order."""
    order = find_order(request.graph, request.clock.start_part(SEARCH_SHARE * request.clock.limit), request.is_interrupted)
    solved = solve_in(order, solve, request)
    return _solve_also_in_program_order(solved, solve, request)


def solve_in_best_order(solve: Solver, request: Request, search: OrderSearch | None = None) -> SolvedOrder:
    """Solve in program order, and in an order of lower peak if there is one that can gain.

    The order is searched in the background of the solve in program order, which ends when an order is found. Its proof stands;
    the other order is tried only if it lowers the peak of keeping everything, if more than the tolerance is left above the time
    of that, and for a time in proportion. If neither proves its schedule, the solve in program order goes on. If program order
    has no schedule, any order that needs less is tried, first that of the request's start. No order without a schedule takes the
    time of the others.

    Args:
        search: that of earlier solves of the same graph, which know its order.
    """
    solved = _solve_in_orders(solve, request, search or OrderSearch())
    if solved.result.ended is not Ending.STOPPED:
        return solved
    ended = request.choose_ending()  # it may be this module that has stopped it
    return replace(solved, result=solved.result.map_to(ended=ended))


def _solve_in_orders(solve: Solver, request: Request, search: OrderSearch) -> SolvedOrder:
    clock, began = request.clock, request.clock.now
    program = keep_program_order(request.graph)
    with search.run(request.graph, clock.start_part(SEARCH_SHARE * clock.limit)):
        patience = _Patience(request)
        stopping = replace(
            request,
            on_progress=patience,
            should_stop=lambda: (
                request.is_interrupted() or (search.found is not None and patience.is_bounded) or patience.give_up()
            ),
        )
        first = solve_in(program, solve, stopping)
        if request.is_stopped() or not _can_gain(first.result, request):
            return first
        took = clock.now - began
        # A quick proof would end the search for an order before it has begun; a long one has paid for it already.
        search.wait(max(_SEARCH_LEAST, took))
    if first.result.schedule is not None:
        if search.found is None or (first.result.status in SOLVED and not search.lowers_peak):
            return _choose_faster(first, _continue(first, solve, request)) if patience.gave_up else first
        best = _solve_again(first, search.found, took, solve, request)
        if first.result.status in SOLVED or best.result.status in SOLVED or request.is_stopped():
            return best
        faster = _choose_faster(best, _continue(first, solve, request))
        return _continue(best, solve, request) if faster is best and not request.is_stopped() else faster
    if request.graph.plain and request.budget_bytes < find_any_order_need(request.graph).total_bytes:
        return first  # a single op refutes the budget in every order
    order = _order_of_start(request) or search.found
    order = order or find_order(request.graph, clock.start_part(SEARCH_SHARE * clock.limit), request.is_interrupted)
    if order.changed:
        return _solve_only_in(first, order, solve, request)
    return solve_in(program, solve, request) if patience.gave_up else first


def _solve_only_in(first: SolvedOrder, order: Reordering, solve: Solver, request: Request) -> SolvedOrder:
    """Solve in `order` where `first`, in program order, has no schedule; go back to program order if `order` has none either."""
    if first.result.status is Status.INFEASIBLE:
        return solve_in(order, solve, request)
    patience = _Patience(request)
    impatient = replace(request, on_progress=patience, should_stop=lambda: request.is_interrupted() or patience.give_up())
    second = solve_in(order, solve, impatient)
    if second.result.schedule is not None:
        return _continue(second, solve, request) if patience.gave_up else second
    if request.is_stopped() or not (patience.gave_up or second.result.status is Status.INFEASIBLE):
        return second
    third = solve_in(first.order, solve, request)
    if third.result.status is not Status.INFEASIBLE:
        return third
    return second if second.result.status is Status.INFEASIBLE else solve_in(order, solve, request)


def _order_of_start(request: Request) -> Reordering | None:
    """Return the order of the request's start; None if it has none or is in program order."""
    if request.start is None or not request.graph.plain:
        return None
    order = reorder_by(request.graph, request.start.schedule)
    return order if order.changed else None


def _choose_faster(first: SolvedOrder, second: SolvedOrder) -> SolvedOrder:
    """Return the solve with the faster schedule or, of two that are as fast, with the higher bound; `second` if both are equal.

    A bound was lost here before: another solve of the same schedule that had little time has proved little.
    """
    (first_s, first_bound_s), (second_s, second_bound_s) = (
        (math.inf if result.time_s is None else result.time_s, result.bound_s or 0.0) for result in (first.result, second.result)
    )
    return first if (first_s, -first_bound_s) < (second_s, -second_bound_s) else second


def _continue(first: SolvedOrder, solve: Solver, request: Request) -> SolvedOrder:
    """Solve in the order of `first`, a shorter solve, again, from its schedule and windows; what it has proved stays proved."""
    known = first.result
    assert known.schedule is not None
    start = Start.of(known.schedule, known.settings)
    second = solve_in(first.order, solve, replace(request, start=start))
    if second.result.time_s is None:  # it has found nothing in its time, or failed
        return second if second.result.status is Status.ERROR else first
    if (known.bound_s or 0.0) <= (second.result.bound_s or 0.0):
        return _choose_faster(first, second)
    faster = _choose_faster(first, second).result
    tolerance = second.result.settings.tolerance or request.tolerance.first
    status = decide_status(faster.time_s, known.bound_s, tolerance)
    ended = (second.result.ended or request.choose_ending()) if status is Status.FEASIBLE else None
    settings = replace(second.result.settings, windows=list(start.windows) or second.result.settings.windows)
    return replace(first, result=faster.map_to(bound_s=known.bound_s, status=status, ended=ended, settings=settings))


def _can_gain(result: Result, request: Request) -> bool:
    """Return True if another order may have a schedule that is faster by more than the tolerance."""
    if result.time_s is None or not request.graph.plain:
        return True
    return not is_within(result.time_s, request.graph.time_s, request.tolerance.compute_at(request.clock.now))


def _solve_again(first: SolvedOrder, order: Reordering, took: float, solve: Solver, request: Request) -> SolvedOrder:
    """Solve in `order`, until it is known not to be faster than `first`, and return the better of the two."""
    clock, time_s = request.clock, first.result.time_s
    assert time_s is not None
    proved = first.result.status in SOLVED
    until = clock.now + max(_AGAIN_LEAST, _AGAIN * took) if proved else math.inf
    bounds_s, gained = [0.0], False

    def note(progress: SolveProgress) -> None:
        nonlocal gained
        bounds_s.append(progress.bound_s or 0.0)
        leads = progress.best_s is not None and progress.best_s <= time_s  # else the schedule and the bound of `first` are best
        best_s, bound_s = (progress.best_s, progress.bound_s) if leads else (time_s, first.result.bound_s)
        gained = not is_within(time_s, best_s, request.tolerance.first)
        request.tell(f"{progress.activity}, in another order of the ops", best_s, bound_s)

    def has_ended() -> bool:
        refuted = proved and is_within(time_s, bounds_s[-1], _REFUTED * request.tolerance.compute_at(clock.now))
        late = clock.now > until and not gained
        return refuted or late or (not proved and patience.give_up()) or request.is_interrupted()

    patience = _Patience(replace(request, on_progress=note))
    second = solve_in(order, solve, replace(request, on_progress=patience, should_stop=has_ended))
    found = second.result
    if found.time_s is None or found.time_s > time_s:
        return first
    gained = not is_within(time_s, found.time_s, request.tolerance.first)
    # A proved schedule is not given up for one that is hardly faster and has no proof.
    return second if gained or found.status in SOLVED or not proved else first


def _solve_also_in_program_order(solved: SolvedOrder, solve: Solver, request: Request) -> SolvedOrder:
    """Return `solved`, or the result in program order if nothing fits in its order."""
    if solved.result.status is not Status.INFEASIBLE or not solved.order.changed:
        return solved
    other = solve_in(keep_program_order(request.graph), solve, request)
    return solved if other.result.status is Status.INFEASIBLE else other


class _Patience:
    """A progress callback that notices if a solve has been without a schedule for too long.

    Attributes:
        gave_up: True once it has been; that solve may still have ended with a schedule.
        is_bounded: True if it has proved more than that no step is faster than keeping everything, or had a while for that. A
            solve that was stopped before left its schedule, which no other order improved, with all of its overhead for a gap.
    """

    def __init__(self, request: Request) -> None:
        self.gave_up = False
        self._request = request
        self._until = request.clock.now + min(_PATIENCE, _PATIENCE_SHARE * request.clock.limit)
        self._found = self._has_bound = False

    def __call__(self, progress: SolveProgress) -> None:
        self._found = self._found or progress.best_s is not None
        self._has_bound = self._has_bound or (progress.bound_s or 0.0) > (1 + _TRIVIAL) * self._request.graph.time_s
        self._request.tell(progress.activity, progress.best_s, progress.bound_s)

    @property
    def is_bounded(self) -> bool:
        return self._has_bound or self._request.clock.now > self._until

    def give_up(self) -> bool:
        """Return True once nothing was found for long, and from then on."""
        self.gave_up = self.gave_up or (not self._found and self._request.clock.now > self._until)
        return self.gave_up
