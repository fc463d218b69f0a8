"""Plans with fewer allocated bytes until a second measure of them is within its budget."""

from collections.abc import Callable

import pytest

from graphs.errors import InfeasibleError
from planner.memory.fit import Bracket, find_largest, fit
from planner.settings.budget import Bytes

PEAK, LEAST = 10_000, 2_000  # allocated bytes that plans may take


def in_segments(size: int) -> Callable[[int], int]:
    return lambda allocated: -(-allocated // size) * size


def fitted(measure: Callable[[int], int], budget: int, tries: int = 12) -> tuple[int, int, list[int]]:
    """A plan is its allocated bytes; also those that were asked for."""
    asked: list[int] = []

    def solve(wanted: Bytes) -> int:
        asked.append(wanted.size_bytes)
        if wanted.size_bytes < LEAST:
            raise InfeasibleError("below the least")
        return wanted.size_bytes - wanted.size_bytes % 7  # schedules take a little less than their budget

    return *fit(PEAK, solve, measure, Bracket(budget), allocated=lambda plan: plan, tries=tries), asked


@pytest.mark.parametrize("measure", [lambda taken: taken + 900, in_segments(1000), in_segments(3000), lambda taken: 2 * taken])
@pytest.mark.parametrize("budget", [10_000, 9_500, 6_500, 4_500])
def test_a_plan_is_found_whose_measure_is_within_the_budget(measure: Callable[[int], int], budget: int) -> None:
    plan, taken, asked = fitted(measure, budget)
    assert taken == measure(plan) <= budget
    assert all(0 < one < PEAK for one in asked)
    assert bool(asked) == (measure(PEAK) > budget)


def test_the_plan_that_takes_least_is_returned_where_none_fits() -> None:
    plan, taken, asked = fitted(lambda allocated: 5_000 + allocated // 2, 5_500)
    assert taken == 5_000 + plan // 2 > 5_500
    assert plan <= LEAST + 7 and len(asked) == 12
    assert any(one < LEAST for one in asked)


def test_no_more_plans_are_made_than_allowed() -> None:
    assert fitted(in_segments(1000), 4_500, tries=0) == (PEAK, PEAK, [])
    assert len(fitted(lambda _: PEAK, 4_500, tries=3)[2]) == 3


def test_budgets_of_a_bracket_are_between_its_ends() -> None:
    bracket = Bracket(5_000, floor_bytes=1_000)
    assert bracket.choose_next_bytes(1) is None  # nothing was too much
    bracket.learn(PEAK, 9_000, 7_000)
    assert bracket.choose_next_bytes(1) == 9_000 - 2_000
    assert bracket.choose_next_bytes(1, excess_bytes=3_000) == 9_000 - 3_000
    bracket.learn(7_000, 7_000, 4_000)
    assert bracket.choose_next_bytes(1) == 7_000 + (9_000 - 7_000) // 3  # where the measure would be the budget
    assert bracket.choose_next_bytes(2_000) is None


def test_the_largest_number_at_which_something_is_found() -> None:
    found = find_largest(lambda number: number if number <= 0.3 else None, 0.0, 1.0, halvings=10)
    assert 0.3 - 2**-10 <= found <= 0.3
    assert find_largest(lambda _: None, 0.0, 1.0, halvings=4) is None
