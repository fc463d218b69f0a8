"""Rules of eviction: what they execute fits, and how little memory they get by with."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from graphs.ir import Graph
from graphs.schedule import keep_everything, schedule_of
from graphs.simulate import simulate
from graphs.synthetic.random_graphs import draw_training_step
from graphs.synthetic.small import make_training_chain
from graphs.synthetic.transformer import TransformerSize, transformer
from solvers.bounds import bound_least_budget
from solvers.clock import WallClock
from solvers.eviction.engine import Eviction, find_evicting_order
from solvers.eviction.least_peak import find_least_evicting_schedule
from solvers.eviction.rules import RULES, TIGHT_RULES, EvictionRule, EvictionSettings, Guide
from solvers.problem import build_problem


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
