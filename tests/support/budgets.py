"""The peak, and budgets between it and the least that is known to do: tight on any machine, whatever its kernels take.

``python -m tests.support.budgets script.py`` runs a script that plans, with the budget HALF_WAY.
"""

import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from planner.graphs.ir import Graph
from planner.graphs.schedule import keep_everything
from planner.graphs.simulate import simulate
from planner.plans.plan import Plan
from planner.plans.solve import solve_graph
from planner.settings.budget import Budget, Bytes, Share, read_budget
from planner.solvers.bounds import bound_least_budget
from planner.solvers.clock import WorkClock
from planner.solvers.eviction.least_peak import find_least_evicting_schedule

HALF_WAY = "50.000001%"  # a share, of the first batch, of the first graph: known by its number


def peak_bytes(graph: Graph) -> int:
    """The peak of keeping everything."""
    return simulate(graph, keep_everything(graph)).peak_bytes


def budget_at(graph: Graph, share: float) -> int:
    """`share` of the way from the least that single ops need to the peak without recomputation."""
    least_bytes = bound_least_budget(graph).budget_bytes
    return least_bytes + int(share * (peak_bytes(graph) - least_bytes))


def between(graph: Graph) -> int:
    """The budget half way from the least that a schedule is known for to the peak of keeping everything."""
    (budget,) = on_the_way(graph, 0.5)
    return budget


def on_the_way(graph: Graph, *shares: float) -> tuple[int, ...]:
    """The budgets at these shares of the way from the least that rules of eviction come to, to the peak."""
    kept = keep_everything(graph)
    peak = peak_bytes(graph)
    # Enough for most of the way: to the last half per cent it takes longer than planning the step.
    clock = WorkClock(1e-3 * len(graph.ops))
    least = simulate(graph, find_least_evicting_schedule(graph, clock) or kept).peak_bytes
    return tuple(int(least + share * (peak - least)) for share in shares)


@contextmanager
def half_way_known() -> Iterator[None]:
    """Inside, HALF_WAY is a budget: the bytes that ``between`` gives for the step as it was measured.

    For ``planner.compile``, and for the backend of ``torch.compile`` and ``planner.checkpoint`` where a model is one graph.
    """
    from planner.train.backend.shared_budget import SharedBudget

    whole, in_bytes, half_way = SharedBudget.compute_whole_bytes, Share.resolve, read_budget(HALF_WAY)

    def solve_half_way(graph: Graph, budget: Budget, *settings: Any, **options: Any) -> Plan:
        return solve_graph(graph, Bytes(between(graph)) if budget == half_way else budget, *settings, **options)

    def whole_half_way(budget: SharedBudget, graphs: Sequence[Any], runs: Sequence[Any]) -> int:
        if budget.budget != half_way:
            return whole(budget, graphs, runs)
        (graph,) = graphs
        return between(graph.captured.graph)

    def for_kernels(budget: Share, whole_bytes: int) -> Any:
        return budget if budget == half_way else in_bytes(budget, whole_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("planner.plans.search.solve_graph", solve_half_way)
        patch.setattr(SharedBudget, "compute_whole_bytes", whole_half_way)
        patch.setattr(Share, "resolve", for_kernels)
        patch.setattr("planner.train.compile.inductor_compiler.Bytes", lambda size: size if size == half_way else Bytes(size))
        yield


def assert_is_peak(measured_bytes: int, peak_bytes: int, graph: Graph) -> None:
    """Check a peak that was measured on CUDA as it was asked for, where a plan counts blocks of 512 bytes."""
    assert measured_bytes <= peak_bytes < measured_bytes + 512 * len(graph.tensors)


if __name__ == "__main__":
    sys.argv = [*sys.argv[1:], "--budget", HALF_WAY]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))  # as Python has it for a script
    with half_way_known():
        runpy.run_path(sys.argv[0], run_name="__main__")
