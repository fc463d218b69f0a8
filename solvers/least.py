"""The least feasible budget in program order, bracketed by a proof and a schedule."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from planner.graphs.ir import Graph
from planner.graphs.options import remove_options
from planner.graphs.options.offload import remove_offload
from planner.graphs.options.placement import is_placed, remove_placement
from planner.graphs.options.selection import PartOf, remove_computed
from planner.graphs.schedule import Schedule, keep_everything
from planner.graphs.simulate import simulate
from planner.solvers.bounds import bound_least_budget
from planner.solvers.clock import Clock, WallClock, measure_rest
from planner.solvers.eviction.least_peak import find_least_evicting_schedule
from planner.solvers.pass_ends import add_pass_ends
from planner.solvers.problem import build_problem
from planner.solvers.request import Request
from planner.solvers.tolerance import Tolerance
from planner.solvers.windows.decoding.decode import NOWHERE_BYTES, Trial, try_out
from planner.solvers.windows.driver import run
from planner.solvers.windows.search import Search
from planner.solvers.windows.strategies.offloaded_orders import find_least_offloaded
from planner.solvers.windows.strategies.placement import Placements
from planner.solvers.windows.strategies.substitution import find_least_substitution

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


def bracket_least_budget(graph: Graph, *, clock: Clock | None = None, precision: float = 0.005) -> LeastBudgetBracket:
    """Bracket the least feasible budget of `graph`, to `precision` if time allows.

    Args:
        graph: the training step; schedules may use its transfers to the host.
        clock: limit of the search; None: 30 seconds.
        precision: stop when the bracket is at most this fraction of its upper end.
    """
    clock = clock or WallClock(30.0)
    whole = add_pass_ends(graph)
    known = find_least_known(whole.graph, clock.start_part(_SLICE * clock.limit))
    found = narrow_bracket(whole.graph, known, clock, precision=precision)
    return replace(found, schedule=whole.map_back(found.schedule))


def narrow_bracket(
    graph: Graph, known: Schedule, clock: Clock, *, precision: float, should_stop: Callable[[], bool] | None = None
) -> LeastBudgetBracket:
    """Bracket the least feasible budget of a graph with its pass ends, from a schedule of it, by solves for less.

    Args:
        graph, clock, precision: as in ``bracket_least_budget``.
        should_stop: polled; once True, the bracket so far is returned.
    """
    should_stop = should_stop or (lambda: False)
    proved = bound_least_budget(graph).budget_bytes
    best, found = known, simulate(graph, known).peak_bytes
    refused = proved  # nothing was found at this budget, though nothing was proved
    while found - proved > precision * found and measure_rest(clock) > 0 and not should_stop():
        if found - refused <= precision * found:
            refused = proved  # every budget had a short solve: start again with the time left
        budget = int(refused + _NEXT * (found - refused))
        search = _search_first_schedule(graph, budget, clock.start_part(max(1.0, measure_rest(clock) * _SLICE)), should_stop)
        if search.incumbent.least_peak is not None and search.incumbent.least_peak.peak_bytes < found:
            best, found = search.incumbent.least_peak.schedule, search.incumbent.least_peak.peak_bytes
        if search.incumbent.best is None:
            refused = budget + 1
        if search.incumbent.infeasible:
            proved = refused
    return LeastBudgetBracket(proved, found, best)


def find_least_known(
    graph: Graph,
    clock: Clock,
    *,
    should_stop: Callable[[], bool] | None = None,
    proved_bytes: int | None = None,
    only_options: bool = False,
) -> Schedule:
    """Return the schedule of least peak that is found without solving a program; it proves nothing.

    Args:
        graph, clock: as in ``bracket_least_budget``.
        should_stop: polled; once True, the best so far is returned.
        proved_bytes: the bound of ``bound_least_budget`` for the graph and its transfers, if known.
        only_options: True to search no schedules without options, which the caller has from the program alone.
    """
    whole = add_pass_ends(graph)
    graph = whole.graph
    rest, offloads = remove_offload(graph)
    program = remove_options(rest)
    found = [keep_everything(program)]
    if offloads:
        sending = remove_computed(remove_placement(graph))
        least = find_least_offloaded(sending, clock.start_part(_SENDING * clock.limit), should_stop=should_stop)
        found.append(PartOf(graph, sending).schedule(least.schedule))
    if proved_bytes is None:
        proved_bytes = bound_least_budget(graph).budget_bytes
    if len(rest.ops) > len(rest.program):
        problem = build_problem(rest, rest.static_bytes)
        order = find_least_substitution(problem, clock.start_part(_INSTEAD * clock.limit), should_stop)
        trials = [] if order is None else [try_out(problem, order)]
        if is_placed(rest):
            trials += _find_placed_trials(rest, proved_bytes, clock.start_part(_PLACED * clock.limit), should_stop)
        found += [trial.schedule for trial in trials if trial.peak_bytes < NOWHERE_BYTES]
    if not only_options:
        evicting = find_least_evicting_schedule(program, clock, should_stop=should_stop, proved_bytes=proved_bytes)
        found += filter(None, [evicting])
    judged = [(schedule, simulate(graph, schedule)) for schedule in found]
    return whole.map_back(min(judged, key=lambda pair: (pair[1].peak_bytes, pair[1].time_s))[0])


def _find_placed_trials(graph: Graph, budget_bytes: int, clock: Clock, should_stop: Callable[[], bool] | None) -> list[Trial]:
    """Return the trial with ops on other devices that comes nearest to the budget; an empty list if none was found."""
    search = Search.of(Request(graph, budget_bytes, clock=clock, should_stop=should_stop))
    placements = Placements(search)
    placements.step(clock.limit)
    if placements.lacking is not None:
        return [try_out(search.problem, placements.lacking)]
    return [] if search.incumbent.best is None else [search.incumbent.best]


def _search_first_schedule(graph: Graph, budget_bytes: int, clock: Clock, should_stop: Callable[[], bool]) -> Search:
    """Return a search that has run until there is a schedule, or a proof that there is none."""

    def is_enough() -> bool:
        return search.incumbent.best is not None or should_stop()

    search = Search.of(Request(graph, budget_bytes, Tolerance.of(1.0), clock, should_stop=is_enough))
    run(search)
    return search
