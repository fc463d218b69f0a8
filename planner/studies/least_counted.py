"""The least feasible budget of the memory that budgets count, bracketed by a proof and a schedule. Never imports torch."""

from collections.abc import Callable

from planner.memory import CountedMemory
from planner.reserved_budget import solve_counted
from planner.studies.frontier import Frontier
from planner.studies.solves import solver_in
from solvers.clock import Clock, left
from solvers.least import LeastBudgetBracket, least_budget
from solvers.request import Request
from solvers.tolerance import Tolerance

_ALLOCATED = 0.4  # share of the clock: for the least budget of allocated bytes, where the search for reserved memory begins
_NEXT = 0.6  # position of the next budget in the bracket, nearer to the feasible end
_SLICE, _SLICE_LEAST = 0.3, 1.0  # of the clock that is left, and in its unit: for each budget


def least_counted(
    known: Frontier, clock: Clock, *, precision: float, should_stop: Callable[[], bool] | None = None
) -> LeastBudgetBracket:
    """Bracket the least feasible budget of the memory that `known` counts, in its order; add all results to `known`.

    The schedule that needs the fewest allocated bytes may reserve much more than another. So budgets of reserved memory below
    what it reserves are solved, each until a schedule fits; those that nothing was found for stay open, unless they are refuted.

    Args:
        clock: limit of the search.
        precision: stop when the bracket is at most this fraction of its upper end.
        should_stop: polled; once True, the bracket so far is returned.
    """
    stop = should_stop or (lambda: False)
    graph, memory = known.order.graph, known.memory
    if memory is CountedMemory.ALLOCATED:
        return known.learn_least(least_budget(graph, clock=clock, precision=precision, should_stop=stop))
    part = clock.part(_ALLOCATED * clock.limit)
    found = known.learn_least(least_budget(graph, clock=part, precision=precision, should_stop=stop))
    refused_bytes = found.proved_bytes  # nothing was found at this budget, though nothing was proved
    while found.found_bytes - refused_bytes > precision * found.found_bytes and left(clock) > 0 and not stop():
        budget_bytes = int(refused_bytes + _NEXT * (found.found_bytes - refused_bytes))
        limited = clock.part(max(_SLICE_LEAST, _SLICE * left(clock)))
        first = Request(known.order.source, budget_bytes, Tolerance.of(1.0), limited, should_stop=lambda: True)
        result = solve_counted(solver_in(known.order), first, memory, must_stop=stop, on_least=known.learn_schedule).result
        known.learn(result)
        found = known.least
        refused_bytes = max(refused_bytes, found.proved_bytes, 0 if result.schedule else budget_bytes + 1)
    return found
