"""Schedules solve the programs as docs/formulation.md says, which names every family of rows; splitting weakens none."""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from graphs.ir import Graph
from graphs.synthetic.random_graphs import draw_graph, draw_training_step
from graphs.synthetic.small import make_training_chain
from solvers.clock import WallClock
from solvers.highs import solve_program
from solvers.highs.program import Outcome
from solvers.problem import Problem, build_problem
from solvers.windows import relaxation, solve
from solvers.windows.decoding.decode import order_of, try_out
from solvers.windows.decoding.encode import encode_order
from solvers.windows.decoding.expand import expand
from solvers.windows.relaxation.discretization import Discretization, list_halves
from solvers.windows.relaxation.models import build_relaxation
from tests.support.budgets import peak_bytes
from tests.support.graphs.small_graphs import random_overwriting
from tests.support.marks import slow
from tests.support.solvers.answers import ask
from tests.support.solvers.random_orders import everything, random_order, short_form, solve_with_choices

ROOT = Path(__file__).parents[3]


# In the last an op is executed twice in a window, before and after another: row 9 without D refutes it.
@pytest.mark.parametrize(
    ("make", "seed"),
    [
        *((draw_graph, seed) for seed in (*range(30), 1448)),
        *((random_overwriting, seed) for seed in range(15)),
        *slow(*((draw_graph, seed) for seed in range(30, 100))),
        *slow(*((random_overwriting, seed) for seed in range(15, 40))),
    ],
)
def test_every_schedule_in_short_form_solves_the_relaxation_at_its_budget(make: Callable[[int, int], Graph], seed: int) -> None:
    draw = random.Random(seed)
    graph = make(seed, draw.randint(3, 9))
    n = len(graph.ops)
    roomy = build_problem(graph, 10**9)
    computed = short_form(graph, random_order(draw, roomy))
    trial = try_out(roomy, order_of(roomy, computed))
    problem = build_problem(graph, trial.peak_bytes)
    some = tuple(sorted({*draw.sample(range(n), n // 2), n - 1}))
    for discretization in (everything((n - 1,)), everything(some), everything(some).split(range(n))):
        model = build_relaxation(problem, discretization)
        solution = encode_order(problem, discretization, computed)
        # What the schedule does has a variable, and there are H, U, P and G that fit.
        assert {(k, i) for k, ops in enumerate(solution.recomputed) for i in ops} <= model.recomputed.keys()
        assert {(k, t) for k, handed in enumerate(solution.handed) for t in handed} <= model.handed.keys()
        answer = solve_with_choices(model, solution)
        assert answer.outcome is Outcome.OPTIMAL
        assert answer.objective <= problem.convert_to_units(trial.time_s - problem.base_s) + 1e-6


def test_families_of_rows_are_on_the_page() -> None:
    page = (ROOT / "docs" / "formulation.md").read_text()
    named = set(re.findall(r"`(add_\w+)`", page))
    folder = Path(relaxation.__path__[0])
    written = {name for path in folder.glob("*.py") for name in re.findall(r"^def (add_\w+)", path.read_text(), re.MULTILINE)}
    assert named == written


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
