"""The least feasible budget: what is proved, and how it is said; margins of schedules, and the smallest that do."""

from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from planner.graphs.ir import Graph
from planner.graphs.options.offload import NO_OFFLOADS, Offloads
from planner.graphs.reordering import permute
from planner.graphs.schedule import Compute, keep_everything
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.draft import Draft
from planner.graphs.synthetic.random_graphs import draw_graph
from planner.graphs.synthetic.small import make_training_chain
from planner.solvers import bounds
from planner.solvers.bounds import MemoryNeed, bound_least_budget, describe_need, describe_too_small, find_any_order_need, need_at
from planner.solvers.margins import Margins, MarginSearch, add_margins, find_largest_difference, find_middle
from planner.solvers.order.reorder import list_constraints
from tests.support.graphs.small_graphs import diamond, kept_output, two_outputs
from tests.support.solvers.brute_force import fastest


@pytest.mark.parametrize(
    ("graph", "least"),
    [(make_training_chain(3), 3), (make_training_chain(30), 3), (diamond(), 8), (two_outputs(), 7), (kept_output(), 6)],
)
def test_least_budget_bound_of_small_graphs_is_known(graph: Graph, least: int) -> None:
    assert bound_least_budget(graph).budget_bytes == least


def test_kept_and_static_tensors_count_in_the_bound() -> None:
    draft = Draft()
    weight = draft.add_static("weight", 100)
    (a,) = draft.add_op("a", [weight], [10])
    (b,) = draft.add_op("b", [weight], [20], workspace_bytes=7)
    draft.add_op("c", [b], [5])
    need = bound_least_budget(draft.build_graph([a])).need
    assert (need.op, need.total_bytes) == (1, 100 + 10 + 20 + 7)
    assert (need.static_bytes, need.held_bytes) == (100, 10)
    assert (need.inputs_bytes, need.outputs_bytes, need.workspace_bytes) == (0, 20, 7)


def test_unrecomputable_tensors_count_as_held() -> None:
    draft = Draft()
    (a,) = draft.add_op("a", [], [10], recomputable=False)
    draft.add_op("b", [], [20])
    draft.add_op("c", [a], [1])
    assert bound_least_budget(draft.build_graph()).budget_bytes == 30


def test_ops_above_the_budget_count_as_unrecomputable() -> None:
    draft = Draft()
    x, mate = draft.add_op("b", [], [1, 9])  # made again it takes 19, as its kept output is there already
    draft.add_op("c", [], [8])
    draft.add_op("d", [x], [1])
    graph = draft.build_graph([mate])
    # From 19 bytes on b could be made again for d, and c would take 9 + 8; below, x is there as well.
    assert need_at(graph, None).total_bytes == need_at(graph, 19).total_bytes == 17
    assert need_at(graph, 18).total_bytes == 18
    assert bound_least_budget(graph).budget_bytes == 18


def test_budgets_are_searched_only_where_executing_an_op_again_takes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []

    def counting(graph: Graph, budget_bytes: int | None, offloads: Offloads = NO_OFFLOADS) -> MemoryNeed:
        asked.append(budget_bytes)
        return need_at(graph, budget_bytes, offloads)

    monkeypatch.setattr(bounds, "need_at", counting)
    graph = make_training_chain(12)
    assert bound_least_budget(graph).budget_bytes == 3
    assert asked == [None, 3]
    asked.clear()
    assert bound_least_budget(draw_graph(5, 10)).budget_bytes > need_at(draw_graph(5, 10), None).total_bytes
    assert len(asked) > 3


