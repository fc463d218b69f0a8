"""MegEngine's two rules: their formulas on graphs small enough to follow, and schedules that hold on any graph."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from graphs.schedule import keep_everything
from graphs.simulate import simulate
from graphs.synthetic.draft import Draft
from graphs.synthetic.random_graphs import draw_graph, draw_training_step
from solvers.baselines.common.online import OnlineRun
from solvers.baselines.megengine import FACTORS, LEAST_BYTES, MegEngineParams, MegEngineRule, StaticRule, solve
from solvers.online.heuristics import Interpreter
from solvers.registry import get_solver
from solvers.result import Reason, Status
from tests.support.solvers.answers import ask

MiB = 2**20


@pytest.mark.parametrize("rule", MegEngineRule)
@given(seed=st.integers(0, 10**6), ops=st.integers(2, 30), share=st.floats(0.2, 1.0))
def test_schedules_run_and_fit(rule: MegEngineRule, seed: int, ops: int, share: float) -> None:
    graph = draw_graph(seed, ops)
    budget = int(share * simulate(graph, keep_everything(graph)).peak_bytes)
    result = solve(ask(graph, budget, params=MegEngineParams(least_bytes=(0,), thrash_factor=20.0)), rule=rule)
    assert result.status in (Status.OPTIMAL, Status.FEASIBLE, Status.LIMIT)
    assert result.bound_s is None or result.status is not Status.LIMIT


@pytest.mark.parametrize("rule", MegEngineRule)
def test_a_training_step_fits_less(rule: MegEngineRule) -> None:
    graph = draw_training_step(2, 40)
    result = get_solver(rule)(ask(graph, int(0.7 * simulate(graph, keep_everything(graph)).peak_bytes)))
    assert (result.status, result.solver) == (Status.FEASIBLE, rule.value)
    assert result.time_s < 1.5 * graph.time_s


@pytest.mark.parametrize("heuristic", [Interpreter, StaticRule])
def test_small_tensors_and_random_ops_are_spared(heuristic: type[Interpreter] | type[StaticRule]) -> None:
    draft = Draft()
    (a,) = draft.add_op("a", [], [MiB])
    (b,) = draft.add_op("b", [], [2 * MiB])
    (c,) = draft.add_op("c", [], [2 * MiB])
    draft.add_op("d", [a, b, c], [1])
    graph = draft.build_graph()
    graph = replace(graph, ops=(*graph.ops[:2], replace(graph.ops[2], random=True), graph.ops[3]))
    assert OnlineRun(graph, 6 * MiB, heuristic()).evictable == [False, True, False, False]


def scores_at_the_end(heuristic: Interpreter | StaticRule, ends_with: int) -> dict[str, float]:
    """Scores of what is in memory when op s is due, in: a -> b, c (siblings), r reads b, s reads a and c; in MiB 4, 2, 3, 1, 1.

    b has been evicted after r if `ends_with` is 1.
    """
    draft = Draft()
    (a,) = draft.add_op("a", [], [4 * MiB])
    b, c = draft.add_op("bc", [a], [2 * MiB, 3 * MiB])
    draft.add_op("r", [b], [MiB])
    draft.add_op("s", [a, c], [MiB])
    draft.add_op("t", [b], [MiB])
    graph = draft.build_graph([c + 1])
    run = OnlineRun(graph, 100 * MiB, heuristic)
    for op in range(3):
        run.now = op
        run.execute(op)
    if ends_with:
        run.free(b)
    run.now = 3
    candidates = [t for t in (a, b, c) if run.live[t]]
    scores = heuristic.score(np.array([run.storage[t] for t in candidates]), run.clock_s)
    return {graph.tensors[t].name: float(score) for t, score in zip(candidates, scores, strict=True)}


def test_dynamic_scores_match_the_formula() -> None:
    # The ops read and write 4, 9 and 3 MiB; a is last read when 4, b when 13 of 16 have passed; c is not noted here.
    second = MiB / 1e8
    kept = scores_at_the_end(Interpreter(0), 0)
    assert kept == {
        name: pytest.approx(1e-3 / (size * (stale * second + 1e-3)))
        for name, size, stale in (("a", 4, 12), ("bc", 2, 3), ("bc.1", 3, 16))
    }
    evicted = scores_at_the_end(Interpreter(0), 1)
    assert evicted["a"] == kept["a"]  # b is made from it: no neighbour
    assert evicted["bc.1"] == pytest.approx((9 * MiB + 1e-3) / (3 * (16 * second + 1e-3)))


def test_static_scores_match_the_formula() -> None:
    # Op s is due, which reads a and c (distance 1); t, after it, reads b (2). What is still to come counts as a path.
    second = MiB / 1e8
    kept = scores_at_the_end(StaticRule(0), 0)
    assert kept == {
        "a": pytest.approx(2 * 4 * second * 4 / 4 / 1),  # paths: itself, s
        "bc": pytest.approx(2 * 9 * second * 2 / 2 / 2),  # itself, t
        "bc.1": pytest.approx(2 * 9 * second * 3 / 3 / 1),  # itself, s
    }
    evicted = scores_at_the_end(StaticRule(0), 1)
    assert evicted["a"] == pytest.approx(4 * 4 * second * 4 / 4 / 1)  # itself, b, b t, s


@pytest.mark.parametrize("rule", MegEngineRule)
def test_its_settings_are_tried_for_each_budget(rule: MegEngineRule) -> None:
    graph = draw_training_step(2, 40)
    middle = sorted(t.size_bytes for t in graph.tensors)[len(graph.tensors) // 2]
    graph = replace(graph, tensors=tuple(replace(t, size_bytes=t.size_bytes * MiB // middle) for t in graph.tensors))
    budget = int(0.7 * simulate(graph, keep_everything(graph)).peak_bytes)
    tried = [
        solve(ask(graph, budget, params=MegEngineParams(least_bytes=(size,), factors=(pair,))), rule=rule)
        for size in LEAST_BYTES
        for pair in (FACTORS if rule is MegEngineRule.STATIC else FACTORS[:1])
    ]
    best = solve(ask(graph, budget), rule=rule)
    assert best.time_s == min(result.time_s for result in tried if result.time_s is not None)
    assert best.settings["least_bytes"] in LEAST_BYTES
    assert len({result.time_s for result in tried}) > 1


def test_why_none_of_its_settings_fits() -> None:
    result = solve(ask(draw_training_step(2, 40), 1))
    assert (result.status, result.reason) == (Status.LIMIT, Reason.MEMORY)
    assert "out of memory" in result.message
