"""Budgets as users write them: amounts, shares, auto, and overheads in place of one."""

from typing import Any

import pytest

import planner
from graphs.errors import BudgetError
from graphs.ir import Graph
from graphs.synthetic.random_graphs import draw_graph
from graphs.synthetic.small import make_training_chain
from planner.plans.summary import summarize
from planner.settings.budget import Auto, Bytes, Overhead, Share, read_budget, read_budget_or_overhead
from solvers.bounds import bound_least_budget
from tests.support.solvers.brute_force import fastest


@pytest.fixture
def graph() -> Graph:
    return make_training_chain(6)


@pytest.mark.parametrize(
    ("budget", "size_bytes"), [("60%", 600), ("2kB", 2000), (7, 7), (2**70, 2**63 - 1), ("1e30GB", 2**63 - 1), ("130 %", 1300)]
)
def test_budgets_come_to_bytes(budget: str | int, size_bytes: int) -> None:
    assert read_budget(budget).resolve(1000) == size_bytes


def test_a_float_is_a_share(graph: Graph) -> None:
    assert planner.solve(graph, 0.6).budget_bytes == planner.solve(graph, "60%").budget_bytes
    assert [read_budget(budget) for budget in (1.0, 0.125, 8, "8GB")] == [Share(100), Share(12.5), Bytes(8), Bytes(8 * 10**9)]
    assert [str(Share(percent)) for percent in (60.0, 12.5, 33.3)] == ["60%", "12.5%", "33.3%"]


@pytest.mark.parametrize("budget", [0.0, -0.5, 1.5, 8e9, float("nan")])
def test_a_float_that_is_no_share_raises(budget: float, graph: Graph) -> None:
    with pytest.raises(BudgetError, match=r"budget is .*: a float is a share .* above 0 and at most 1"):
        planner.solve(graph, budget)


@pytest.mark.parametrize("budget", ["auto", " AUTO "])
def test_auto_without_a_device_raises(budget: str, graph: Graph) -> None:
    assert read_budget(budget) == Auto()
    with pytest.raises(BudgetError, match="there is no device here, only a graph: write an amount"):
        planner.solve(graph, budget)


@pytest.mark.parametrize(("given", "share"), [("10%", 0.1), (0.1, 0.1), ("0.25", 0.25), (0, 0.0), ("150%", 1.5)])
def test_overheads_are_parsed(given: str | float, share: float) -> None:
    assert read_budget_or_overhead(None, given) == Overhead(share)


@pytest.mark.parametrize("given", ["ten", "-1%", -0.1, float("nan"), float("inf"), True, "", "8GB", object()])
def test_other_overheads_raise(given: Any) -> None:
    with pytest.raises(BudgetError, match=r"max_overhead is .*: must be a fraction of the step time"):
        read_budget_or_overhead(None, given)


@pytest.mark.parametrize("given", [{}, {"budget": "8GB", "max_overhead": 0.1}, {"budget": None, "max_overhead": None}])
def test_not_exactly_one_of_budget_and_overhead_raises(given: dict[str, Any], graph: Graph) -> None:
    with pytest.raises(BudgetError, match="give either a budget or max_overhead"):
        planner.solve(graph, **given)


@pytest.mark.parametrize("given", ["0%", "8", "8GBit", "GB", 0, -1, True, None, object()])
def test_what_is_no_budget_raises_where_it_is_read(given: Any) -> None:
    with pytest.raises(BudgetError, match="budget"):
        read_budget(given)


def test_budgets_are_equal_however_they_are_written() -> None:
    assert read_budget("2kB") == read_budget(2000) == Bytes(2000)
    assert read_budget("60 %") == read_budget("60.0%") == read_budget(0.6) == Share(60)
    assert read_budget_or_overhead(None, "10%") == read_budget_or_overhead(None, 0.1) != read_budget("10%")
    assert read_budget(Share(60)) == Share(60)


@pytest.mark.parametrize("seed", range(12))
def test_the_least_memory_at_a_price_is_that_of_brute_force(seed: int) -> None:
    graph = draw_graph(seed, ops=7)
    price = 0.3
    plan = planner.solve(graph, max_overhead=price, tolerance=0.0, reorder=False, time_limit_s=20)
    assert plan.overhead <= price + 1e-9 and plan.peak_bytes == plan.budget_bytes
    limit_s = graph.time_s * (1 + price) * (1 + 1e-9)
    peak_bytes = summarize(graph).keep_everything_peak_bytes
    within = [
        budget
        for budget in range(bound_least_budget(graph).budget_bytes, peak_bytes + 1)
        if (time_s := fastest(graph, budget)) is not None and time_s <= limit_s
    ]
    assert min(within) <= plan.budget_bytes <= min(within) + max(1, 0.01 * plan.budget_bytes)
    assert plan.settings["least_budget_proved_bytes"] <= min(within)
    assert plan.settings["max_overhead"] == price


@pytest.mark.slow
def test_more_overhead_never_needs_more_memory() -> None:
    graph = make_training_chain(10)
    found = [planner.solve(graph, max_overhead=price, work_limit=20).budget_bytes for price in (0, 0.05, 0.1, 0.3, 0.6)]
    assert found == sorted(found, reverse=True)
    assert found[0] == summarize(graph).keep_everything_peak_bytes > found[-1]


def test_the_least_memory_is_reproducible_by_work() -> None:
    graph = draw_graph(3, ops=40)
    first, second = (planner.solve(graph, max_overhead="20%", work_limit=5) for _ in range(2))
    assert (first.budget_bytes, first.schedule) == (second.budget_bytes, second.schedule)


def test_a_search_that_is_stopped_keeps_everything(graph: Graph) -> None:
    plan = planner.solve(graph, max_overhead=0.5, should_stop=lambda: True)
    assert plan.overhead <= 0.5
    assert plan.budget_bytes <= summarize(graph).keep_everything_peak_bytes


def test_options_lower_the_memory_at_a_price() -> None:
    graph = make_training_chain(8)
    alone = planner.solve(graph, max_overhead=0.05, work_limit=20)
    offloaded = planner.solve(graph, max_overhead=0.05, work_limit=20, options=["offload"], link="1000GB/s", host_budget="1GB")
    assert offloaded.budget_bytes < alone.budget_bytes
    assert offloaded.overhead <= 0.05
