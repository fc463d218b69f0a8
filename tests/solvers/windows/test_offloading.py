"""Schedules with transfers: moves on them fit and compute the step; the least budget with all away that is not needed."""

import random

import pytest

from graphs.ir import Graph
from graphs.options.offload import remove_offload
from graphs.options.surroundings import Link, Surroundings
from graphs.simulate import simulate
from graphs.synthetic.draft import Draft
from graphs.synthetic.random_graphs import draw_graph, draw_training_step
from planner.capture.options import apply_options
from solvers.bounds import bound_least_budget, need_at
from solvers.clock import WorkClock
from solvers.least import bracket_least_budget, find_least_known
from solvers.problem import Problem, build_problem
from solvers.registry import get_solver
from solvers.result import Status
from solvers.windows.decoding.decode import Trial, order_of, try_out
from solvers.windows.decoding.pruning import prune_with_transfers
from solvers.windows.strategies.offloaded_orders import find_least_offloaded
from solvers.windows.strategies.offloading import generate_simpler, recompute_where_it_waits
from tests.support.graphs.options import with_trips
from tests.support.marks import slow
from tests.support.solvers.answers import ask
from tests.support.solvers.brute_force_transfers import fastest_with_transfers
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


def once_each(made: int = 4, size: int = 10) -> Graph:
    """Tensors that cannot be made again, all of them read at the end, the last first; an op of 25 bytes between."""
    draft = Draft()
    tensors = [draft.add_op(f"make{i}", [], [size], recomputable=False)[0] for i in range(made)]
    draft.add_op("between", [], [], workspace_bytes=25)
    for i, t in reversed(list(enumerate(tensors))):
        draft.add_op(f"read{i}", [t], [1])
    return draft.build_graph()


@pytest.mark.parametrize(("host_bytes", "least"), [(None, 25), (40, 25), (39, 26), (30, 35), (12, 53), (0, 65)])
def test_least_budget_depends_on_host_capacity(host_bytes: int | None, least: int) -> None:
    whole = with_trips(once_each(), host_bytes=host_bytes)
    program, offloads = remove_offload(whole)
    assert bound_least_budget(whole).budget_bytes == least
    assert need_at(program, None, offloads).held_bytes == least - 25
    assert bound_least_budget(program).budget_bytes == 65


@pytest.mark.parametrize(("host_bytes", "found"), [(None, 25), (40, 25), (39, 35), (30, 35), (12, 55), (0, 65)])
def test_a_schedule_takes_as_little_where_whole_tensors_can(host_bytes: int | None, found: int) -> None:
    graph = with_trips(once_each(), host_bytes=host_bytes)
    trial = find_least_offloaded(graph, WorkClock(1.0))
    simulation = simulate(graph, trial.schedule)
    assert simulation.peak_bytes == trial.peak_bytes == found
    assert simulation.pool_peaks_bytes[1] == 65 - found


def test_the_host_makes_less_possible_than_recomputing_alone() -> None:
    less = 0
    for seed in range(8):
        program = draw_training_step(seed, 24)
        without = simulate(program, find_least_known(program, WorkClock(0.5))).peak_bytes
        graph = with_trips(program, 1e9)
        simulation = simulate(graph, find_least_known(graph, WorkClock(0.5)))
        assert bound_least_budget(graph).budget_bytes <= simulation.peak_bytes <= without
        less += simulation.peak_bytes < without
    assert less > 0


@pytest.mark.slow
def test_least_offloaded_budget_is_bracketed() -> None:
    exact = 0
    for seed in range(30):
        draw = random.Random(seed)
        program = draw_graph(draw.randint(0, 10**6), draw.randint(3, 4))
        graph = with_trips(program, host_bytes=draw.choice((None, None, draw.randint(3, 20))))
        proved = bound_least_budget(graph).budget_bytes
        found = simulate(graph, find_least_known(graph, WorkClock(0.5))).peak_bytes
        assert proved <= found
        try:
            if proved > 1:
                assert fastest_with_transfers(graph, proved - 1, most=20_000) is None, seed
        except TimeoutError:
            continue
        exact += proved == found
    assert exact > 15


@pytest.mark.slow
def test_the_exact_solver_has_a_schedule_at_the_least_budget() -> None:
    graph = with_trips(draw_training_step(5, 40), 1e9)
    bracket = bracket_least_budget(graph, clock=WorkClock(4.0))
    assert bracket.proved_bytes <= bracket.found_bytes
    result = get_solver("windows")(ask(graph, bracket.found_bytes, time_limit_s=5))
    assert result.schedule is not None and result.peak_bytes <= bracket.found_bytes
    refused = get_solver("windows")(ask(graph, bound_least_budget(graph).budget_bytes - 1))
    assert refused.status is Status.INFEASIBLE
