"""Rules of eviction: what they come to fits, how little memory they get by with, and which of both ways back they take."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.capture.options import apply_options
from planner.graphs.ir import Graph
from planner.graphs.options.surroundings import Link, Surroundings
from planner.graphs.schedule import keep_everything, schedule_of
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.random_graphs import draw_graph, draw_training_step
from planner.graphs.synthetic.small import make_training_chain
from planner.graphs.synthetic.transformer import TransformerSize, transformer
from planner.solvers.bounds import bound_least_budget
from planner.solvers.clock import WallClock
from planner.solvers.eviction.engine import Eviction, find_evicting_order
from planner.solvers.eviction.least_peak import find_least_evicting_schedule
from planner.solvers.eviction.rules import RULES, TIGHT_RULES, EvictionRule, EvictionSettings, Guide
from planner.solvers.problem import Problem, build_problem
from planner.solvers.windows import driver
from planner.solvers.windows.decoding.decode import Trial, find_late_writers, order_of, try_out
from planner.solvers.windows.search import Search
from planner.solvers.windows.strategies.first_schedules import EvictionRules, KeepEverything
from tests.support.solvers.answers import ask


def between(graph: Graph, share: float) -> int:
    """A budget from the bound of single ops (0) to the peak (1)."""
    least, peak = bound_least_budget(graph).budget_bytes, simulate(graph, keep_everything(graph)).peak_bytes
    return least + int(share * (peak - least))


def executed(graph: Graph, budget_bytes: int, rule: EvictionRule, **settings: Any) -> list[int] | None:
    found = find_evicting_order(build_problem(graph, budget_bytes), rule, EvictionSettings(**settings))
    return None if found is None else found.computed


@pytest.mark.parametrize("graph", [transformer(TransformerSize(layers=2)), draw_training_step(3, 40), make_training_chain(20)])
@pytest.mark.parametrize("share", [0.15, 0.5, 0.9])
def test_evicting_orders_fit_the_budget(graph: Graph, share: float) -> None:
    budget = between(graph, share)
    for rule in (*RULES, *TIGHT_RULES):
        order = executed(graph, budget, rule)
        assert order == executed(graph, budget, rule)
        assert simulate(graph, schedule_of(graph, order)).peak_bytes <= budget
        first = list(dict.fromkeys(order))
        assert first == list(range(len(graph.ops)))
        assert len(order) > len(first)


class CheckedCosts(Eviction):
    """Finds every cost that it remembers anew before it is used."""

    def _compute_ranks(self, tensors: Sequence[int]) -> list[float]:
        for t in tensors:
            assert self.cost[t] == self._compute_cost(t)
        return super()._compute_ranks(tensors)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_cached_eviction_costs_equal_recomputed_costs(seed: int, share: float) -> None:
    graph = draw_training_step(seed, 25)
    for rule in (*RULES, *TIGHT_RULES):
        problem = build_problem(graph, between(graph, share))
        assert CheckedCosts(problem, rule).run() == find_evicting_order(problem, rule)


@pytest.mark.parametrize("layers", [1, 4, 12])
def test_transformers_run_in_little_more_than_their_largest_op(layers: int) -> None:
    graph = transformer(TransformerSize(layers=layers))
    schedule = find_least_evicting_schedule(graph, WallClock(60.0))
    assert simulate(graph, schedule).peak_bytes <= between(graph, 0.02)


def test_tight_rules_succeed_where_other_rules_run_out_of_memory() -> None:
    graph = draw_training_step(0, 40)
    budget = between(graph, 0.05)
    assert all(executed(graph, budget, rule) is None for rule in RULES)
    assert all(executed(graph, budget, rule) is not None for rule in TIGHT_RULES)


def test_guide_or_bias_keeps_a_tensor_in_memory() -> None:
    graph = make_training_chain(16)
    budget = between(graph, 0.3)
    order = executed(graph, budget, EvictionRule())
    again = next(i for i in order if order.count(i) > 1)
    (stays,) = graph.ops[again].outputs

    handed = np.zeros((2, len(graph.tensors)), dtype=bool)
    handed[:, stays] = True
    guided = executed(graph, budget, EvictionRule(), guide=Guide((15, len(graph.ops) - 1), handed))
    assert guided.count(again) == 1
    assert len(guided) > len(graph.ops)

    bias = np.ones(len(graph.tensors))
    bias[stays] = 1e9
    biased = executed(graph, budget, EvictionRule(), bias=bias)
    assert biased.count(again) == 1


def test_evicting_order_is_none_at_a_limit() -> None:
    graph = make_training_chain(16)
    budget = between(graph, 0.3)
    order = executed(graph, budget, EvictionRule())
    seconds = sum(graph.ops[i].time_s for i in order)
    assert executed(graph, budget, EvictionRule(), max_time_s=seconds) == order
    assert executed(graph, budget, EvictionRule(), max_time_s=0.99 * seconds) is None
    assert executed(graph, budget, EvictionRule(), should_stop=lambda: True) is None
    assert executed(graph, bound_least_budget(graph).budget_bytes - 1, EvictionRule()) is None


def test_the_least_peak_is_looked_for_no_longer_than_is_allowed() -> None:
    graph = make_training_chain(16)
    assert find_least_evicting_schedule(graph, WallClock(0.0)) is None
    assert find_least_evicting_schedule(graph, WallClock(60.0), should_stop=lambda: True) is None


TRANSFORMER = transformer(TransformerSize(layers=2))


def offering(graph: Graph, share: float, link_bytes_per_s: float) -> Problem:
    """With a budget from the bound of single ops (0) to the peak (1)."""
    whole = apply_options(graph, ("offload",), Surroundings(Link.even(link_bytes_per_s)))
    least, peak = bound_least_budget(whole).budget_bytes, simulate(graph, keep_everything(graph)).peak_bytes
    return build_problem(whole, least + int(share * (peak - least)))


def tried(problem: Problem, rule: EvictionRule) -> Trial | None:
    found = find_evicting_order(problem, rule)
    if found is None or find_late_writers(problem, order := order_of(problem, *found)):
        return None
    return try_out(problem, order)


def per_second(graph: Graph, steps: float) -> float:
    """A link that carries all that the step makes in so many steps."""
    return sum(t.size_bytes for t in graph.tensors if not t.static) / (graph.time_s * steps)


@pytest.mark.parametrize("graph", [TRANSFORMER, draw_training_step(3, 40), make_training_chain(20)])
@pytest.mark.parametrize("share", [0.15, 0.5])
def test_evicting_orders_with_offload_fit_the_budget(graph: Graph, share: float) -> None:
    problem = offering(graph, share, per_second(graph, 1.0))
    copied = 0
    for rule in (*RULES, *TIGHT_RULES):
        for price in (0.0, 0.1):
            trial = tried(problem, replace(rule, channel=price))
            assert trial.peak_bytes <= problem.budget_bytes
            copied += len(trial.order.reloads)
    assert copied > 0
    assert find_evicting_order(problem, RULES[0]) == find_evicting_order(problem, RULES[0])


@pytest.mark.parametrize("share", [0.15, 0.5])
def test_the_way_that_costs_less_is_taken(share: float) -> None:
    graph = TRANSFORMER
    rule = EvictionRule(channel=0.01)
    fast, slow = (offering(graph, share, per_second(graph, steps)) for steps in (0.1, 1e6))
    recomputing = find_evicting_order(build_problem(slow.graph, slow.budget_bytes), rule)
    assert not recomputing.reloads
    assert find_evicting_order(slow, rule) == recomputing
    # Where the link is no limit, next to nothing is executed again.
    trial = tried(fast, rule)
    assert trial.time_s < graph.time_s + 0.1 * (simulate(graph, schedule_of(graph, recomputing.computed)).time_s - graph.time_s)


def test_higher_channel_price_reduces_transfers() -> None:
    problem = offering(TRANSFORMER, 0.3, per_second(TRANSFORMER, 0.5))
    copied = []
    for price in (0.0, 0.1, 1e3):
        trial = tried(problem, EvictionRule(channel=price))
        copied.append(sum(problem.sizes[t] for t, _ in trial.order.reloads))
    assert copied[0] > copied[1] > copied[2] == 0


def test_offload_fits_budgets_that_recomputation_cannot() -> None:
    """The budget is below what recomputing alone takes."""
    once = 0
    for seed in range(30):
        graph = draw_graph(seed, 12)
        problem = offering(graph, 0.1, 1.0)
        if problem.budget_bytes >= bound_least_budget(graph).budget_bytes:
            continue
        trials = [tried(problem, rule) for rule in (*RULES, *TIGHT_RULES)]
        assert all(trial is None or trial.peak_bytes <= problem.budget_bytes for trial in trials)
        once += any(trials)
    assert once > 5


def test_solve_finds_a_schedule_with_copies_before_using_models(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = offering(TRANSFORMER, 0.15, per_second(TRANSFORMER, 4.0))
    plain = build_problem(TRANSFORMER, problem.budget_bytes)
    found = filter(None, (find_evicting_order(plain, rule) for rule in RULES))
    recomputing_s = min(simulate(TRANSFORMER, schedule_of(TRANSFORMER, one.computed)).time_s for one in found)

    stages = [stage for stage in driver.STAGES if stage.strategy in (KeepEverything, EvictionRules)]
    monkeypatch.setattr(driver, "STAGES", stages)
    search = Search.of(ask(problem.whole, problem.budget_bytes))
    driver.run(search)
    best = search.incumbent.best_trial
    assert best.order.reloads
    assert best.peak_bytes <= problem.budget_bytes
    assert best.time_s - TRANSFORMER.time_s < 0.8 * (recomputing_s - TRANSFORMER.time_s)


def test_unrecomputable_ops_run_once_with_offload() -> None:
    once = 0
    for seed in range(30):
        problem = offering(draw_graph(seed, 40), 0.1, 1.0)
        for rule in RULES:
            if (found := find_evicting_order(problem, rule)) is not None:
                executed, _ = found
                again = {op for op in executed if executed.count(op) > 1}
                once += len(executed) > problem.ops
                assert all(problem.graph.ops[op].recomputable for op in again), seed
    assert once
