"""Results at several budgets, shared among them, and the order in which budgets are solved. Never imports torch.

A schedule counts at every larger budget, and a bound at every smaller one: what one solve finds is used for all. Turns get longer
each time: a solve starts from the schedules and the windows that are known, but its first programs take as long as before. A
schedule in another order may be faster than the bounds of this one, and so counts only where none in this order fits; there, the
other order is solved.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from planner.graphs.errors import PlannerError
from planner.graphs.options import remove_options
from planner.graphs.options.offload import remove_offload
from planner.graphs.reordering import Reordering, permute
from planner.graphs.schedule import Schedule, keep_everything
from planner.graphs.simulate import simulate
from planner.graphs.units import format_bytes
from planner.memory.least_budget import LeastBudget
from planner.memory.reserved import predict_beside, predict_counted_bytes, predict_reserved_bytes
from planner.plans.select_attributes import select_attributes
from planner.settings.counted_memory import CountedMemory
from planner.solvers.bounds import bound_least_budget
from planner.solvers.clock import Clock, WallClock, measure_rest
from planner.solvers.pass_ends import add_pass_ends
from planner.solvers.request import Start
from planner.solvers.result import SOLVED, Ending, Reason, Result, Status, compute_gap, decide_status
from planner.studies.jobs import run
from planner.studies.solves import solve_in_order
from planner.studies.workers import ignore

_ANY_BUDGET = math.inf  # a bound at this budget holds everywhere
_SHORTEST_S = 0.5  # seconds of a turn
_LONGER = 1.5  # times the last one, as long as there is time for that at some budget
_DECIDED = (*SOLVED, Status.INFEASIBLE)


@dataclass(frozen=True, slots=True)
class Point:
    """The known result at one budget. Unknown values are None.

    Attributes:
        budget_bytes: the budget, static memory included.
        status: as in ``planner.solvers.result.Status``.
        schedule: the fastest schedule known to fit, found at any budget.
        bound_s: lower bound on the time within the budget, for the class of schedules that the solver searches.
        reserved_bytes: bytes that PyTorch's allocator reserves on CUDA for training by the schedule, as the budget counts it.
        seconds: duration of the solve at this budget; None if results at other budgets sufficed, or none was started.
        ended: why there was no more search although this is not decided; None if it is, or the solver does not search.
    """

    budget_bytes: int
    status: Status
    schedule: Schedule | None
    peak_bytes: int | None
    time_s: float | None
    bound_s: float | None
    seconds: float | None
    reserved_bytes: int | None = None
    ended: Ending | None = None

    @property
    def gap(self) -> float | None:
        """The gap, as in ``Result.gap``."""
        return compute_gap(self.time_s, self.bound_s)


def divide_evenly(low_bytes: int, high_bytes: int, count: int) -> tuple[int, ...]:
    """Return `count` (1 or more) integer budgets from `low_bytes` to `high_bytes`, both included; duplicates are removed."""
    if count == 1:
        return (low_bytes,)
    width = high_bytes - low_bytes
    return tuple(sorted({low_bytes + width * i // (count - 1) for i in range(count)}))


def order_outside_in(count: int) -> Iterator[int]:
    """Yield 0 .. `count` - 1: both ends first, then the middles between numbers that were yielded."""
    if count < 1:
        return
    yield count - 1
    if count > 1:
        yield 0
    gaps = [(0, count - 1)]
    for low, high in gaps:
        middle = (low + high) // 2
        if low < middle < high:
            yield middle
            gaps += [(middle, high), (low, middle)]


@dataclass(frozen=True, slots=True)
class _Known:
    """A schedule, its needs, and of them the bytes that a budget must have; `reserved_bytes` are those without an arena."""

    time_s: float
    counted_bytes: int
    peak_bytes: int
    reserved_bytes: int | None
    schedule: Schedule


@dataclass(slots=True)
class _KnownInOrder:
    """Bounds, with the budgets that they hold for, and schedules, in one order of first executions."""

    order: Reordering
    bounds: list[tuple[float, float]]
    schedules: list[_Known] = field(default_factory=list)

    def list_fitting(self, budget_bytes: int) -> list[_Known]:
        return [known for known in self.schedules if known.counted_bytes <= budget_bytes]


class Frontier:
    """All known results on a graph, whatever the budget they were found at.

    Attributes:
        order: the order of ops in which the graph is solved first; schedules are those of its source.
        memory: kind of memory that budgets count.
    """

    def __init__(self, order: Reordering, tolerance: float, memory: CountedMemory = CountedMemory.ALLOCATED) -> None:
        graph = order.source
        self.order = order
        self.tolerance = tolerance
        self.memory = memory
        self.infeasible_bytes = -1  # proved infeasible up to this budget
        # With alternative ops or devices, a step may take less time than its program.
        self._least_s = graph.time_s if remove_offload(graph)[0].plain else 0.0
        self._orders: list[_KnownInOrder] = []
        self._add_order(order, order.map_back(keep_everything(remove_options(order.graph))))

    @property
    def orders(self) -> tuple[Reordering, ...]:
        """The orders of ops in which the graph is solved."""
        return tuple(known.order for known in self._orders)

    def choose_order(self, budget_bytes: int) -> int:
        """Return the place in `orders` of the first in which a schedule is known to fit; 0 if there is none."""
        return next((place for place, known in enumerate(self._orders) if known.list_fitting(budget_bytes)), 0)

    def _add_order(self, order: Reordering, schedule: Schedule) -> None:
        self._orders.append(_KnownInOrder(order, [(_ANY_BUDGET, self._least_s)], [self._judge(schedule)]))

    def _judge(self, schedule: Schedule) -> _Known:
        found = simulate(self.order.source, schedule)
        graph, memory = self.order.source, self.memory
        needed_bytes = predict_counted_bytes(graph, schedule, memory)
        return _Known(found.time_s, needed_bytes, found.peak_bytes, predict_reserved_bytes(graph, schedule, memory), schedule)

    def learn_least(self, least: LeastBudget) -> None:
        """Add the schedules of the search for the least budget of the graph, and the bound of single ops in this order.

        A schedule in another order counts only where none in this order fits.
        """
        proved_bytes = bound_least_budget(add_pass_ends(self.order.graph).graph).budget_bytes
        if not self._counts_allocated:
            proved_bytes = predict_beside(self.order.source, self.memory).bound(proved_bytes)
        self.infeasible_bytes = max(self.infeasible_bytes, proved_bytes - 1)
        for found in (least, *least.larger):
            if found.order == self.order.original:
                self._orders[0].schedules.append(self._judge(found.schedule))
        if least.order != self.order.original:
            self._add_order(permute(self.order.source, least.order), least.schedule)

    @property
    def _counts_allocated(self) -> bool:
        return self.memory is CountedMemory.ALLOCATED

    def learn(self, result: Result, place: int = 0) -> None:
        """Add the result of a solve in the order at `place` of `orders`."""
        if result.status is Status.ERROR:
            raise PlannerError(f"the solver {result.solver} failed: {result.message}")
        if result.status is Status.INFEASIBLE:
            self.infeasible_bytes = max(self.infeasible_bytes, result.budget_bytes)
        if result.bound_s is not None:
            self._orders[place].bounds.append((result.budget_bytes, result.bound_s))
        if result.schedule is not None:
            self._orders[place].schedules.append(self._judge(result.schedule))

    def get_point(self, budget_bytes: int, seconds: float | None) -> Point:
        """Return the known result at a budget."""
        in_order = self._orders[self.choose_order(budget_bytes)]
        # What no schedule can do in more memory it cannot do in less.
        bound_s = max(bound_s for at, bound_s in in_order.bounds if at >= budget_bytes)
        fitting = in_order.list_fitting(budget_bytes)
        if not fitting and budget_bytes <= self.infeasible_bytes:
            return Point(budget_bytes, Status.INFEASIBLE, None, None, None, None, seconds)
        if not fitting:
            return Point(budget_bytes, Status.LIMIT, None, None, None, bound_s, seconds)
        found = min(fitting, key=lambda known: (known.time_s, known.peak_bytes))
        reserved_bytes = found.reserved_bytes
        if reserved_bytes is not None and reserved_bytes > budget_bytes and not self._counts_allocated:
            reserved_bytes = found.counted_bytes  # in an arena
        return Point(
            budget_bytes,
            status=decide_status(found.time_s, bound_s, self.tolerance),
            **select_attributes(found, "schedule", "peak_bytes", "time_s"),
            reserved_bytes=reserved_bytes,
            bound_s=bound_s,
            seconds=seconds,
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """A solve of the curve: its budget, its time limit, the place of its order in ``Frontier.orders``, and what is known."""

    budget_bytes: int
    time_limit_s: float
    place: int = 0
    start: Start | None = None


@dataclass(slots=True)
class Turns:
    """A queue of budgets with time limits, updated by the results so far.

    Every budget gets a short turn first, outside in. Budgets with a gap then get longer turns, the largest gap first, until all
    are decided, nothing is left to try, or the time is over.

    Attributes:
        time_limit_s: for each budget.
        jobs: number of parallel turns.
        first_share: of the remaining time, for one turn of each budget, if there are several.
        waiting: the budgets of the present round that have had no turn in it.
        seconds: time for which each budget was solved.
    """

    known: Frontier
    budgets: tuple[int, ...]
    clock: Clock
    time_limit_s: float
    jobs: int = 1
    on_activity: Callable[[str], object] = ignore
    first_share: float = 0.5
    waiting: list[int] = field(init=False)
    seconds: dict[int, float] = field(init=False, default_factory=dict)
    _limits_s: dict[int, float] = field(init=False, default_factory=dict)  # of the last turns
    _last: dict[int, Result] = field(init=False, default_factory=dict)  # of each budget
    _solving: dict[int, int] = field(init=False, default_factory=dict)  # places of orders by budget

    def __post_init__(self) -> None:
        self.waiting = [self.budgets[i] for i in order_outside_in(len(self.budgets))]

    def run(self, should_stop: Callable[[], bool], *, solver: str = "windows", cluster: str | None = None) -> None:
        """Solve until there is no turn left, or `should_stop` returns True."""
        job = partial(_solve, self.known.orders, self.known.memory, self.known.tolerance, solver)
        for result in run(job, self.take, should_stop, jobs=self.jobs, cluster=cluster):
            self.learn(result)

    @property
    def finished(self) -> bool:
        """True if every budget has had a turn or needs none."""
        return all(budget in self.seconds for budget in self._open())

    def take(self) -> Turn | None:
        """Return the next turn; None if there is none left."""
        unsettled = self._open()
        self.waiting = [budget for budget in self.waiting if budget in unsettled]
        if not self.waiting:
            self._begin_round([budget for budget in unsettled if budget not in self._solving])
        if not self.waiting or measure_rest(self.clock) <= 0:
            return None
        budget = self.waiting.pop(0)
        limit_s = self._limit_s(budget, 1 + len(self.waiting), self.first_share if self._is_first(budget, unsettled) else 1.0)
        self._limits_s[budget] = limit_s
        self._solving[budget] = place = self.known.choose_order(budget)
        self._tell(budget, limit_s, len(unsettled))
        return Turn(budget, limit_s, place, self._find_start(budget))

    def learn(self, result: Result) -> None:
        """Add the result of a solve."""
        budget = result.budget_bytes
        self.seconds[budget] = self.seconds.get(budget, 0.0) + result.seconds
        self._last[budget] = result
        self.known.learn(result, self._solving.pop(budget, 0))

    def get_point(self, budget_bytes: int) -> Point:
        """Return the known result at a budget."""
        point = self.known.get_point(budget_bytes, self.seconds.get(budget_bytes))
        return point if point.status in _DECIDED else replace(point, ended=self._get_ending(budget_bytes))

    def _get_ending(self, budget: int) -> Ending | None:
        """Return why the last turn of a budget ended that is not decided, or why it had none."""
        if (last := self._last.get(budget)) is None:
            return Ending.LIMIT if measure_rest(self.clock) <= 0 else Ending.STOPPED
        return last.ended or (Ending.LIMIT if last.reason is Reason.TIME and self._took_all(last) else None)

    def _find_start(self, budget: int) -> Start | None:
        """Return the schedule that is known for a budget, with the windows of its last turn; None if there is none.

        A first turn finds one sooner than it plans addresses for one that is known.
        """
        last, schedule = self._last.get(budget), self.known.get_point(budget, None).schedule
        return None if last is None or schedule is None else Start.of(schedule, last.settings)

    def _open(self) -> list[int]:
        """Return the budgets that are not settled."""
        return [budget for budget in self.budgets if self.known.get_point(budget, None).status not in _DECIDED]

    def _is_first(self, budget: int, unsettled: Sequence[int]) -> bool:
        """Return True if this is the first turn of a budget, and others are `unsettled` as well."""
        return budget not in self.seconds and len(unsettled) > 1

    def _begin_round(self, budgets: list[int]) -> None:
        """Queue those of `budgets` whose next turn would be notably longer than their last, or the one of the largest gap."""
        gaps = {budget: self.get_point(budget).gap for budget in budgets if self._may_gain(budget)}
        largest = sorted(gaps, key=lambda budget: math.inf if (gap := gaps[budget]) is None else gap, reverse=True)
        for budget in largest:
            if self._limit_s(budget, 1 + len(self.waiting)) >= _LONGER * self._limits_s.get(budget, 0.0):
                self.waiting.append(budget)
        if not self.waiting and not self._solving:
            self.waiting = [budget for budget in largest if self._limit_s(budget, 1) > 0][:1]

    def _may_gain(self, budget: int) -> bool:
        """Return True if a further turn may find more than the last; without one, another order has settled the budget before."""
        if (last := self._last.get(budget)) is None:
            return True
        return last.ended is Ending.LIMIT or (last.status is Status.LIMIT and self._took_all(last))

    def _took_all(self, last: Result) -> bool:
        """Return True if the last turn of a budget took all of its time."""
        return last.seconds >= self._limits_s[last.budget_bytes]

    def _limit_s(self, budget: int, sharing: int, share: float = 1.0) -> float:
        """Return the time limit of a turn that has a `share` of what is left, when `sharing` budgets are queued."""
        left_s = measure_rest(self.clock)
        own_s = self.time_limit_s - self.seconds.get(budget, 0.0)
        return min(own_s, left_s, max(_SHORTEST_S, share * left_s * self.jobs / sharing))

    def _tell(self, budget: int, limit_s: float, unsettled: int) -> None:
        again = "again, " if budget in self.seconds else ""
        settled = f"{len(self.budgets) - unsettled} of {len(self.budgets)} budgets settled"
        self.on_activity(f"solving {format_bytes(budget)}, {again}for up to {limit_s:.0f} s; {settled}")


def _solve(
    orders: Sequence[Reordering],
    memory: CountedMemory,
    tolerance: float,
    solver: str,
    turn: Turn,
    should_stop: Callable[[], bool],
) -> Result:
    asked = turn.budget_bytes, memory, WallClock(turn.time_limit_s)
    settings = dict[str, Any](solver=solver, tolerance=tolerance, start=turn.start)
    return solve_in_order(orders[turn.place], *asked, must_stop=should_stop, **settings)
