"""Local margins: schedules of a graph with them leave as much free, and a search finds the smallest that do."""

import pytest

from graphs.schedule import Compute, keep_everything
from graphs.simulate import simulate
from graphs.synthetic.small import make_training_chain
from solvers.margins import Margins, MarginSearch, add_margins, find_largest_difference, find_middle


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
