"""The largest batch, or other size, whose training step fits a budget: for the optimal schedule and for manual methods.

Never imports torch: graphs come from a function of the size.

Before, whole steps of several sizes were measured to guess from, which took all of the time, while solves take seconds. On the
CPU sizes are now found with modelled times, and only those that decide are measured. Known weaknesses: that smaller sizes fit if
a larger one does is assumed, and a graph whose ops change with the size is not extrapolated.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from planner.graphs.errors import GraphError, InfeasibleError, LimitError
from planner.graphs.ir import Graph
from planner.graphs.units import format_bytes, format_ratio
from planner.measure.scaling import GraphFit
from planner.memory.least_memory import StopWhenDecided
from planner.memory.reserved import choose_memory, predict_reserved_at
from planner.plans.solve import order_for
from planner.solvers.clock import WallClock
from planner.solvers.result import SOLVED, Result, Status
from planner.studies.sizes import OPTIMAL, LargestSize, SizedMethod, Wanted
from planner.studies.solves import solve_in_order
from planner.studies.workers import ignore, return_false

# Tolerances: any schedule is accepted; the callback ends the solve earlier.
_ANY_GAP, _CLOSE_GAP = 1e6, 1e-4
_GUESS_S = 5.0  # seconds for each solve of a guess


def find_max_batch(
    graph_of: Callable[[int], Graph],
    wanted: Wanted,
    *,
    on_activity: Callable[[str], object] = ignore,
    should_stop: Callable[[], bool] = return_false,
) -> tuple[LargestSize, ...]:
    """Return the largest size for each of `wanted.methods`.

    It is assumed that if a size fits, all smaller ones do. Graphs of a few sizes give a guess by linear or quadratic
    extrapolation; around it real graphs decide.

    Args:
        graph_of: returns the graph of a size in units. MemoryError: it cannot be measured at this size, and is extrapolated.
        should_stop: polled; once True, the largest sizes so far are returned.

    Raises:
        InfeasibleError: proved: not even the least size fits.
        LimitError: none was found to fit in the time given, or before it was stopped.
    """
    search = _SizeSearch(graph_of, wanted, on_activity, should_stop)
    answers: list[LargestSize] = []
    for method in wanted.methods:
        beyond = max((answer.size or 0 for answer in answers), default=0) // wanted.unit if method.solver == OPTIMAL else 0
        answers.append(search.answer(method, beyond))
    if all(answer.size is None for answer in answers):
        raise _build_refusal(answers[-1], wanted)
    return tuple(answers)


def find_largest(fits: Callable[[int], bool], *, first: int, limit: int, low: int = 0) -> int:
    """Return the largest number from `low` + 1 to `limit` that fits; `low` if none does.

    If a number fits, all smaller ones must. The search starts near `first`, doubles its steps, then bisects.
    """
    high, asked, step = limit + 1, min(max(first, low + 1), limit), 1
    begin = low
    while high - low > 1:
        if fits(asked):
            low = asked
        else:
            high = asked
        if low == begin:
            asked = max(low + 1, high - step)
        elif high > limit:
            asked = min(limit, low + step)
        else:
            asked = (low + high) // 2
        step *= 2
    return low


class _StoppedError(Exception):
    pass


@dataclass(frozen=True, slots=True)
class _Decision:
    """The result of a solver, and whether it proves feasibility; `fits` is None if it proves neither."""

    fits: bool | None
    result: Result


@dataclass(slots=True)
class _SizeSearch:
    graph_of: Callable[[int], Graph]
    wanted: Wanted
    tell: Callable[[str], object]
    should_stop: Callable[[], bool]
    extrapolated: set[int] = field(default_factory=set)
    found: dict[int, list[Result]] = field(default_factory=dict)  # by size in units, the results with a schedule
    _graphs: dict[int, Graph] = field(default_factory=dict)
    _line: GraphFit | None = None
    _line_tried: bool = False

    def answer(self, method: SizedMethod, beyond: int) -> LargestSize:
        """Return the largest size of one method; `beyond` units are known to fit."""
        decided: dict[int, _Decision] = {}
        complete, unit = True, self.wanted.unit
        try:
            first = self.guess(method, beyond)
            find_largest(partial(self.fits, method, decided), first=first, limit=self.wanted.limit, low=beyond)
        except _StoppedError:
            complete = False
        units = max((n for n, decision in decided.items() if decision.fits), default=beyond)
        undecided = min((n * unit for n, decision in decided.items() if decision.fits is None), default=None)
        if not units:
            refused = decided[min(decided)].result if decided else None
            return LargestSize(method.name, None, False, undecided, complete, False, refused, 0.0)
        result = self.solve_best(method, units) if method.solver == OPTIMAL else decided[units].result
        schedule, offered = None if result is None else result.schedule, method.options.apply(self.build_graph(units))
        return LargestSize(
            method=method.name,
            size=units * unit,
            at_limit=units == self.wanted.limit,
            undecided=undecided,
            complete=complete,
            extrapolated=units in self.extrapolated,
            result=result,
            reserved_bytes=predict_reserved_at(
                offered, schedule, choose_memory(offered, self.wanted.memory), self.wanted.budget_bytes
            ),
            keep_everything_time_s=self.build_graph(units).time_s,
        )

    def fits(self, method: SizedMethod, decided: dict[int, _Decision], units: int) -> bool:
        """Return True if `method` is sure to have a schedule at a size; the decision is added to those `decided`."""
        self.check()
        graph, activity = self.build_graph(units), self.describe_work(method, units)
        decided[units] = self.decide(method, graph, activity, self.wanted.time_limit_s)
        if decided[units].fits:
            self.keep(units, decided[units].result)
        return bool(decided[units].fits)

    def describe_work(self, method: SizedMethod, units: int) -> str:
        return f"{method.name}: {self.wanted.varies} {units * self.wanted.unit}"

    def check(self) -> None:
        if self.should_stop():
            raise _StoppedError

    def keep(self, units: int, result: Result) -> None:
        if result.schedule is not None:
            self.found.setdefault(units, []).append(result)

    def decide(self, method: SizedMethod, graph: Graph, activity: str, limit_s: float) -> _Decision:
        """Return True if `method` has a schedule of `graph` within the budget and the overhead."""
        self.tell(activity)
        max_overhead = self.wanted.max_overhead
        cap_s = math.inf if max_overhead is None else graph.time_s + max_overhead * graph.step_s
        decision = StopWhenDecided(cap_s, self.should_stop)
        tolerance, stop = _ANY_GAP if max_overhead is None else _CLOSE_GAP, decision.is_reached
        result = self.solve(method, graph, limit_s, tolerance=tolerance, on_progress=decision, should_stop=stop)
        if result.time_s is not None and result.time_s <= cap_s:
            return _Decision(True, result)
        proved = result.status in (Status.INFEASIBLE, *SOLVED) or decision.is_refuted(result.bound_s)
        # A heuristic that finds nothing does not fit by definition; the exact solver may only have lacked time.
        return _Decision(False if method.solver != OPTIMAL or proved else None, result)

    def solve_best(self, method: SizedMethod, units: int) -> Result:
        """Return the fastest schedule at a size that is feasible."""
        self.tell(f"{self.describe_work(method, units)}, its fastest schedule")
        if not self.should_stop():
            graph, wanted = self.build_graph(units), self.wanted
            result = self.solve(method, graph, wanted.time_limit_s, tolerance=wanted.tolerance, should_stop=self.should_stop)
            self.keep(units, result)
        # Of schedules that are as fast, the last, whose solve had the time for a proof, and the options of the method.
        return min(reversed(self.found[units]), key=lambda result: result.time_s or 0.0)

    def solve(self, method: SizedMethod, graph: Graph, limit_s: float, **settings: Any) -> Result:
        """Return the result of `method` for `graph`, reordered if that lowers the peak.

        `settings` are those of ``solve_in_order``.
        """
        order = order_for(method.options.apply(graph), method.solver, reorder=None if self.wanted.reorder else False)
        asked = self.wanted.budget_bytes, choose_memory(graph, self.wanted.memory), WallClock(limit_s), method.solver
        return solve_in_order(order, *asked, must_stop=self.should_stop, **settings)

    def guess(self, method: SizedMethod, beyond: int) -> int:
        """Return a guess of the largest feasible size in units: as wanted, extrapolated, or the first size to try."""
        if method.name in self.wanted.guesses:
            return max(beyond + 1, self.wanted.guesses[method.name])
        line, first = self.fit_line(), max(self.wanted.first, beyond + 1)
        if line is None:
            return first
        return max(1, find_largest(partial(self.may_fit, method, line), first=first, limit=self.wanted.limit, low=beyond))

    def may_fit(self, method: SizedMethod, line: GraphFit, units: int) -> bool:
        """Return True if `method` has a schedule of the extrapolated graph of a size, found in a short time."""
        self.check()
        activity, limit_s = f"guessing, {self.describe_work(method, units)}", min(_GUESS_S, self.wanted.time_limit_s)
        return bool(self.decide(method, line.build_graph((units,)), activity, limit_s).fits)

    def fit_line(self) -> GraphFit | None:
        """Return the fit through sample sizes whose graphs have the same ops; None if they differ or cannot be captured."""
        if not self._line_tried and self.wanted.limit >= max(self.wanted.samples):
            self._line_tried = True
            with suppress(GraphError, MemoryError):
                self._line = GraphFit({(units,): self.capture(units) for units in self.wanted.samples})
        return self._line

    def build_graph(self, units: int) -> Graph:
        if units not in self._graphs:
            try:
                self.capture(units)
            except MemoryError:
                line = self.fit_line()
                if line is None:
                    raise LimitError(
                        f"measuring {self.wanted.name_size(units)} ran out of memory: use --roofline to model a device instead"
                    ) from None
                self.extrapolated.add(units)
                self._graphs[units] = line.build_graph((units,))
        return self._graphs[units]

    def capture(self, units: int) -> Graph:
        if units not in self._graphs:
            self.tell(f"tracing {self.wanted.varies} {units * self.wanted.unit}")
            self._graphs[units] = self.graph_of(units)
            self.check()
        return self._graphs[units]


def _build_refusal(answer: LargestSize, wanted: Wanted) -> InfeasibleError | LimitError:
    """Return the error that says why not even the least size fits."""
    budget, result, least = format_bytes(wanted.budget_bytes), answer.result, wanted.name_size(1)
    if result is None or not answer.complete:
        return LimitError(f"stopped before any {wanted.varies} was found to fit {budget}")
    if result.status is not Status.INFEASIBLE and answer.undecided is None and wanted.max_overhead is not None:
        over = f"with an overhead of at most {format_ratio(wanted.max_overhead)}"
        return InfeasibleError(f"not even {least} fits {budget} {over}: raise the budget or the allowed overhead")
    if result.time_s is not None:
        return LimitError(f"whether {least} fits {budget} fast enough was not decided in time: raise the time limit")
    said = f"not even {least}: {result.message}"
    return InfeasibleError(said) if result.status is Status.INFEASIBLE else LimitError(said)
