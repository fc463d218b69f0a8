"""The exact solver with ops on other devices, against all schedules of small graphs."""

from collections import Counter

import pytest

from graphs.clocks import find_results_elsewhere
from graphs.ir import Graph
from graphs.simulate import simulate
from planner.capture.options import apply_options
from solvers.clock import WallClock, WorkClock
from solvers.highs import solve_program
from solvers.highs.program import Outcome
from solvers.pass_ends import add_pass_ends
from solvers.problem import OBJECTIVE_SCALE, build_problem
from solvers.request import Request
from solvers.result import Status
from solvers.tolerance import Tolerance
from solvers.windows import solve
from solvers.windows.relaxation.discretization import Discretization
from solvers.windows.relaxation.models import build_relaxation
from tests.support.graphs.options import check_by_both_judges, in_two_passes, random_placement
from tests.support.graphs.random_choices import BESIDE, any_schedule, around, found_in_a_step
from tests.support.marks import slow
from tests.support.solvers.brute_force_placement import fastest_overlapped

CLOSE = 1e-6
SEEDS = [
    range(30),
    *slow(*(range(first, first + 100) for first in range(100, 1000, 100))),
]


def optimum(graph: Graph, budget_bytes: int) -> float | None:
    """The least makespan, None if nothing fits.

    Raises:
        TimeoutError: there are too many schedules.
    """
    return fastest_overlapped(graph, budget_bytes, most=20_000)


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_relaxations_in_one_window_and_in_all_are_no_higher_than_the_best_schedule(seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        graph, budget = random_placement(seed, 2 + seed % 2)
        try:
            expected = optimum(graph, budget)
        except TimeoutError:
            continue
        problem = build_problem(add_pass_ends(graph).graph, budget)
        last = problem.places.last
        for ends in ((problem.ops - 1,), tuple(sorted(set(last)))):
            program = build_relaxation(problem, Discretization(ends, places=last)).program
            answer = solve_program(program, clock=WallClock(30.0), absolute_gap=0.0)
            if answer.outcome is Outcome.INFEASIBLE:
                assert expected is None, (seed, ends)
                seen["proved infeasible"] += 1
                continue
            if expected is not None:
                bound_s = problem.base_s * (1 + answer.bound / OBJECTIVE_SCALE)
                assert bound_s <= expected * (1 + CLOSE) + CLOSE, (seed, ends)
                seen["feasible"] += 1
                seen["exact"] += bound_s >= expected - CLOSE
    assert seen["proved infeasible"] >= 2 and 2 * seen["exact"] >= seen["feasible"] >= len(seeds), seen


@pytest.mark.parametrize("seeds", [range(1000, 1010), *slow(range(1000, 1030))], ids=str)
def test_solve_with_placement_agrees_with_brute_force(seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        graph, budget = random_placement(seed, 3)
        try:
            expected = optimum(graph, budget)
        except TimeoutError:
            continue
        result = solve(Request(graph, budget, Tolerance.of(CLOSE), WorkClock(0.5)))
        assert result.status is not Status.ERROR and not (result.message and result.schedule), seed
        if expected is None:
            assert result.schedule is None, seed
            seen[str(result.status)] += 1
            continue
        assert result.status is not Status.INFEASIBLE, seed
        assert result.bound_s is not None and result.bound_s <= expected + CLOSE, seed
        if result.schedule is None or result.time_s is None:
            continue
        check_by_both_judges(graph, result)
        assert result.time_s >= expected - CLOSE, seed
        if result.status is Status.OPTIMAL:
            assert result.time_s <= expected + 2 * CLOSE, seed
            seen["optimal"] += 1
        seen["placed"] += any(graph.ops[op].replaces for op in result.schedule.computed)
    assert seen["infeasible"] >= 1 and min(seen["optimal"], seen["placed"]) >= 0.4 * len(seeds), seen


@pytest.mark.slow
def test_results_of_the_forward_pass_come_before_the_backward_pass() -> None:
    """The judge lets the main device wait for them, as the program does: proved bounds are no higher than its times."""
    seen: Counter[str] = Counter()
    for seed in range(2000, 2040):
        graph, budget = random_placement(seed, 3)
        graph = in_two_passes(graph)
        early, _ = find_results_elsewhere(graph)
        if not early:
            continue
        try:
            expected = optimum(add_pass_ends(graph).graph, budget)
        except TimeoutError:
            continue
        result = solve(Request(graph, budget, Tolerance.of(CLOSE), WorkClock(0.5)))
        if result.time_s is None or expected is None:
            assert result.schedule is None and (expected is None or result.status is Status.LIMIT), seed
            continue
        assert result.bound_s is not None and result.bound_s <= expected + CLOSE, seed
        check_by_both_judges(graph, result)
        assert result.time_s >= expected - CLOSE, seed
        if result.status is Status.OPTIMAL:
            assert result.time_s <= expected + 2 * CLOSE, seed
            seen["optimal"] += 1
        seen["elsewhere"] += any(graph.ops[op].replaces for op in result.schedule.computed)
    assert seen["optimal"] >= 8 and seen["elsewhere"] >= 5, seen


def test_schedules_with_all_choices_at_once_are_none_that_a_bound_excludes() -> None:
    compared = 0
    for seed in range(6):
        step = found_in_a_step(seed, 3 + seed % 4)
        graph = apply_options(step, BESIDE, around(step, *(("second", "third") if seed % 3 == 0 else ("second",))))
        schedule = any_schedule(graph, seed)
        # Where several ops are stood for, it is in the place of the last that solvers have the op that does so.
        if any(len(graph.ops[op].replaces) > 1 for op in schedule.computed):
            continue
        judged = simulate(graph, schedule)
        problem = build_problem(add_pass_ends(graph).graph, judged.peak_bytes)
        last = problem.places.last
        for ends in ((problem.ops - 1,), tuple(sorted(set(last)))):
            program = build_relaxation(problem, Discretization(ends, places=last)).program
            answer = solve_program(program, clock=WallClock(30.0))
            assert answer.outcome is not Outcome.INFEASIBLE, (seed, ends)
            assert answer.bound <= problem.convert_to_units(judged.time_s - problem.base_s) * (1 + 1e-5) + 1e-3, (seed, ends)
            compared += 1
    assert compared >= 8
