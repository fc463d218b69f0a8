"""The result of runs in ``online``: the fastest of those that end, or why none does."""

from collections.abc import Iterable, Mapping

from graphs.units import format_bytes
from solvers.policies.deallocation import Deallocation
from solvers.policies.heuristic import Heuristic
from solvers.policies.online import FailedError, Online
from solvers.policies.replay import Candidate, answer, failure
from solvers.request import Request
from solvers.result import Reason, Result

_HOPES = (Reason.TIME, Reason.THRASHING, Reason.MEMORY)
_WORK_PER_OP = 5e-5  # of making room for an op and executing it


def online_result(
    request: Request,
    solver: str,
    rules: Iterable[tuple[Heuristic, Mapping[str, object]]],
    *,
    deallocation: Deallocation,
    thrash_factor: float,
    settings: Mapping[str, object],
) -> Result:
    """The fastest of the runs that end, one with each of `rules`: heuristics with settings of their own. See ``Online``."""
    graph, budget_bytes = request.graph, request.budget_bytes
    trials: list[Candidate] = []
    failures: list[FailedError] = []

    def stop() -> str:
        request.clock.spend(_WORK_PER_OP)
        return request.ended()

    for rule, own in rules:
        run = Online(graph, budget_bytes, rule, deallocation=deallocation, thrash_factor=thrash_factor, stop=stop)
        try:
            trials.append(Candidate(run.run(), own))
        except FailedError as error:
            failures.append(error)
        if request.ended():
            break
    if trials:
        return answer(request, solver, trials, what=solver, settings=settings)
    # With more time, or a larger step allowed, it might have ended; out of memory it cannot.
    nearest = min(failures, key=lambda failed: _HOPES.index(failed.reason))
    why = f"{solver} fails at {format_bytes(budget_bytes)}: {nearest}. Raise the budget, or use the solver windows"
    return failure(request, solver, why, nearest.reason, settings=settings)
