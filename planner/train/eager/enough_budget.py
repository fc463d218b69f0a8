"""A budget that is enough for a recorded step, found by replaying the step. No torch."""

from planner.solvers.baselines.common.online import OnlineFailedError, OnlineRun
from planner.solvers.bounds import bound_least_budget
from planner.solvers.online.heuristics import make_heuristic
from planner.solvers.order.peak import keep_everything_peak_bytes
from planner.train.eager.step_log import StepGraph

_HALVINGS = 5


def find_enough_bytes(step: StepGraph, heuristic: str, max_recomputation: float) -> int:
    """Return the least of a few budgets within which a replay of a step succeeds.

    The first budget tried is a lower bound for every schedule of the recorded graph. From there to the peak without evictions,
    budgets are tried by bisection.

    Args:
        step: the step.
        heuristic: the name of the eviction heuristic.
        max_recomputation: the most time of recomputation, as a multiple of the step's time.
    """
    graph = step.graph

    def can_end(budget_bytes: int) -> bool:
        try:
            OnlineRun(graph, budget_bytes, make_heuristic(heuristic), thrash_factor=1 + max_recomputation).run()
        except OnlineFailedError:
            return False
        return True

    low_bytes = bound_least_budget(graph).budget_bytes
    if can_end(low_bytes):
        return low_bytes
    enough = keep_everything_peak_bytes(graph)
    for _ in range(_HALVINGS):
        middle_bytes = (low_bytes + enough) // 2
        if can_end(middle_bytes):
            enough = middle_bytes
        else:
            low_bytes = middle_bytes
    return enough
