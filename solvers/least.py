"""The least feasible budget in program order, bracketed by a proof and a schedule."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from graphs.ir import Graph
from graphs.options import without_options
from graphs.options.offload import without_offload
from graphs.options.placement import without_placement
from graphs.options.selection import PartOf, without_computed
from graphs.schedule import Schedule, keep_everything
from graphs.simulate import simulate
from solvers.bounds import least_budget_bound
from solvers.clock import Clock, WallClock, left
from solvers.eviction.least_peak import least_evicting_schedule
from solvers.pass_ends import with_pass_ends
from solvers.problem import problem_of
from solvers.request import Request
from solvers.tolerance import Tolerance
from solvers.windows.decoding.decode import NOWHERE_BYTES, Trial, try_out
from solvers.windows.driver import run
from solvers.windows.search import Search
from solvers.windows.strategies.offloaded_orders import least_offloaded
from solvers.windows.strategies.placement import Placements
from solvers.windows.strategies.substitution import least_instead

# Position of the next solve in the bracket: nearer to the feasible end.
_NEXT = 0.6
_SENDING = 0.5  # share of the time of eviction rules for those with offloading
_INSTEAD = 0.5  # likewise, for those with alternatives
_PLACED = 0.5  # likewise, for those with ops on other devices
_SLICE = 0.25  # of the time left, for each solve; and of the whole time, for eviction rules


@dataclass(frozen=True, slots=True)
class LeastBudgetBracket:
    """Bounds on the least feasible budget.

    Attributes:
        proved_bytes: no schedule of the class that the exact solver searches needs less.
        found_bytes: peak of `schedule`.
        schedule: runs within `found_bytes`.
    """

    proved_bytes: int
    found_bytes: int
    schedule: Schedule

    @property
    def exact(self) -> bool:
        """True if the least feasible budget is known to the byte."""
        return self.proved_bytes == self.found_bytes


def least_budget(
    graph: Graph,
    *,
    clock: Clock | None = None,
    precision: float = 0.005,
    should_stop: Callable[[], bool] | None = None,
) -> LeastBudgetBracket:
    """Bracket the least feasible budget of `graph`, to `precision` if time allows.

    Args:
        graph: the training step; schedules may use its transfers to the host.
        clock: limit of the search; None: 30 seconds.
        precision: stop when the bracket is at most this fraction of its upper end.
        should_stop: polled; once True, the bracket so far is returned.
    """
    clock = clock or WallClock(30.0)
    whole = with_pass_ends(graph)
    known = least_known(whole.graph, clock.part(_SLICE * clock.limit), should_stop=should_stop)
    found = narrowed(whole.graph, known, clock, precision=precision, should_stop=should_stop)
    return replace(found, schedule=whole.schedule_of_source(found.schedule))


def narrowed(
    graph: Graph, known: Schedule, clock: Clock, *, precision: float, should_stop: Callable[[], bool] | None = None
) -> LeastBudgetBracket:
    """Bracket the least feasible budget of a graph with its pass ends, from a schedule of it, by solves for less.

    Args:
        graph, clock, precision, should_stop: as in ``least_budget``.
        known: the schedule to begin with.
    """
    should_stop = should_stop or (lambda: False)
    proved = least_budget_bound(*without_offload(graph)).budget_bytes
    best, found = known, simulate(graph, known).peak_bytes
    refused = proved  # nothing was found at this budget, though nothing was proved
    while found - proved > precision * found and left(clock) > 0 and not should_stop():
        if found - refused <= precision * found:
            refused = proved  # every budget had a short solve: start again with the time left
        budget = int(refused + _NEXT * (found - refused))
        search = _first_schedule(graph, budget, clock.part(max(1.0, left(clock) * _SLICE)), should_stop)
        if search.incumbent.least_peak is not None and search.incumbent.least_peak.peak_bytes < found:
            best, found = search.incumbent.least_peak.schedule, search.incumbent.least_peak.peak_bytes
        if search.incumbent.best is None:
            refused = budget + 1
        if search.incumbent.infeasible:
            proved = refused
    return LeastBudgetBracket(proved, found, best)


def least_known(
    graph: Graph, clock: Clock, *, should_stop: Callable[[], bool] | None = None, proved_bytes: int | None = None
) -> Schedule:
    """Return the schedule of least peak that is found without solving a program; it proves nothing.

    Args:
        graph: as in ``least_budget``.
        clock, should_stop: likewise.
        proved_bytes: the bound of ``least_budget_bound`` for the graph and its transfers, if known.
    """
    whole = with_pass_ends(graph)
    graph = whole.graph
    rest, offloads = without_offload(graph)
    program = without_options(rest)
    found = [keep_everything(program)]
    if offloads:
        sending = without_computed(without_placement(graph))
        least = least_offloaded(sending, clock.part(_SENDING * clock.limit), should_stop=should_stop)
        found.append(PartOf(graph, sending).schedule(least.schedule))
    if proved_bytes is None:
        proved_bytes = least_budget_bound(rest, offloads).budget_bytes
    if not rest.plain:
        problem = problem_of(rest, rest.static_bytes)
        order = least_instead(problem, clock.part(_INSTEAD * clock.limit), should_stop)
        trials = [] if order is None else [try_out(problem, order)]
        if problem.placed:
            trials += _placed(rest, proved_bytes, clock.part(_PLACED * clock.limit), should_stop)
        found += [trial.schedule for trial in trials if trial.peak_bytes < NOWHERE_BYTES]
    evicting = least_evicting_schedule(program, clock, should_stop=should_stop, proved_bytes=proved_bytes)
    judged = [(schedule, simulate(graph, schedule)) for schedule in (*found, *filter(None, [evicting]))]
    return whole.schedule_of_source(min(judged, key=lambda pair: (pair[1].peak_bytes, pair[1].time_s))[0])


def _placed(graph: Graph, budget_bytes: int, clock: Clock, should_stop: Callable[[], bool] | None) -> list[Trial]:
    """Return the trial with ops on other devices that comes nearest to the budget; an empty list if none was found."""
    search = Search.of(Request(graph, budget_bytes, clock=clock, should_stop=should_stop))
    placements = Placements(search)
    placements.step(clock.limit)
    if placements.lacking is not None:
        return [try_out(search.problem, placements.lacking)]
    return [] if search.incumbent.best is None else [search.incumbent.best]


def _first_schedule(graph: Graph, budget_bytes: int, clock: Clock, should_stop: Callable[[], bool]) -> Search:
    """Return a search that has run until there is a schedule, or a proof that there is none."""

    def enough() -> bool:
        return search.incumbent.best is not None or should_stop()

    search = Search.of(Request(graph, budget_bytes, Tolerance.of(1.0), clock, should_stop=enough))
    run(search)
    return search
