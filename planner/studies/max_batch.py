"""The largest batch whose training step fits a budget, for the optimal schedule and for what is done by hand.

Never imports torch: graphs come from a function of the batch.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from graphs.cost.scaling import Fit
from graphs.errors import GraphError, InfeasibleError, LimitError
from graphs.ir import Graph
from graphs.units import format_bytes, format_ratio
from planner.solving import order_for
from planner.studies.fitting import Decision, Enough, largest
from solvers.clock import WallClock
from solvers.order.reorder import Reordering
from solvers.registry import get_solver
from solvers.request import Request
from solvers.result import Result, Status
from solvers.tolerance import Tolerance

OPTIMAL = "windows"
# Name in the tables and in the registry. What one of them fits, those after it are asked beyond only.
METHODS = (("keep everything", "store_all"), ("checkpoint every block", "checkpoint_blocks"), ("optimal", OPTIMAL))
# Batches whose graphs give the first guess: large enough for the fixed costs of kernels to matter little.
_LINE = (8, 16)
# As tolerances: the first schedule will do; that which decides comes before.
_ANY_GAP, _CLOSE_GAP = 1e6, 1e-4


@dataclass(frozen=True, slots=True)
class LargestBatch:
    """The largest batch that one method fits into the budget.

    Attributes:
        method: for people.
        batch: None if not even 1 fits.
        at_limit: `batch` is the largest that was allowed; larger ones may fit.
        undecided: the least batch for which neither a schedule nor a proof that there is none was found
            in time; None if there is none such.
        complete: False when the search was stopped: larger batches may fit.
        extrapolated: the graph of `batch` was not captured but read off a line through two others.
        result: the schedule at `batch`; where there is none, why.
        store_all_time_s: of the step at `batch` without recomputation.
    """

    method: str
    batch: int | None
    at_limit: bool
    undecided: int | None
    complete: bool
    extrapolated: bool
    result: Result | None
    store_all_time_s: float

    @property
    def overhead(self) -> float | None:
        """Of the schedule, as a fraction of the step without recomputation."""
        if self.batch is None or self.result is None or self.result.time_s is None:
            return None
        return self.result.time_s / self.store_all_time_s - 1 if self.store_all_time_s else 0.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for.

    Attributes:
        budget_bytes: of the whole step, static bytes included.
        max_overhead: as a fraction of the step without recomputation; None: any.
        limit: the largest batch to consider.
        first: the batch to begin with.
        tolerance: on the gap of the schedule in the answer.
        time_limit_s: for each solve.
        reorder: as in ``planner.solving.solve``; what is done by hand is in program order in any case.
    """

    budget_bytes: int
    max_overhead: float | None = None
    limit: int = 4096
    first: int = 1
    tolerance: float = 1e-3
    time_limit_s: float = 60.0
    reorder: bool = True


