"""Schedules as solutions of the programs, and relaxations that splitting never weakens."""

from dataclasses import replace
from itertools import pairwise

import numpy as np

from graphs.synthetic.random_graphs import draw_training_step
from graphs.synthetic.small import make_training_chain
from solvers.clock import WallClock
from solvers.highs import solve_program
from solvers.highs.program import Outcome
from solvers.problem import Problem, build_problem
from solvers.windows import solve
from solvers.windows.decoding.decode import order_of, try_out
from solvers.windows.decoding.encode import encode_order
from solvers.windows.decoding.expand import expand
from solvers.windows.relaxation.discretization import Discretization, list_halves
from solvers.windows.relaxation.models import build_relaxation
from tests.support.budgets import peak_bytes
from tests.support.solvers.answers import ask


def test_order_and_choice_are_inverse() -> None:
    graph = make_training_chain(6)
    problem = build_problem(graph, 4)
    result = solve(ask(graph, 4))
    # An op per window, and further executions in program order: nothing is left open.
    discretization = Discretization(tuple(range(len(graph.ops))))
    solution = encode_order(problem, discretization, result.schedule.computed)
    order = order_of(problem, expand(problem, discretization, solution), discretization=discretization)
    assert try_out(problem, order).time_s == result.time_s
    assert encode_order(problem, discretization, order.computed) == solution


def test_a_schedule_that_fits_solves_every_relaxation() -> None:
    graph = draw_training_step(2, 15)
    budget = peak_bytes(graph) * 6 // 10
    result = solve(ask(graph, budget))
    assert result.schedule is not None
    problem = build_problem(graph, budget)
    n = len(graph.ops)
    for ends in ((n - 1,), (n // 2, n - 1), tuple(range(n))):
        discretization = Discretization(ends, frozenset(range(n)))
        model = build_relaxation(problem, discretization)
        solution = encode_order(problem, discretization, result.schedule.computed)
        # Its R, Q and S are fixed; what is left are the H and U, for which there must be values.
        program = model.program
        for (k, i), column in model.recomputed.items():
            program.lower[column] = program.upper[column] = i in solution.recomputed[k]
        for (k, t), column in model.handed.items():
            program.lower[column] = program.upper[column] = t in solution.handed[k]
        assert solve_program(program, clock=WallClock(60)).outcome is Outcome.OPTIMAL


def test_spans_are_halved_down_to_two_windows() -> None:
    assert list_halves(1, 1) == []
    assert list_halves(1, 2) == [(1, 2)]
    assert list_halves(1, 4) == [(1, 4), (1, 2), (3, 4)]


def test_splitting_windows_never_weakens_the_linear_relaxation() -> None:
    """Windows that are split stay as merged ones; without them one of these bounds falls."""

    def linear_bound(problem: Problem, discretization: Discretization) -> float:
        program = build_relaxation(problem, discretization).program
        answer = solve_program(replace(program, integer=np.zeros(len(program.cost), dtype=bool)), clock=WallClock(60))
        return answer.bound

    graph = draw_training_step(3, 40)
    problem = build_problem(graph, peak_bytes(graph) * 4 // 10)
    n = len(graph.ops)
    splits = [Discretization((n // 2, n - 1))]
    for ends in (range(0, n, 9), range(0, n, 4), range(n)):
        splits.append(splits[-1].split(ends))
    for keep in (True, False):
        bounds = [linear_bound(problem, one if keep else replace(one, merged=frozenset())) for one in splits]
        assert all(finer >= coarse - 1e-6 for coarse, finer in pairwise(bounds)) is keep


def test_split_windows_remember_their_spans() -> None:
    discretization = Discretization((1, 5, 9)).split([3]).split([7])
    assert discretization.ends == (1, 3, 5, 7, 9)
    assert discretization.merged == {(2, 5), (6, 9), (2, 9)}
