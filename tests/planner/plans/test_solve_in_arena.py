"""``planner.solve(arena=True)``: budgets that a step in an arena keeps, and what does not go with it."""

from dataclasses import replace

import pytest

from graphs.addresses import buffers_of
from graphs.errors import UsageError
from graphs.ir import Graph, Kind
from graphs.synthetic.random_graphs import draw_training_step
from planner.plans.solve import solve
from solvers.addresses.solve import solve as solve_addresses


def with_gradients(graph: Graph) -> Graph:
    """The graph with its kept tensors but the loss as gradients."""
    loss = min(graph.kept)
    kinds = {t: Kind.GRADIENT for t in graph.kept if t != loss}
    return replace(graph, tensors=tuple(replace(t, kind=kinds.get(t.id, t.kind)) for t in graph.tensors))


@pytest.mark.parametrize("budget", ["90%", "70%", "60%"])
def test_step_in_an_arena_is_within_its_budget(budget: str) -> None:
    graph = with_gradients(draw_training_step(3, 12))
    plan = solve(graph, budget, arena=True, work_limit=20.0)
    assert plan.predicted_bytes == graph.static_bytes + plan.arena_bytes + plan.outside_arena_bytes
    assert plan.predicted_bytes <= plan.budget_bytes
    assert plan.outside_arena_bytes == graph.tensors[min(graph.kept)].size_bytes  # the loss
    inside = [b for b in buffers_of(graph, plan.schedule, alignment=64) if b.size >= 1024]
    assert solve_addresses(inside, plan.arena_bytes, work_limit=20.0).offsets is not None


def test_arena_is_never_faster_than_the_same_budget_without() -> None:
    graph = with_gradients(draw_training_step(5, 10))
    within, beyond = (solve(graph, "60%", arena=flag, work_limit=20.0) for flag in (True, False))
    assert within.time_s >= beyond.time_s * (1 - 1e-3)
    assert beyond.arena_bytes is None


def test_max_overhead_with_arena_raises() -> None:
    graph = draw_training_step(1, 4)
    with pytest.raises(UsageError, match="max_overhead"):
        solve(graph, max_overhead=0.1, arena=True)
