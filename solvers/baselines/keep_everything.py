"""Keeping everything: the schedule without recomputation, the reference for time and memory."""

from planner.graphs.schedule import keep_everything
from planner.solvers.baselines.common.verdicts import Candidate, answer
from planner.solvers.request import Request
from planner.solvers.result import Result


def solve(request: Request) -> Result:
    """Return the schedule that keeps everything; LIMIT if it does not fit."""
    trial = Candidate(keep_everything(request.graph))
    return answer(request, "keep-everything", [trial], what="keeping everything")
