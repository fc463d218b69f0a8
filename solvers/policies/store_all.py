"""Keep everything: the schedule without recomputation, the reference for time and memory."""

from collections.abc import Callable

from graphs.ir import Graph, check_plain
from graphs.schedule import Schedule, schedule_of
from solvers.policies.replay import Task, Trial, answer
from solvers.result import Progress, Result


def store_all(graph: Graph) -> Schedule:
    """Every op once in program order, every tensor freed after its last use.

    Raises:
        GraphError: the graph has choices: what keeping everything is depends on them.
    """
    check_plain(graph)
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
    task = Task(graph, budget_bytes, "store_all", tolerance, time_limit_s, on_progress, should_stop)
    trial = Trial(store_all(graph))
    return answer(task, [trial], what="keeping everything")
