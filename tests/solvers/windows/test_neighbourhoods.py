"""Restricted models: what they allow, what fits, whose turn it is, and which graphs that solutions commit to come next."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from planner.graphs.ir import Graph
from planner.graphs.options import remove_options
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.draft import Draft
from planner.graphs.synthetic.random_graphs import draw_options, draw_training_step
from planner.graphs.synthetic.small import make_training_chain
from planner.graphs.synthetic.transformer import TransformerSize, transformer
from planner.solvers.clock import WallClock, WorkClock
from planner.solvers.highs import solve_program
from planner.solvers.highs.program import Outcome
from planner.solvers.least import bracket_least_budget
from planner.solvers.problem import Problem, build_problem
from planner.solvers.request import Request
from planner.solvers.windows.decoding.decode import Trial, order_of, try_out
from planner.solvers.windows.decoding.plain_graph import build_plain_graph
from planner.solvers.windows.decoding.refinement import refine_windows
from planner.solvers.windows.driver import run_plain
from planner.solvers.windows.part_process import Inbox
from planner.solvers.windows.relaxation.discretization import Discretization
from planner.solvers.windows.relaxation.draft import ModelDraft
from planner.solvers.windows.relaxation.models import compose
from planner.solvers.windows.search import Search
from planner.solvers.windows.strategies.commitments import Commitment, Commitments
from planner.solvers.windows.strategies.neighbourhoods import FixAndOptimizeOps, FixAndOptimizeWindows, Restarts, RestrictedModel
from planner.solvers.windows.strategies.restricted_model import (
    CandidateSet,
    build_restricted,
    find_tight_windows,
    list_restricted_families,
)
from planner.solvers.windows.strategies.strategy import SteppedStrategy, share_evenly, share_time
from planner.solvers.windows.strategies.substitution import list_simple_substitutions, substitute
from tests.support.budgets import budget_at, peak_bytes
from tests.support.solvers.answers import ask


def knows_all(problem: Problem) -> CandidateSet:
    known = CandidateSet()
    known.ops.update(range(problem.ops))
    return known


def whole_trial(problem: Problem) -> Trial:
    return try_out(problem, order_of(problem, range(problem.ops)))


def test_refinement_ahead_adds_windows_of_earlier_ops() -> None:
    problem = build_problem(make_training_chain(6), 100)
    v, x = 9, 2
    ops = list(range(problem.ops))
    discretization = Discretization((3, problem.ops - 1))
    order = order_of(problem, [*ops[:v], x, *ops[v:]], discretization=discretization)
    trial = replace(try_out(problem, order), memory_bytes=tuple(5 + (step == v) for step in range(problem.ops + 1)))
    budget_bytes = 5

    near = refine_windows(discretization, trial, budget_bytes)
    assert near.ends == (3, 8, 9, problem.ops - 1)
    assert not near.recomputations
    ahead = refine_windows(discretization, trial, budget_bytes, ahead=3)
    assert ahead.ends == (3, 6, 7, 8, 9, problem.ops - 1)
    assert ahead.recomputations == {(7, x), (8, x), (9, x)}
    assert refine_windows(discretization, trial, budget_bytes, ahead=100).ends[:9] == tuple(range(9))


@pytest.mark.parametrize("seed", range(12))
def test_running_totals_say_the_same_as_dense_rows(seed: int) -> None:
    graph = draw_training_step(seed, 8)
    problem = build_problem(graph, int(0.8 * peak_bytes(graph)))
    discretization = Discretization(tuple(range(problem.ops)))
    known = knows_all(problem)

    families = list_restricted_families(known)
    models = (
        build_restricted(problem, discretization, known),
        compose(ModelDraft(problem, discretization), *families),
    )
    told, dense = (solve_program(model.program, clock=WallClock(60)) for model in models)
    assert told.outcome is dense.outcome
    assert told.outcome is Outcome.INFEASIBLE or told.objective == pytest.approx(dense.objective, abs=1e-3)


def test_restricted_model_recomputes_candidate_ops_only() -> None:
    graph = make_training_chain(6)
    problem = build_problem(graph, 7)
    discretization = Discretization(tuple(range(problem.ops)))
    known = CandidateSet()
    known.ops.update((1, 2))
    model = build_restricted(problem, discretization, known)
    assert {i for _, i in model.recomputed} == {1, 2}


def test_the_best_schedule_is_a_solution_of_the_narrow_model() -> None:
    graph = make_training_chain(8)
    problem = build_problem(graph, 5)
    found = bracket_least_budget(graph).schedule
    computed = [step.op for step in found.steps if hasattr(step, "op")]
    discretization = Discretization(tuple(range(problem.ops)))
    known = CandidateSet()
    order = order_of(problem, computed, discretization=discretization)
    known.learn_order(order)
    answer = solve_program(build_restricted(problem, discretization, known).program, clock=WallClock(60))
    assert answer.outcome is Outcome.OPTIMAL
    assert answer.objective <= problem.convert_to_units(try_out(problem, order).time_s - problem.base_s) + 1e-3


def test_more_candidates_until_all_are_there() -> None:
    known = CandidateSet()
    assert known.allow_more_candidates(30)
    assert known.factor == 2
    for _ in range(10):
        last = known.allow_more_candidates(30)
    assert not last


def test_tight_windows_cover_all_tight_ops() -> None:
    problem = build_problem(make_training_chain(50), 10)
    trial = whole_trial(problem)
    tight = [op for op, taken in enumerate(trial.memory_bytes) if taken > 0.85 * 10]
    for limit in (4, 10, 30):
        discretization = find_tight_windows(problem, [trial], 0.85 * 10, limit)
        assert len(discretization.ends) <= limit + 3
        # No stretch of tight ops is much longer than another without a window.
        ends = [tight[0], *(e for e in discretization.ends if tight[0] <= e <= tight[-1]), tight[-1]]
        assert max(np.diff(ends)) <= 3 * len(tight) / (limit / 2)
    assert discretization.ends[-1] == problem.ops - 1


@pytest.mark.parametrize("share", [0.8, 0.65, 0.5])
def test_fix_and_optimize_schedules_fit_and_never_get_slower(share: float) -> None:
    graph = transformer(TransformerSize(layers=4))
    budget = int(share * peak_bytes(graph))
    search = Search.of(ask(graph, budget, tolerance=1e-3, time_limit_s=60.0))
    trial = whole_trial(search.problem)
    peak = int(np.argmax(trial.memory_bytes))
    neighbourhoods = RestrictedModel(search, Discretization((peak, search.problem.ops - 1)))
    neighbourhoods.begin()
    assert search.incumbent.best.peak_bytes <= budget
    before = search.incumbent.best.time_s
    strategies = FixAndOptimizeWindows(search, neighbourhoods), FixAndOptimizeOps(search, neighbourhoods)
    for strategy in strategies * 5:
        strategy.step()
    assert search.incumbent.best.time_s <= before
    assert simulate(graph, search.incumbent.best.schedule).time_s == pytest.approx(search.incumbent.best.time_s)


def test_reopening_ends_where_nothing_is_gained() -> None:
    graph = make_training_chain(10)
    search = Search.of(ask(graph, 6, tolerance=1e-3, time_limit_s=60.0))
    trial = whole_trial(search.problem)
    neighbourhoods = RestrictedModel(search, Discretization((int(np.argmax(trial.memory_bytes)), search.problem.ops - 1)))
    neighbourhoods.begin()
    search = neighbourhoods.search
    # The bound is that of nothing executed again, so that the search is never satisfied.
    for strategy in (FixAndOptimizeWindows(search, neighbourhoods), FixAndOptimizeOps(search, neighbourhoods)):
        assert sum(1 for _ in strategy.take_steps()) < 1000
    assert search.incumbent.best is not None


def test_an_exchange_keeps_one_tensor_instead_of_another() -> None:
    """There is room for one of two tensors of the same size; the schedule to begin with keeps the wrong one."""
    draft = Draft()
    (dear,) = draft.add_op("dear", [], [4], time_s=3.0)
    (cheap,) = draft.add_op("cheap", [], [4], time_s=1.0)
    (joined,) = draft.add_op("join", [dear, cheap], [1])
    (large,) = draft.add_op("large", [joined], [4])
    (small,) = draft.add_op("small", [large], [1])
    kept = draft.add_op("last", [dear, cheap, small], [1])
    search = Search.of(ask(draft.build_graph(kept), 10, tolerance=0.0, time_limit_s=60.0))
    neighbourhoods = RestrictedModel(search, Discretization((3, 5)))
    neighbourhoods.discretization = Discretization(tuple(range(6)))
    neighbourhoods.known.ops = {0, 1}
    search.offer(
        order_of(search.problem, (0, 1, 2, 3, 4, 0, 5), discretization=neighbourhoods.discretization),
        neighbourhoods.discretization,
    )
    assert search.incumbent.best_trial.time_s == 11.0
    FixAndOptimizeOps(search, neighbourhoods).step()
    assert search.incumbent.best_trial.time_s == 9.0


class Gaining(SteppedStrategy):
    """Makes the best schedule faster by `gain` in each of so many steps, which are counted."""

    def __init__(self, search: Any, gain: float, count: int) -> None:
        super().__init__(search)
        self.gain, self.count, self.taken = gain, count, 0

    def take_steps(self) -> Iterator[None]:
        for _ in range(self.count):
            self.search.clock.spend(1e-3)
            self.taken += 1
            self.search.incumbent.best_s -= self.gain
            yield


def search_for_faster() -> Any:
    return SimpleNamespace(incumbent=SimpleNamespace(best_s=1000.0), clock=WorkClock())


def test_strategies_that_improve_get_more_time() -> None:
    search = search_for_faster()
    good, idle = Gaining(search, 1.0, 200), Gaining(search, 0.0, 200)
    share_time(search, share_evenly([good, idle]), should_stop=lambda: good.taken + idle.taken >= 120)
    assert good.taken > idle.taken > 0


def test_sharing_time_ends_when_all_strategies_have() -> None:
    search = search_for_faster()
    strategies = [Gaining(search, 0.0, count) for count in (1, 3, 0)]
    share_time(search, share_evenly(strategies), should_stop=lambda: False)
    assert [strategy.taken for strategy in strategies] == [1, 3, 0]


def test_a_problem_without_room_ends() -> None:
    search = Search.of(ask(make_training_chain(8), 3, tolerance=1e-3, time_limit_s=60.0))
    trial = whole_trial(search.problem)
    neighbourhoods = RestrictedModel(search, Discretization((int(np.argmax(trial.memory_bytes)), search.problem.ops - 1)))
    neighbourhoods.small = replace(neighbourhoods.small, capacity_bytes=2)
    neighbourhoods.begin()
    assert sum(1 for _ in Restarts(search, neighbourhoods).take_steps()) < 100
    assert search.incumbent.best is None


def commitments(graph: Graph) -> tuple[Commitments, list[Commitment]]:
    """Those of doing what the graph's simple choices are, each known of as what a relaxation does."""
    search = Search.of(Request(graph, budget_at(remove_options(graph), 0.6), clock=WorkClock(5.0)))
    found, own = Commitments(search), []
    for instead in [frozenset[int](), *list_simple_substitutions(search.problem)]:
        order = substitute(search.problem, instead)
        own.append(Commitment(build_plain_graph(search.problem, order.computed), instead, frozenset()))
    found.all = dict(enumerate(own))
    return found, own


