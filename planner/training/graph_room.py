"""Plans that leave room for the overhead of CUDA graph pools, predicted before anything is recorded."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from graphs.errors import BudgetError, InfeasibleError
from graphs.ir import Graph
from graphs.units import format_bytes, format_enough
from planner.option_settings import with_recorded
from planner.plans.plan import Plan
from planner.reserved import reserved_with_graphs
from planner.runtime.graph_pool import pool_bytes

_TRIES = 6  # solves: segments are coarse, so a plan with a lower peak may keep the same memory


def with_room_for_pool(graph: Graph, plan: Plan, libraries: Sequence[int], solve: Callable[[int], Plan]) -> Plan:
    """Return `plan`, or one whose tensors and pool together are within the budget of `plan`.

    First the budget is lowered by the excess, then bisected between budgets known to be too small and too large.

    Args:
        libraries: bytes of each workspace of libraries in the pool (``pool_bytes``).
        solve: solves `graph` for a budget.

    Raises:
        InfeasibleError: none is found; with the budget that has room for the closest plan.
    """
    budget_bytes, low_bytes = plan.budget_bytes, graph.static_bytes
    high_bytes, closest, closest_bytes = plan.peak_bytes, plan, _kept_bytes(graph, plan, libraries)
    asked_bytes = plan.peak_bytes - (closest_bytes - budget_bytes)
    for _ in range(_TRIES):
        if closest_bytes <= budget_bytes:
            return closest
        try:
            found = solve(max(asked_bytes, low_bytes))
        except BudgetError:
            low_bytes = max(asked_bytes, low_bytes)
        else:
            high_bytes = found.peak_bytes
            if (kept_bytes := _kept_bytes(graph, found, libraries)) < closest_bytes:
                closest, closest_bytes = found, kept_bytes
        asked_bytes = (low_bytes + high_bytes) // 2
    pool, tensors = closest_bytes - graph.static_bytes, closest.peak_bytes - graph.static_bytes
    raise InfeasibleError(
        f"a CUDA graph keeps {format_bytes(pool)} for {format_bytes(tensors)} of tensors: whole segments of 2 or 20 MiB, and "
        f"{format_bytes(sum(libraries))} that libraries work in. With {format_bytes(graph.static_bytes)} outside of it that is "
        f"over the budget of {format_bytes(budget_bytes)}, and no plan is found that keeps less: raise the budget to "
        f"{format_enough(closest_bytes)}, or leave out cuda_graph=True"
    )


def with_pool(graph: Graph, plan: Plan, pool_bytes: int) -> Plan:
    """Return `plan` with what is reserved on CUDA where its step, one of `graph`, is replayed with a pool of `pool_bytes`."""
    if plan.reserved is None:
        return plan
    offered, eager_bytes = with_recorded(graph, plan.settings), plan.reserved.eager_bytes
    return replace(plan, reserved=reserved_with_graphs(offered, plan.schedule, plan.memory, eager_bytes, pool_bytes))


def _kept_bytes(graph: Graph, plan: Plan, libraries: Sequence[int]) -> int:
    """Return the static memory that remains allocated once `plan` is recorded."""
    return graph.static_bytes + pool_bytes(with_recorded(graph, plan.settings), plan.schedule, libraries)
