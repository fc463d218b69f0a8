"""Keep everything: the schedule without recomputation, the reference for time and memory."""

import time
from collections.abc import Callable

from graphs.ir import Graph
from graphs.schedule import Schedule, schedule_of
from graphs.simulate import simulate
from graphs.units import format_bytes
from solvers.result import Progress, Result, Status


def store_all(graph: Graph) -> Schedule:
    """Every op once in program order, every tensor freed after its last use."""
    return schedule_of(graph, range(len(graph.ops)))


def solve(
    graph: Graph,
    budget_bytes: int,
    *,
    tolerance: float = 1e-3,
    time_limit_s: float = 3600.0,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Result:
    """As ``solvers.registry.Solver``; LIMIT when keeping everything does not fit."""
    start = time.perf_counter()
    schedule = store_all(graph)
    peak_bytes = simulate(graph, schedule).peak_bytes
    fits = peak_bytes <= budget_bytes
    return Result(
        graph,
        budget_bytes=budget_bytes,
        status=Status.OPTIMAL if fits else Status.LIMIT,
        schedule=schedule if fits else None,
        bound_s=graph.time_s,
        solver="store_all",
        seconds=time.perf_counter() - start,
        message=""
        if fits
        else (
            f"keeping everything needs {format_bytes(peak_bytes)}, over the budget of {format_bytes(budget_bytes)}: "
            "use a solver that recomputes, such as windows"
        ),
    )