def max_batch(
    graph_of: Callable[[int], Graph],
    wanted: Wanted,
    *,
    on_activity: Callable[[str], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> tuple[LargestBatch, ...]:
    """An answer for each of `METHODS`.

    It is taken for granted that what fits at one batch fits at all smaller ones. The graphs of two batches
    give a guess, by straight lines; around it the graphs themselves decide.

    Args:
        graph_of: the graph of a batch. MemoryError: it cannot be measured at this size, the lines must do.
        wanted: what is asked for.
        on_activity: told what is being done.
        should_stop: polled; once True, the largest batches so far are the answer.

    Raises:
        InfeasibleError: proved: not even a batch of 1 fits.
        LimitError: no batch was found to fit in the time given, or before it was stopped.
    """
    search = _BatchSearch(graph_of, wanted, on_activity, should_stop or (lambda: False))
    answers: list[LargestBatch] = []
    for method, solver in METHODS:
        beyond = max((answer.batch or 0 for answer in answers), default=0) if solver == OPTIMAL else 0
        answers.append(search.answer(method, solver, beyond))
    if all(answer.batch is None for answer in answers):
        raise _refusal(answers[-1], wanted)
    return tuple(answers)


class _StoppedError(Exception):
    pass


class _BatchSearch:
    def __init__(
        self,
        graph_of: Callable[[int], Graph],
        wanted: Wanted,
        on_activity: Callable[[str], None] | None,
        should_stop: Callable[[], bool],
    ) -> None:
        self.wanted = wanted
        self.on_activity = on_activity
        self.should_stop = should_stop
        self.extrapolated: set[int] = set()
        self.found: dict[int, list[Result]] = {}  # by batch, the results with a schedule
        self._graph_of = graph_of
        self._graphs: dict[int, Graph] = {}
        self._line: Fit | None = None
        self._line_tried = False

    def answer(self, method: str, solver: str, beyond: int) -> LargestBatch:
        """The largest batch of one method, which is known to be `beyond` at least."""
        decided: dict[int, Decision] = {}

        def fits(batch: int) -> bool:
            self.check()
            decided[batch] = self.decide(solver, self.graph(batch), f"{method}: batch {batch}")
            self.keep(batch, decided[batch].result)
            return bool(decided[batch].fits)

        complete = True
        try:
            largest(fits, first=self.guess(solver, method, beyond), limit=self.wanted.limit, low=beyond)
        except _StoppedError:
            complete = False
        batch = max((n for n, decision in decided.items() if decision.fits), default=beyond)
        undecided = min((n for n, decision in decided.items() if decision.fits is None), default=None)
        if not batch:
            refused = decided[min(decided)].result if decided else None
            return LargestBatch(method, None, False, undecided, complete, False, refused, 0.0)
        return LargestBatch(
            method=method,
            batch=batch,
            at_limit=batch == self.wanted.limit,
            undecided=undecided,
            complete=complete,
            extrapolated=batch in self.extrapolated,
            result=self.best(batch, f"{method}: batch {batch}") if solver == OPTIMAL else decided[batch].result,
            store_all_time_s=self.graph(batch).time_s,
        )

    def tell(self, activity: str) -> None:
        if self.on_activity is not None:
            self.on_activity(activity)

    def check(self) -> None:
        if self.should_stop():
            raise _StoppedError

    def keep(self, batch: int, result: Result) -> None:
        if result.schedule is not None:
            self.found.setdefault(batch, []).append(result)

    def decide(self, solver: str, graph: Graph, activity: str) -> Decision:
        """Whether `solver` has a schedule of `graph` within the budget and the overhead."""
        self.tell(activity)
        enough = Enough(
            graph.time_s * (1 + (self.wanted.max_overhead or 0.0)), self.wanted.max_overhead is None, self.should_stop
        )
        order = self.order(solver, graph)
        tolerance = Tolerance.of(_ANY_GAP if enough.any_time else _CLOSE_GAP)
        clock = WallClock(self.wanted.time_limit_s)
        request = Request(order.graph, self.wanted.budget_bytes, tolerance, clock, enough, enough.reached)
        result = get_solver(solver)(request)
        result = order.result_of_source(result)
        if result.time_s is not None and (enough.any_time or result.time_s <= enough.cap_s):
            return Decision(True, result)
        settled = solver != OPTIMAL or result.status in (Status.INFEASIBLE, Status.OPTIMAL) or enough.refuted(result.bound_s)
        return Decision(False if settled else None, result)

    def best(self, batch: int, activity: str) -> Result:
        """The fastest schedule at `batch`, which has one."""
        self.tell(f"{activity}, its fastest schedule")
        if not self.should_stop():
            order = self.order(OPTIMAL, self.graph(batch))
            tolerance, clock = Tolerance.of(self.wanted.tolerance), WallClock(self.wanted.time_limit_s)
            request = Request(order.graph, self.wanted.budget_bytes, tolerance, clock, should_stop=self.should_stop)
            result = get_solver(OPTIMAL)(request)
            self.keep(batch, order.result_of_source(result))
        return min(self.found[batch], key=lambda result: result.time_s or 0.0)

    def order(self, solver: str, graph: Graph) -> Reordering:
        """`graph` as `solver` gets it."""
        return order_for(graph, solver, reorder=self.wanted.reorder and solver == OPTIMAL)

    def guess(self, solver: str, method: str, beyond: int) -> int:
        """A batch near the largest that fits, from graphs on a straight line; the first to try where there is none."""
        line = self.line()
        if line is None:
            return max(self.wanted.first, beyond + 1)

        def fits(batch: int) -> bool:
            self.check()
            return bool(self.decide(solver, line.graph((batch,)), f"{method}: guessing, batch {batch}").fits)

        return max(1, largest(fits, first=max(self.wanted.first, beyond + 1), limit=self.wanted.limit, low=beyond))

    def line(self) -> Fit | None:
        """Through two batches whose graphs have the same ops; None if they have not, or cannot be had."""
        if not self._line_tried and self.wanted.limit >= _LINE[1]:
            self._line_tried = True
            with suppress(GraphError, MemoryError):
                self._line = Fit({(batch,): self.captured(batch) for batch in _LINE})
        return self._line

    def graph(self, batch: int) -> Graph:
        if batch not in self._graphs:
            try:
                self.captured(batch)
            except MemoryError:
                line = self.line()
                if line is None:
                    raise LimitError(
                        f"measuring a batch of {batch} ran out of memory: use --roofline to model a device instead"
                    ) from None
                self.extrapolated.add(batch)
                self._graphs[batch] = line.graph((batch,))
        return self._graphs[batch]

    def captured(self, batch: int) -> Graph:
        if batch not in self._graphs:
            self.tell(f"tracing batch {batch}")
            self._graphs[batch] = self._graph_of(batch)
            self.check()
        return self._graphs[batch]


def _refusal(answer: LargestBatch, wanted: Wanted) -> InfeasibleError | LimitError:
    """Why not even a batch of 1 fits."""
    budget, result = format_bytes(wanted.budget_bytes), answer.result
    if result is None or not answer.complete:
        return LimitError(f"stopped before any batch was found to fit {budget}")
    if result.status is not Status.INFEASIBLE and answer.undecided is None and wanted.max_overhead is not None:
        over = f"with an overhead of at most {format_ratio(wanted.max_overhead)}"
        return InfeasibleError(f"not even a batch of 1 fits {budget} {over}: raise --budget or --max-overhead")
    if result.time_s is not None:
        return LimitError(f"whether a batch of 1 fits {budget} fast enough was not decided in time: raise --time-limit")
    said = f"not even a batch of 1: {result.message}"
    return InfeasibleError(said) if result.status is Status.INFEASIBLE else LimitError(said)
