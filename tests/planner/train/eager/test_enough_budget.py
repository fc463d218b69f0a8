"""The budget that would do for a recorded step."""

import pytest

from planner.train.eager.enough_budget import find_enough_bytes
from planner.train.eager.step_log import build_recorded_step
from tests.support.eager.step_logs import LENGTH, SIZE, log_of, ops_of_chain


@pytest.mark.parametrize("heuristic", ["dtr", "lru", "dtr-random"])
def test_a_chain_needs_two_gradients_and_an_activation(heuristic: str) -> None:
    step = build_recorded_step(log_of(ops_of_chain()))
    assert find_enough_bytes(step, heuristic, max_recomputation=100.0) == 3 * SIZE


def test_sufficient_budget_without_recomputation_is_the_peak() -> None:
    step = build_recorded_step(log_of(ops_of_chain()))
    assert find_enough_bytes(step, "dtr", max_recomputation=0.0) == (LENGTH + 1) * SIZE