def test_inputs_of_an_op_count_beside_what_makes_the_last_of_them() -> None:
    draft = Draft()
    weight = draft.add_static("weight", 100)
    (kept,) = draft.add_op("kept", [weight], [10])
    (a,) = draft.add_op("a", [], [3])
    (b,) = draft.add_op("b", [a], [4], workspace_bytes=1)
    (c,) = draft.add_op("c", [a], [5])
    (d,) = draft.add_op("d", [b], [2])
    draft.add_op("e", [c, d, weight], [1])
    graph = draft.build_graph([kept])
    need = bound_least_budget(graph).need
    # d may be the last input of e, which takes b, d and c; or c, which takes a, c and d. The first op alone takes 9.
    assert need.total_bytes == 100 + 10 + 3 + 5 + 2
    assert find_any_order_need(draft.build_graph()).total_bytes == 100 + 3 + 5 + 2
    assert describe_need(graph, need) == (
        "op 'c' needs 3 B of inputs, 5 B of outputs, 2 B of other inputs of op 'e', 10 B of tensors that must be kept and 100 B "
        "of static memory at once"
    )
    assert fastest(graph, 119) is None and fastest(graph, 120) is not None


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 10**6), ops=st.integers(3, 7))
def test_no_schedule_runs_below_the_bound(seed: int, ops: int) -> None:
    graph = draw_graph(seed, ops)
    least = bound_least_budget(graph)
    assert not least.budget_bytes or fastest(graph, least.budget_bytes - 1) is None


def test_infeasible_message_names_the_op_and_its_memory() -> None:
    draft = Draft()
    (x,) = draft.add_op("x", [], [5_200_000_000])
    draft.add_op("mm_37", [x], [3_100_000_000], workspace_bytes=110_000_000)
    graph = draft.build_graph()
    least = bound_least_budget(graph)
    assert describe_need(graph, least.need) == (
        "op 'mm_37' needs 5.20 GB of inputs, 3.10 GB of outputs and 110.00 MB of workspace at once"
    )
    message = describe_too_small(graph, 8 * 10**9, least)
    assert message.startswith("budget 8.00 GB is below 8.41 GB, the least any schedule of this graph needs: op 'mm_37' needs")
    assert "Raise the budget" in message


def two_gradients() -> Graph:
    """Two ops that make what is kept, in either order: only in program order is the small one there beside the large one."""
    draft = Draft()
    (small,) = draft.add_op("small", [], [10])
    (large,) = draft.add_op("large", [], [20], workspace_bytes=5)
    return draft.build_graph([small, large])


def test_message_separates_bounds_of_one_order_from_all_orders() -> None:
    graph = two_gradients()
    least, anyway = bound_least_budget(graph), find_any_order_need(graph)
    assert (least.budget_bytes, anyway.total_bytes) == (35, 25)
    # The other way round they take 30, which is more than 25 and less than 35.
    turned = permute(graph, [1, 0]).graph
    assert simulate(turned, keep_everything(turned)).peak_bytes == 30
    for budget, other_orders in ((32, False), (24, True)):
        said = describe_too_small(graph, budget, least)
        assert said.startswith(f"budget {budget} B is below 35 B, the least any schedule of this graph needs that first executes")
        assert ("No other order needs less than 25 B." in said) == other_orders


def test_bound_for_all_orders_counts_inputs_and_workspace() -> None:
    draft = Draft()
    weight = draft.add_static("weight", 100)
    (a,) = draft.add_op("a", [weight], [10])
    (b,) = draft.add_op("b", [a], [20])
    draft.add_op("c", [b], [5], workspace_bytes=7)
    need = find_any_order_need(draft.build_graph([a]))
    assert (need.op, need.total_bytes) == (2, 100 + 10 + 20 + 5 + 7)
    assert (need.static_bytes, need.held_bytes, need.inputs_bytes) == (100, 10, 20)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 10**6), ops=st.integers(1, 12), mixed=st.randoms(use_true_random=False))
