"""A budget by which a recorded step runs, found by replaying it. No torch."""

from graphs.schedule import keep_everything
from graphs.simulate import simulate
from planner.eager.step_log import RecordedStep
from solvers.baselines.common.online import OnlineFailedError, OnlineRun
from solvers.bounds import least_budget_bound
from solvers.online.heuristics import heuristic_of

_HALVINGS = 5


def enough_bytes(step: RecordedStep, heuristic: str, max_recomputation: float) -> int:
    """Return the least of a few budgets by which a replay of a step ends.

    No schedule of the recorded graph runs within less than the first that is tried; above it, the interval to the peak without
    evictions is halved.

    Args:
        step: the step.
        heuristic: the name of the heuristic that evicts.
        max_recomputation: the most time of recomputation, as a multiple of the step's.
    """
    graph = step.graph

    def ends(budget_bytes: int) -> bool:
        try:
            OnlineRun(graph, budget_bytes, heuristic_of(heuristic), thrash_factor=1 + max_recomputation).run()
        except OnlineFailedError:
            return False
        return True

    low_bytes = least_budget_bound(graph).budget_bytes
    if ends(low_bytes):
        return low_bytes
    enough = simulate(graph, keep_everything(graph)).peak_bytes
    for _ in range(_HALVINGS):
        middle_bytes = (low_bytes + enough) // 2
        if ends(middle_bytes):
            enough = middle_bytes
        else:
            low_bytes = middle_bytes
    return enough