def test_the_best_is_solved_for_as_long_as_all_others_that_come_in() -> None:
    found, (first, *_) = commitments(draw_options(7, 50))
    first.promise_s = 1.0
    turns = []
    for _ in range(9):
        new = Commitment(first.plain, first.instead, frozenset())  # one more each time, never solved
        found.all[len(found.all)] = new
        commitment = found.choose_next()
        assert commitment is not None
        turns.append(commitment is first)
        commitment.runs += 1
        commitment.spent += 3.0 if commitment is first else 1.0
        assert first.spent <= sum(c.spent for c in found.all.values() if c is not first) + 3.0
    assert turns == [True, False, False, False] * 2 + [True]


def test_commitments_alternate_and_closed_ones_are_skipped() -> None:
    found, (first, second, third, *rest) = commitments(draw_options(7, 50))
    for commitment in rest:
        commitment.closed = True
    first.runs, second.runs, third.runs = 2, 1, 1
    third.promise_s = 2.0
    third.spent = 1.0
    assert found.choose_next() is second  # the third is the best, and has had more than the others
    second.closed = True
    assert found.choose_next() is first
    first.closed = True
    assert found.choose_next() is third
    third.closed = True
    assert found.choose_next() is None


def test_a_solve_is_counted_by_the_clock() -> None:
    found, (first, *_) = commitments(draw_options(7, 50))
    first.promise_s = 1.0
    now = found.search.clock.now
    searches = found.generate_searches(Inbox())
    run_plain(next(searches))
    spent = found.search.clock.now - now
    next(searches)
    assert first.runs == 1
    assert first.spent == spent > 0
