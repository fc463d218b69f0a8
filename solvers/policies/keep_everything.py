"""Keep everything: the schedule without recomputation, the reference for time and memory."""

from graphs.checks import check_plain
from graphs.ir import Graph
from graphs.schedule import Schedule, schedule_of
from solvers.policies.replay import Candidate, answer
from solvers.request import Request
from solvers.result import Result


def keep_everything(graph: Graph) -> Schedule:
    """Every op once in program order, every tensor freed after its last use.

    Raises:
        GraphError: the graph has choices: what keeping everything is depends on them.
    """
    check_plain(graph)
    return schedule_of(graph, range(len(graph.ops)))


def solve(request: Request) -> Result:
    """As ``solvers.registry.Solver``; LIMIT when keeping everything does not fit."""
    trial = Candidate(keep_everything(request.graph))
    return answer(request, "keep-everything", [trial], what="keeping everything")
