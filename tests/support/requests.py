"""Requests in a line."""

from collections.abc import Callable

from graphs.ir import Graph
from solvers.clock import WallClock
from solvers.request import Request
from solvers.result import SolveProgress
from solvers.tolerance import Tolerance


def ask(
    graph: Graph,
    budget_bytes: int,
    *,
    tolerance: float | Tolerance = 1e-3,
    time_limit_s: float = 3600.0,
    on_progress: Callable[[SolveProgress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    params: object = None,
) -> Request:
    """A request whose clock counts seconds, from now on."""
    return Request(graph, budget_bytes, Tolerance.of(tolerance), WallClock(time_limit_s), on_progress, should_stop, params)
