"""A budget by which a recorded step runs, found by replaying it. No torch."""

from graphs.schedule import keep_everything
from graphs.simulate import simulate
from planner.eager.step_log import RecordedStep
from solvers.baselines.common.online import OnlineFailedError, OnlineRun
from solvers.bounds import least_budget_bound
from solvers.online.heuristics import heuristic_of

_TRIALS = 16


def enough_bytes(step: RecordedStep, heuristic: str, max_recomputation: float) -> int:
    """Return the least of a few budgets by which a replay of a step ends.

    No schedule of the recorded graph runs within less than the first, and the last is its peak without evictions.

    Args:
        step: the step.
        heuristic: the name of the heuristic that evicts.
        max_recomputation: the most time of recomputation, as a multiple of the step's.
    """
    graph = step.graph
    least_bytes = least_budget_bound(graph).budget_bytes
    peak_bytes = simulate(graph, keep_everything(graph)).peak_bytes
    for trial in range(_TRIALS):
        budget_bytes = least_bytes + (peak_bytes - least_bytes) * trial // _TRIALS
        try:
            OnlineRun(graph, budget_bytes, heuristic_of(heuristic), thrash_factor=1 + max_recomputation).run()
        except OnlineFailedError:
            continue
        return budget_bytes
    return peak_bytes
