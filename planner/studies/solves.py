"""One solve in the order of ops of a graph. Never imports torch."""

from typing import Any

from graphs.ir import Graph
from solvers.clock import Clock
from solvers.registry import get_solver
from solvers.request import Request
from solvers.result import Result
from solvers.tolerance import Tolerance


def result_of(
    graph: Graph, budget_bytes: int, clock: Clock, solver: str = "windows", *, tolerance: float = 1e-3, **settings: Any
) -> Result:
    """Return the result of `solver`; `settings` are further fields of its request."""
    return get_solver(solver)(Request(graph, budget_bytes, Tolerance.of(tolerance), clock, **settings))
