"""The relaxation split by what is executed in heavy places."""

import random

import numpy as np
import pytest

from graphs.options import remove_options
from graphs.schedule import keep_everything
from graphs.simulate import simulate
from graphs.synthetic.random_graphs import draw_options
from solvers.clock import WallClock
from solvers.problem import OBJECTIVE_SCALE
from solvers.request import Request
from solvers.tolerance import Tolerance
from solvers.windows.search import Search
from solvers.windows.strategies import branches as branching
from solvers.windows.strategies.branches import Branches
from tests.support.marks import slow
from tests.support.solvers.brute_force import fastest_with_options


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
