"""Budgets that are known to do, for a solve whose budget may be too small. Never imports torch.

Commands and errors searched in five ways before, in seconds and in different orders of the ops, so that they named different
least budgets for one graph, and a solve for a named budget could end without a schedule.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from planner.capture.options import apply_options, get_option, list_options_to_try, order_as_executed
from planner.graphs.ir import Graph
from planner.graphs.options.selection import list_exact_ops
from planner.graphs.options.surroundings import Link, Surroundings
from planner.graphs.schedule import Schedule
from planner.graphs.simulate import simulate
from planner.graphs.units import UNLIMITED_BYTES, format_bytes, format_enough
from planner.memory.allocated_budget import REORDERED
from planner.memory.least_budget import LeastBudget, find_least_budget
from planner.memory.reserved import is_on_cuda, predict_beside, predict_counted_bytes
from planner.settings.counted_memory import CountedMemory
from planner.settings.plan import PlanSettings
from planner.solvers.bounds import bound_least_budget
from planner.solvers.clock import measure_rest
from planner.solvers.order.solve import SolvedOrder
from planner.solvers.request import Request, Start
from planner.solvers.result import Reason, Result, SolveProgress, Status

_TIGHT = 1.15  # times the bound on the least budget: for budgets below, the least budget is looked for before the solve
_TIGHT_SHARE = 0.5  # of the clock, at most, for that
_LOOK, _LOOK_SHARE = 3.0, 0.25  # of the clock, and of its limit: without a schedule, until the least budget is looked for


@dataclass(frozen=True, slots=True)
class OptionBudget:
    """The least budget with one more option.

    Attributes:
        found_bytes: bytes that a schedule needs of the memory that the budget counts.
        host_bytes: bytes that it needs on the host; 0 for options of the device alone.
    """

    name: str
    found_bytes: int
    host_bytes: int

    def __str__(self) -> str:
        host = f", with {format_enough(self.host_bytes)} on the host" if self.host_bytes else ""
        return f"With the option {self.name} a schedule is known for {format_enough(self.found_bytes)}{host}."


@dataclass(slots=True)
class KnownBudgets:
    """The least budget of a graph that is solved: its schedule is the result where it fits and the solve finds none.

    It is looked for once: before a solve for a tight budget, in the first seconds of one without a schedule, or at the end. It is
    a function of the graph (``memory.least_budget``), so that a solve for a budget that a message names has a schedule at once.

    Attributes:
        traced: the graph with all options that it was traced with.
        request: of the solve, on the graph with the options of `settings`.
        memory: kind of memory that the budget counts.
        must_stop: polled; once it returns True, all ends.
    """

    traced: Graph
    request: Request
    memory: CountedMemory
    settings: PlanSettings
    must_stop: Callable[[], bool]
    _found: bool = field(default=False, init=False)  # by the solve
    _least: LeastBudget | None = field(default=None, init=False)
    _witness: Schedule | None = field(default=None, init=False)  # that of the least budget, as a step runs it, if it fits
    _learned_bytes: int = field(default=UNLIMITED_BYTES, init=False)
    _options: tuple[OptionBudget, ...] = field(default=(), init=False)
    _cut_short: bool = field(default=False, init=False)

    @property
    def names_least(self) -> bool:
        """True if the solve may have any schedule, so that the least budget is named where it has none."""
        needs_addresses = self.settings.arena and not is_on_cuda(self.request.graph)  # which the solve itself has to find
        return self.settings.solver in REORDERED and not needs_addresses

    def begin(self) -> Request:
        """Look for the least budget if the budget is tight; return the request of the solve, which starts from its schedule."""
        graph, clock, budget_bytes = self.request.graph, self.request.clock, self.request.budget_bytes
        least_bytes = bound_least_budget(graph).budget_bytes
        if self.memory is not CountedMemory.ALLOCATED:
            beside = predict_beside(graph, self.memory)
            least_bytes = beside.bound(least_bytes) - beside.context_bytes
            budget_bytes -= beside.context_bytes  # which makes no budget tighter
        if self.names_least and least_bytes <= budget_bytes < _TIGHT * least_bytes:
            until = clock.now + _TIGHT_SHARE * measure_rest(clock)
            self._look(lambda: clock.now > until or self.must_stop())
        known = None if self._witness is None else Start(self._witness)
        return replace(self.request, on_progress=self._tell, start=self.request.start or known)

    def must_stop_solve(self) -> bool:
        """Return True if the solve must end, because all must, or because the caller stops it and a schedule is known."""
        return self.must_stop() or (self._witness is not None and self.request.is_interrupted())

    def learn(self, schedule: Schedule) -> None:
        """Note what a schedule needs that the solve has found, though it does not fit."""
        self._learned_bytes = min(self._learned_bytes, self._predict_counted_bytes(schedule))

    def complete(self, solved: SolvedOrder) -> Result:
        """Return the result of a solve; if it has no schedule, with that of the least budget or, if that is larger, with hints.

        The bound of the solve holds for that schedule if it is in the same order.
        """
        result, graph = solved.result, self.request.graph
        if result.status not in (Status.INFEASIBLE, Status.LIMIT):
            return result
        if result.status is Status.INFEASIBLE or self.names_least:
            self._look(self._is_late)
        if self._least is None or self._witness is None:
            return result.map_to(message=result.message + self._describe_hints() + self._describe_time(result))
        same = self._least.order == solved.order.original and result.bound_s is not None
        bound_s = result.bound_s if same else graph.time_s if graph.plain else None
        return replace(
            result,
            graph=graph,
            status=Status.FEASIBLE,
            schedule=self._witness,
            bound_s=bound_s,
            seconds=self.request.clock.seconds,
            settings=replace(result.settings, reordered=self._least.order != tuple(range(len(graph.ops)))),
            message="",
            reason=None,
            ended=self.request.choose_ending(),
        )

    def _describe_hints(self) -> str:
        """Return sentences with budgets that are known to do, for the message that nothing fits; "" if none is known."""
        least, known_bytes = self._least, self._learned_bytes
        if least is not None:
            known_bytes = min(least.found_bytes, known_bytes)
        if not self.request.budget_bytes < known_bytes < UNLIMITED_BYTES:
            return ""
        said = [f"A schedule is known for {format_enough(known_bytes)}.", *map(str, self._options)]
        if least is not None and self.memory is not CountedMemory.ALLOCATED:  # solvers name allocated bytes
            said.insert(0, f"The least budget of {self.memory} memory is at least {format_bytes(least.proved_bytes)}.")
        if self._cut_short:
            said.append("The search for less was cut short: with more time it may find less.")
        return "".join(f" {sentence}" for sentence in said)

    def _describe_time(self, result: Result) -> str:
        """Return a sentence with the time of the whole call, if that is why nothing was found."""
        if result.reason is not Reason.TIME or self.settings.solver not in REORDERED:
            return ""
        clock = self.request.clock
        return f" It took {clock.format_amount(clock.now)} (limit {clock.format_amount(clock.limit)})."

    def _tell(self, progress: SolveProgress) -> None:
        clock, request = self.request.clock, self.request
        self._found = self._found or progress.best_s is not None
        late = clock.now >= min(_LOOK, _LOOK_SHARE * clock.limit)
        if late and not self._found and self.names_least:
            self._look(self._is_late)
        if request.on_progress is not None:
            request.on_progress(progress if self._found else self._add_least(progress))

    def _add_least(self, progress: SolveProgress) -> SolveProgress:
        """Return the progress of a solve without a schedule, with what is known of the least budget."""
        graph = self.request.graph
        if self._witness is not None:  # whose bound is not that of an order without a schedule
            return replace(progress, best_s=simulate(graph, self._witness).time_s, bound_s=graph.time_s if graph.plain else None)
        return replace(progress, activity=f"{progress.activity}.{said}") if (said := self._describe_hints()) else progress

    def _look(self, should_stop: Callable[[], bool]) -> None:
        """Look for the least budget and, if it is above the budget, for that with each further option."""
        request, budget_bytes = self.request, self.request.budget_bytes
        refused = self.memory is not CountedMemory.ALLOCATED and predict_beside(request.graph, self.memory).explain_refusal(
            budget_bytes
        )
        if self._least is not None or refused or should_stop():
            return
        request.tell("looking for the least budget", None, None)
        self._least = self._find_least_budget(request.graph, should_stop)
        if self._least.found_bytes > budget_bytes:
            options = (self._find_budget_with_option(name, should_stop) for name in self._list_further_options())
            self._options = tuple(o for o in options if o is not None and o.found_bytes < self._least.found_bytes)
        elif self.names_least:
            executed = order_as_executed(request.graph, self._least.schedule)
            fits = self._predict_counted_bytes(executed) <= budget_bytes
            self._witness = executed if fits else self._least.schedule
            if request.on_schedule is not None:
                request.on_schedule(self._witness, request.graph.time_s if request.graph.plain else 0.0)

    def _predict_counted_bytes(self, schedule: Schedule) -> int:
        return predict_counted_bytes(self.request.graph, schedule, self.memory, arena=self.settings.arena)

    def _find_least_budget(self, graph: Graph, should_stop: Callable[[], bool]) -> LeastBudget:
        reorders, arena = self.settings.reorder is not False, self.settings.arena
        least = find_least_budget(graph, self.memory, arena=arena, reorders=reorders, should_stop=should_stop)
        self._cut_short = self._cut_short or least.stopped
        return least

    def _is_late(self) -> bool:
        return measure_rest(self.request.clock) <= 0 or self.must_stop()

    def _list_further_options(self) -> Sequence[str]:
        """Return the options that the solve could have besides its own."""
        asked = self.settings.options
        if asked.places:
            return ()
        known = {get_option(name).name for name in asked.names}
        offered = [name for name in list_options_to_try(self.traced) if get_option(name).name not in known]
        return [name for name in offered if self.settings.features.isdisjoint(get_option(name).refused)]

    def _find_budget_with_option(self, name: str, should_stop: Callable[[], bool]) -> OptionBudget | None:
        """Return the least budget with one more option, for any link and host; None if it offers nothing."""
        asked = self.settings.options
        exact = list_exact_ops(self.traced) if asked.exact else None
        graph = apply_options(self.traced, (*asked.names, name), Surroundings(Link.even(1.0), asked.host_bytes), exact)
        if len(graph.ops) == len(self.request.graph.ops) and graph.writes_over_inputs == self.request.graph.writes_over_inputs:
            return None
        least = self._find_least_budget(graph, should_stop)
        _, *others = simulate(graph, least.schedule).pool_peaks_bytes
        return OptionBudget(name, least.found_bytes, sum(others))
