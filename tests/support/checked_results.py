"""What a result of the exact solver promises, beside the optimum."""

from graphs.ir import Graph
from graphs.simulate import simulate
from solvers.result import Result, Status
from solvers.windows import solve
from tests.support.requests import ask

TOLERANCE = 1e-3
SLACK = 1e-6  # what HiGHS's arithmetic may be off by


def check(graph: Graph, budget_bytes: int, optimum: float | None) -> Result:
    """Everything a result promises, given the optimum."""
    result = solve(ask(graph, budget_bytes, tolerance=TOLERANCE, time_limit_s=60))
    if optimum is None:
        # A graph of this size is always decided.
        assert result.status is Status.INFEASIBLE
        assert result.message
        return result
    assert result.status is Status.OPTIMAL
    assert result.schedule is not None
    assert result.bound_s is not None
    assert result.time_s is not None
    assert result.bound_s <= optimum * (1 + SLACK)
    simulation = simulate(graph, result.schedule)
    assert simulation.peak_bytes <= budget_bytes
    assert optimum * (1 - SLACK) <= simulation.time_s <= optimum * (1 + TOLERANCE) + SLACK
    return result
