"""One solve in an order of the ops that is known. Never imports torch."""

from collections.abc import Callable
from typing import Any

from planner.graphs.ir import Graph
from planner.graphs.reordering import Reordering
from planner.memory.allocated_budget import build_solver_in_order
from planner.memory.reserved_budget import solve_counted
from planner.settings.counted_memory import CountedMemory
from planner.solvers.clock import Clock
from planner.solvers.registry import get_solver
from planner.solvers.request import Request
from planner.solvers.result import Result
from planner.solvers.tolerance import Tolerance


def solve_allocated(
    graph: Graph, budget_bytes: int, clock: Clock, solver: str = "windows", *, tolerance: float = 1e-3, **settings: Any
) -> Result:
    """Return the result of `solver` for a budget of allocated bytes; `settings` are further fields of its request."""
    return get_solver(solver)(Request(graph, budget_bytes, Tolerance.of(tolerance), clock, **settings))


def solve_in_order(  # what is solved, how, and who may end it
    order: Reordering,
    budget_bytes: int,
    memory: CountedMemory,
    clock: Clock,
    solver: str = "windows",
    *,
    tolerance: float = 1e-3,
    must_stop: Callable[[], bool] | None = None,
    **settings: Any,
) -> Result:
    """Return the result of `solver` in `order`, for the graph in its own order and a budget that counts `memory`.

    Args:
        must_stop: polled; once it returns True, the solve ends with what there is.
        settings: further fields of the request.
    """
    request = Request(order.source, budget_bytes, Tolerance.of(tolerance), clock, **settings)
    return solve_counted(build_solver_in_order(order, solver), request, memory, must_stop=must_stop).result
