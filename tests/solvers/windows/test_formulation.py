"""Schedules solve the programs of docs/formulation.md, which names every family of rows; the relaxation split by branches."""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from planner.graphs.ir import Graph
from planner.graphs.options import remove_options
from planner.graphs.schedule import keep_everything
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.random_graphs import draw_graph, draw_options, draw_training_step
from planner.graphs.synthetic.small import make_training_chain
from planner.solvers.clock import WallClock
from planner.solvers.highs import solve_program
from planner.solvers.highs.program import Outcome
from planner.solvers.problem import OBJECTIVE_SCALE, Problem, build_problem
from planner.solvers.request import Request
from planner.solvers.tolerance import Tolerance
from planner.solvers.windows import relaxation, solve
from planner.solvers.windows.decoding.decode import order_of, try_out
from planner.solvers.windows.decoding.encode import encode_order
from planner.solvers.windows.decoding.expand import expand
from planner.solvers.windows.relaxation.discretization import Discretization, list_halves
from planner.solvers.windows.relaxation.models import build_relaxation
from planner.solvers.windows.search import Search
from planner.solvers.windows.strategies import branches as branching
from planner.solvers.windows.strategies.branches import Branches
from tests.support.budgets import peak_bytes
from tests.support.graphs.small_graphs import random_overwriting
from tests.support.marks import slow
from tests.support.solvers.answers import ask
from tests.support.solvers.brute_force import fastest_with_options
from tests.support.solvers.random_orders import everything, random_order, short_form, solve_with_choices

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("make", "seed"),
    [
        *((draw_graph, seed) for seed in range(30)),
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
        # What the schedule does has a variable, and there are H and U that fit.
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


def branches_of(seed: int) -> tuple[Search, Branches]:
    """Of a small graph with options, at a budget below its peak."""
    draw = random.Random(seed)
    graph = draw_options(seed, draw.randint(3, 6))
    program = remove_options(graph)
    peak = simulate(program, keep_everything(program)).peak_bytes
    budget = max(1, round(peak * draw.uniform(0.6, 1.0)))
    search = Search.of(Request(graph, budget, Tolerance.of(1e-6), WallClock(60)))
    return search, Branches(search)


def all_of_them(branches: Branches) -> None:
    """Look at each branch until nothing is left, without schedules that would end that."""
    branches.search.stopping.is_solved = lambda: False
    for _ in range(25):
        if branches.closed:
            break
        branches._look(branches._choose_next())


@pytest.mark.parametrize("seeds", [range(30), *slow(range(1000, 1250), range(1250, 1500))])
def test_the_least_bound_of_the_branches_is_below_the_best_of_all_schedules(seeds: range) -> None:
    split = tight = feasible = 0
    for seed in seeds:
        search, branches = branches_of(seed)
        optimum = fastest_with_options(search.problem.whole, search.budget_bytes)
        all_of_them(branches)
        bounds = [branch.bound for branch in branches.all]
        assert not search.incumbent.failure, (seed, search.incumbent.failure)
        if optimum is None:
            continue
        feasible += 1
        assert min(bounds) < np.inf, seed
        bound_s = search.problem.base_s * (1 + min(bounds) / OBJECTIVE_SCALE)
        assert bound_s <= optimum[0] * (1 + 1e-6), seed
        assert search.incumbent.bound_s <= optimum[0] * (1 + 1e-6), seed
        split += len(branches.all) > 1
        tight += len(branches.all) > 1 and bound_s >= optimum[0] * (1 - 1e-3)
    assert feasible > 10
    assert split > 2
    assert tight >= 0.75 * split


@pytest.mark.slow
def test_each_choice_of_stand_ins_is_in_one_branch() -> None:
    checked = 0
    for seed in range(30):
        search, branches = branches_of(seed)
        all_of_them(branches)
        groups = search.problem.places.replaces
        stand_ins = [b for b, group in enumerate(groups) if group]
        if len(branches.all) < 2 or len(stand_ins) > 8:
            continue
        for bits in range(2 ** len(stand_ins)):
            chosen = {b for n, b in enumerate(stand_ins) if bits >> n & 1}
            stood_for = [i for b in chosen for i in groups[b]]
            if len(stood_for) > len(set(stood_for)):
                continue  # one op has one stand-in
            inside = [
                branch
                for branch in branches.all
                if all(
                    is_executed == bool(chosen.intersection(alternatives))
                    for alternatives, is_executed in branch.discretization.decided
                )
            ]
            assert len(inside) == 1, (seed, chosen)
            checked += 1
    assert checked > 20


def test_split_branches_decide_execution_in_their_programs() -> None:
    for seed in range(80):
        search, branches = branches_of(seed)
        if not (alternatives := next(iter(branches.alternatives.values()), ())):
            continue
        branch = branches.all[0]
        branch.undecided = alternatives
        branches._look(branch)
        assert len(branches.all) == len(alternatives) + 1
        decisions = [part.discretization.decided for part in branches.all]
        assert all(any(not is_executed for _, is_executed in decided) or len(alternatives) == 1 for decided in decisions)
        bound = min(part.bound for part in branches.all)
        assert search.incumbent.failure == ""
        assert bound >= branch.bound - 1e-6
        return
    pytest.fail("no graph has a heavy place")


def test_ways_of_about_the_same_time_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = 0
    for seed in range(80):
        search, branches = branches_of(seed)
        with monkeypatch.context() as patched:
            patched.setattr(branching, "_ALIKE", 1e6)
            merged = Branches(search)
        replaces, inputs = search.problem.places.replaces, search.problem.inputs
        for alternatives in merged.alternatives.values():
            of_way = [{(replaces[b], inputs[b]) for b in alternative} for alternative in alternatives]
            assert all(len(what) == 1 for what in of_way)
            assert len(set.union(*of_way)) == len(alternatives)
        assert merged.alternatives.keys() == branches.alternatives.keys()
        fewer += any(len(merged.alternatives[op]) < len(alternatives) for op, alternatives in branches.alternatives.items())
    assert fewer > 0
