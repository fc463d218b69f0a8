"""Moves on schedules with transfers: what comes of them fits and computes what the step computes."""

import random

import pytest

from graphs.ir import Graph
from graphs.options.surroundings import Link, Surroundings
from graphs.synthetic.random_graphs import draw_training_step
from planner.capture.options import apply_options
from solvers.problem import Problem, build_problem
from solvers.windows.decoding.decode import Trial, order_of, try_out
from solvers.windows.decoding.pruning import prune_with_transfers
from solvers.windows.strategies.offloading import generate_simpler, recompute_where_it_waits
from tests.support.marks import slow
from tests.support.solvers.random_orders import random_order, short_form

GB = 10**9


def offering(seed: int, link_bytes_per_s: float) -> Graph:
    return apply_options(draw_training_step(seed, 12), ("offload",), Surroundings(Link.even(link_bytes_per_s)))


def random_trial(draw: random.Random, problem: Problem) -> Trial:
    computed = short_form(problem.graph, random_order(draw, problem))
    reloads = frozenset(
        (t, place)
        for place, op in enumerate(computed)
        for t in problem.inputs[op]
        if t in problem.round_trips and draw.random() < 0.4
    )
    return try_out(problem, order_of(problem, computed, reloads))


@pytest.mark.parametrize("seed", [*range(5), *slow(*range(5, 8))])
def test_recomputing_in_place_of_a_reload_shortens_waits(seed: int) -> None:
    draw = random.Random(seed)
    problem = build_problem(offering(seed, 2e9), 100 * GB)
    waiting = random_trial(draw, problem)
    assert any(waiting.waits_s)
    budget = waiting.peak_bytes
    found = recompute_where_it_waits(problem, waiting, budget, lambda: False)
    assert found.peak_bytes <= budget and found.time_s <= waiting.time_s
    assert sum(found.waits_s) < sum(waiting.waits_s)
    assert len(found.order.reloads) < len(waiting.order.reloads)
    assert recompute_where_it_waits(problem, waiting, budget, lambda: True) is waiting


@pytest.mark.parametrize("seed", [*range(5), *slow(*range(5, 8))])
def test_simpler_orders_have_one_execution_or_copy_less(seed: int) -> None:
    draw = random.Random(seed)
    problem = build_problem(offering(seed, 20e9), 100 * GB)
    trial = random_trial(draw, problem)
    kinds = {0: 0, 1: 0}
    for place, computed, reloads in generate_simpler(problem, trial, trial.peak_bytes):
        found = try_out(problem, order_of(problem, computed, reloads))  # raises if what is read is not there
        fewer = len(trial.order.computed) - len(computed)
        kinds[fewer] += 1
        assert fewer or len(reloads) == len(trial.order.reloads) - 1
        assert (place is not None) == bool(fewer)
        if fewer and reloads <= trial.order.reloads:
            assert found.peak_bytes
    assert kinds[1] > 3


def test_executions_there_is_room_for_are_left_out_together() -> None:
    left_out, none_recomputed = [], 0
    for seed in range(8):
        draw = random.Random(seed)
        problem = build_problem(offering(seed, 20e9), 100 * GB)
        trial = random_trial(draw, problem)
        found = prune_with_transfers(problem, trial, trial.peak_bytes, lambda: False)
        assert found.peak_bytes <= trial.peak_bytes and found.time_s <= trial.time_s
        left_out.append(len(trial.order.computed) - len(found.order.computed))
        # Where memory is no limit, nothing is executed again, unless copies take as long anyway.
        roomy = prune_with_transfers(problem, trial, 100 * GB, lambda: False)
        none_recomputed += roomy.order.computed == tuple(range(problem.ops))
        assert prune_with_transfers(problem, trial, 100 * GB, lambda: True) is trial
    assert all(number >= 0 for number in left_out) and max(left_out) > 2
    assert none_recomputed > 4
