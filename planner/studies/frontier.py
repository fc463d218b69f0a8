"""What is known of a graph at several budgets, and which of them is solved next. Never imports torch."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from graphs.errors import PlannerError
from graphs.ir import Graph
from graphs.options import without_options
from graphs.options.offload import without_copies
from graphs.plan import relative_gap
from graphs.schedule import Schedule
from graphs.simulate import simulate
from solvers.policies.store_all import store_all
from solvers.result import Result, Status, status_of

_ANY_BUDGET = math.inf  # a bound found here holds everywhere


@dataclass(frozen=True, slots=True)
class Point:
    """What is known at one budget. What is unknown is None.

    Attributes:
        budget_bytes: static bytes included.
        status: as in ``solvers.result.Status``.
        schedule: the fastest that is known to fit; it may have been found for another budget.
        peak_bytes, time_s: of the schedule.
        bound_s: no schedule (of the class the solver searches) within the budget is faster.
        seconds: of the solve at this budget; None where the answers at others were enough, or none was begun.
    """

    budget_bytes: int
    status: Status
    schedule: Schedule | None
    peak_bytes: int | None
    time_s: float | None
    bound_s: float | None
    seconds: float | None

    @property
    def gap(self) -> float | None:
        """As in ``Result.gap``."""
        return relative_gap(self.time_s, self.bound_s)


def evenly(low_bytes: int, high_bytes: int, count: int) -> tuple[int, ...]:
    """`count` (1 or more) whole budgets from `low_bytes` to `high_bytes`, both included; fewer where they coincide."""
    if count == 1:
        return (low_bytes,)
    width = high_bytes - low_bytes
    return tuple(sorted({low_bytes + width * i // (count - 1) for i in range(count)}))


def outside_in(count: int) -> Iterator[int]:
    """0 .. `count` - 1: both ends, then always the middle of what is between two that were named."""
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


class Frontier:
    """All that is known of a graph, whatever the budget it was found at."""

    def __init__(self, graph: Graph, tolerance: float) -> None:
        self.graph = graph
        self.tolerance = tolerance
        self.infeasible_bytes = -1  # nothing fits into this much
        # With other ways to compute an op, or other devices, a step may take less than its program.
        least_s = graph.time_s if without_copies(graph)[0].plain else 0.0
        self.bounds: list[tuple[float, float]] = [(_ANY_BUDGET, least_s)]
        self.schedules: list[tuple[float, int, Schedule]] = []
        self.learn_schedule(store_all(without_options(graph)))

    def learn_schedule(self, schedule: Schedule) -> None:
        """A schedule that runs, whatever it was found for."""
        simulation = simulate(self.graph, schedule)
        self.schedules.append((simulation.time_s, simulation.peak_bytes, schedule))

    def learn(self, result: Result) -> None:
        """What a solve came to."""
        if result.status is Status.ERROR:
            raise PlannerError(f"the solver {result.solver} failed: {result.message}")
        if result.status is Status.INFEASIBLE:
            self.infeasible_bytes = max(self.infeasible_bytes, result.budget_bytes)
        if result.bound_s is not None:
            self.bounds.append((result.budget_bytes, result.bound_s))
        if result.schedule is not None:
            self.learn_schedule(result.schedule)

    def point(self, budget_bytes: int, seconds: float | None) -> Point:
        """What is known at a budget."""
        if budget_bytes <= self.infeasible_bytes:
            return Point(budget_bytes, Status.INFEASIBLE, None, None, None, None, seconds)
        bound_s = max(bound_s for at, bound_s in self.bounds if at >= budget_bytes)
        fitting = [found for found in self.schedules if found[1] <= budget_bytes]
        if not fitting:
            return Point(budget_bytes, Status.LIMIT, None, None, None, bound_s, seconds)
        time_s, peak_bytes, schedule = min(fitting, key=lambda found: found[:2])
        return Point(budget_bytes, status_of(time_s, bound_s, self.tolerance), schedule, peak_bytes, time_s, bound_s, seconds)


class Turns:
    """Which budget is solved next, and what has come of those before."""

    def __init__(self, known: Frontier, budgets: tuple[int, ...], on_point: Callable[[int, int], None] | None) -> None:
        self.known = known
        self.waiting = [budgets[i] for i in outside_in(len(budgets))]
        self.count = len(budgets)
        self.seconds: dict[int, float] = {}
        self.solving = 0
        self._on_point = on_point

    @property
    def finished(self) -> bool:
        """Whether every budget has had its turn, or needs none."""
        self._drop_settled()
        return not self.waiting and not self.solving

    def take(self) -> int | None:
        """The next budget to solve; None when there is none left."""
        self._drop_settled()
        self._tell()
        if not self.waiting:
            return None
        self.solving += 1
        return self.waiting.pop(0)

    def learn(self, result: Result) -> None:
        """What a solve came to."""
        self.solving -= 1
        self.seconds[result.budget_bytes] = result.seconds
        self.known.learn(result)

    def point(self, budget_bytes: int) -> Point:
        """What is known at a budget."""
        return self.known.point(budget_bytes, self.seconds.get(budget_bytes))

    def _drop_settled(self) -> None:
        settled = (Status.OPTIMAL, Status.INFEASIBLE)
        self.waiting = [budget for budget in self.waiting if self.point(budget).status not in settled]

    def _tell(self) -> None:
        if self._on_point is not None:
            self._on_point(self.count - len(self.waiting) - self.solving, self.count)