def test_no_order_needs_less_than_the_bound_for_all_orders(seed: int, ops: int, mixed: Random) -> None:
    graph = draw_graph(seed, ops)
    need = find_any_order_need(graph).total_bytes
    assert need <= bound_least_budget(graph).budget_bytes
    before, _ = list_constraints(graph)
    order: list[int] = []
    while len(order) < ops:
        order.append(mixed.choice([op for op in range(ops) if op not in order and before[op] <= set(order)]))
    other = permute(graph, order).graph
    assert find_any_order_need(other).total_bytes == need <= bound_least_budget(other).budget_bytes


def test_an_op_that_holds_nothing() -> None:
    draft = Draft()
    draft.add_op("nothing", [], [0])
    graph = draft.build_graph()
    assert describe_need(graph, bound_least_budget(graph).need) == "op 'nothing' needs nothing at once"


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 10**6), ops=st.integers(1, 12))
def test_least_budget_bound_is_at_most_the_keep_everything_peak(seed: int, ops: int) -> None:
    graph = draw_graph(seed, ops)
    least = bound_least_budget(graph)
    assert least.budget_bytes <= simulate(graph, keep_everything(graph)).peak_bytes
    # The least budget that is not refuted, and refuted one byte below.
    assert need_at(graph, least.budget_bytes).total_bytes <= least.budget_bytes
    assert need_at(graph, least.budget_bytes - 1).total_bytes >= least.budget_bytes
    assert least.need.total_bytes >= least.budget_bytes


def test_a_schedule_has_room_for_the_margin_while_its_op_runs() -> None:
    graph = make_training_chain(3)
    schedule = keep_everything(graph)
    before, after = (simulate(one, schedule) for one in (graph, add_margins(graph, {1: 5})))
    grown = [more - less for less, more in zip(before.memory_bytes, after.memory_bytes, strict=True)]
    assert schedule.steps[1] == Compute(1)
    assert grown == [0, 5, *[0] * (len(grown) - 2)]
    assert add_margins(graph, {}) is graph


def test_margins_are_interpolated_half_way() -> None:
    assert find_middle({0: 4, 1: 7}, {0: 10, 2: 1, 3: 6}) == {0: 7, 3: 3}
    assert find_largest_difference({0: 10, 2: 1}, {0: 4, 1: 90}) == 6
    assert find_largest_difference({}, {1: 90}) == 0


def doubled(now: Margins) -> Margins:
    return {0: 2 * now.get(0, 8)}


@pytest.mark.parametrize("wanted", [1, 16, 20, 48, 60])
def test_margins_grow_until_a_schedule_fits_and_are_then_halved(wanted: int) -> None:
    search = MarginSearch(close_bytes=1, most_solves=5, most_better=10)
    tried = []
    while search.learn(fits=bool(search.now) and search.now[0] >= wanted, more=doubled):
        tried.append(search.now[0])
    assert wanted <= search.fitted[0] <= wanted + 2
    first = next(size for size in tried if size >= wanted)
    assert tried[: tried.index(first) + 1] == [16 * 2**n for n in range(tried.index(first) + 1)]


def test_margins_with_which_nothing_is_found_are_halved() -> None:
    search = MarginSearch(close_bytes=1, most_solves=5, most_better=3)
    assert search.learn(fits=False, more=doubled) and search.now == {0: 16}
    assert search.learn(fits=None, more=doubled) and search.now == {0: 8}
    assert search.learn(fits=False, more=doubled) and search.now == {0: 16} and search.failed == {0: 8}
    assert search.learn(fits=None, more=doubled) and search.now == {0: 12}


def test_a_search_for_margins_ends() -> None:
    search = MarginSearch(close_bytes=0, most_solves=4, most_better=2)
    assert [search.learn(fits=False, more=doubled) for _ in range(5)] == [True] * 4 + [False]
    search = MarginSearch(close_bytes=0, most_solves=4, most_better=2, now={0: 100})
    assert [search.learn(fits=True, more=doubled) for _ in range(3)] == [True, True, False]
    assert not MarginSearch(close_bytes=0, most_solves=4, most_better=2).learn(fits=False, more=lambda now: {})
