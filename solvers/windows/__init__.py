"""The exact solver: windows, refined where memory is tight.

A coarse version of Checkmate's 0-1 program (Jain et al., MLSys 2020) is a relaxation: its optimum is a lower bound, and its
solution is decoded to a schedule. Where the schedule exceeds the budget, the program is refined and solved again. README.md has
the idea, docs/formulation.md the program, ``driver.py`` the loop.
"""

from dataclasses import replace

import numpy as np

from planner.graphs.units import format_bytes, format_enough
from planner.solvers import highs
from planner.solvers.bounds import WAY_OUT, bound_least_budget, describe_too_small
from planner.solvers.child_process import describe_error
from planner.solvers.pass_ends import add_pass_ends
from planner.solvers.request import Request
from planner.solvers.result import Ending, Reason, Result, Status, decide_status
from planner.solvers.windows.driver import run
from planner.solvers.windows.parts import fail
from planner.solvers.windows.search import Search


def solve(request: Request) -> Result:
    """Return the fastest schedule within the budget, with a lower bound; the parameters are ``WindowsParams``.

    The bound holds for every schedule whose first executions are in program order. The tolerance in `settings` is the least so
    far that the gap is within, or the current one if there is none.

    With a clock of work, the schedule is a function of the request (unless memory runs out: see ``BoundParams.most_bytes``), for
    the same library versions and processors with the same arithmetic.
    """
    whole = add_pass_ends(request.graph)
    same = (lambda schedule: schedule) if whole.graph is whole.source else None
    search = Search.of(request.map_to(whole.graph, whole.map_back, same))
    least = bound_least_budget(search.problem.whole)
    settled = request.tolerance.first
    if request.budget_bytes < least.budget_bytes:
        status, message = Status.INFEASIBLE, describe_too_small(search.problem.graph, request.budget_bytes, least)
    else:
        try:
            run(search)
        except Exception as error:  # noqa: BLE001
            fail(search, describe_error(error))
        search.progress.tell()  # what other threads have found since the last report
        settled = search.stopping.compute_settled()
        status, message = _reach_verdict(search, settled, least.budget_bytes)
    last = Ending.MEMORY if search.stopping.is_out_of_memory() else None
    return Result(
        request.graph,
        budget_bytes=request.budget_bytes,
        status=status,
        schedule=whole.map_back(search.incumbent.best.schedule) if search.incumbent.best else None,
        bound_s=None if status is Status.INFEASIBLE else search.incumbent.bound_s,
        solver="windows",
        seconds=request.clock.seconds,
        settings=replace(
            request.settings,
            tolerance=settled,
            method={"params": search.params.export()},
            windows=list(search.models.refined.ends) if search.problem.places.plain else None,  # else each branch has its own
        ),
        versions={"highs": highs.read_version(), "numpy": np.__version__},
        message=message,
        reason=Reason.TIME if status is Status.LIMIT else None,
        ended=None if message or status is not Status.FEASIBLE else request.choose_ending(last),
        model_rows=search.models.largest[0],
        model_columns=search.models.largest[1],
    )


def _reach_verdict(search: Search, settled: float, least_bytes: int) -> tuple[Status, str]:
    budget_bytes = search.budget_bytes
    if search.incumbent.failure:
        return (Status.FEASIBLE if search.incumbent.best is not None else Status.ERROR), search.incumbent.failure
    if search.incumbent.infeasible:
        return Status.INFEASIBLE, (
            f"budget {format_bytes(budget_bytes)} is proved too small, though every op by itself fits within "
            f"{format_bytes(least_bytes)}: what must be in memory between them does not, if they are first executed in the order "
            "that was tried. "
            f"{_describe_bracket(search, budget_bytes + 1)} {WAY_OUT}"
        )
    if search.incumbent.best is not None:
        return decide_status(search.incumbent.best.time_s, search.incumbent.bound_s, settled), ""
    limit = "work limit" if search.clock.counts_work else "time limit"
    return Status.LIMIT, (
        f"no schedule within {format_bytes(budget_bytes)} was found, nor proved not to exist in the order of the ops that was "
        f"tried. {_describe_bracket(search, least_bytes)} Raise the {limit} or the budget."
    )


def _describe_bracket(search: Search, proved_bytes: int) -> str:
    """Return a sentence about the least feasible budget, whose lower bound is proved for one order of first executions.

    What is known to be feasible is ``planner.memory.least_budget``'s to say, unless the least budget is known to the byte.
    """
    least = search.incumbent.least_peak
    if least is not None and least.peak_bytes == proved_bytes:
        return f"In that order, the least feasible budget is {format_enough(proved_bytes)}."
    return f"In that order, the least feasible budget is at least {format_bytes(proved_bytes)}."
