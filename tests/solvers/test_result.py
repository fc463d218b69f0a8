"""Results: judged when they are made, mapped where a problem was changed and is changed back."""

from dataclasses import replace

import pytest

from planner import solve
from planner.graphs import simulate as judge
from planner.graphs.errors import BudgetError
from planner.graphs.ir import Graph
from planner.graphs.schedule import Schedule, keep_everything
from planner.graphs.simulate import Simulation
from planner.graphs.synthetic.small import make_training_chain
from planner.graphs.synthetic.transformer import TransformerSize, transformer
from planner.solvers import result as results
from planner.solvers.result import Result, SolveSettings, Status

CHAIN = make_training_chain(6)
KEEP = Result(CHAIN, 7, Status.OPTIMAL, keep_everything(CHAIN), 12.0, "test", 0.0)


def test_a_result_has_the_time_and_the_peak_of_its_schedule() -> None:
    assert (KEEP.time_s, KEEP.peak_bytes, KEEP.gap) == (12.0, 7, 0.0)


def test_a_schedule_over_the_budget_makes_no_result() -> None:
    with pytest.raises(BudgetError, match="peak of 7 B for a budget of 6 B"):
        replace(KEEP, graph=CHAIN, budget_bytes=6)
    with pytest.raises(BudgetError, match="peak of 7 B for a budget of 6 B"):
        KEEP.map_to(budget_bytes=6)


def test_a_mapped_result_keeps_time_and_peak_without_another_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(graph: Graph, schedule: Schedule) -> Simulation:
        raise AssertionError("simulated again")

    monkeypatch.setattr(results, "simulate", refuse)
    mapped = KEEP.map_to(settings=SolveSettings(reordered=True))
    assert (mapped.time_s, mapped.peak_bytes, mapped.settings) == (12.0, 7, {"reordered": True})


def test_a_schedule_needs_the_graph_that_it_was_made_for() -> None:
    with pytest.raises(ValueError, match="come together"):
        Result(None, 7, Status.OPTIMAL, keep_everything(CHAIN), 12.0, "test", 0.0)
    with pytest.raises(ValueError, match="come together"):
        KEEP.map_to(status=Status.LIMIT, schedule=None)


def test_a_solve_judges_its_end_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the ops that it was found in, and as the plan on the graph of the user."""
    calls = {"result": 0}

    def count(graph: Graph, schedule: Schedule) -> Simulation:
        calls["result"] += 1
        return judge.simulate(graph, schedule)

    monkeypatch.setattr(results, "simulate", count)
    graph = transformer(TransformerSize(layers=2))
    plan = solve(graph, 0.8)
    assert plan.time_s > graph.time_s
    assert calls["result"] == 1
