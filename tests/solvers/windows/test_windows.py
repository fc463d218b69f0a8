"""The exact solver: known optima, what it promises, and how it stops."""

import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from graphs.ir import Graph
from graphs.simulate import simulate
from graphs.synthetic import (
    Draft,
    TransformerSize,
    chain,
    diamond,
    kept_output,
    random_training_step,
    skips,
    training_chain,
    transformer,
    two_outputs,
)
from solvers.bounds import least_budget_bound
from solvers.clock import WallClock
from solvers.highs import solve_program
from solvers.highs.program import Outcome
from solvers.memory import give_back, resident_bytes
from solvers.policies.store_all import store_all
from solvers.problem import Problem, problem_of
from solvers.registry import SOLVERS, get_solver
from solvers.result import Progress, Status
from solvers.windows import solve
from solvers.windows.driver import imitate
from solvers.windows.formulation.granularity import Discretization, halves
from solvers.windows.formulation.models import build_relaxation
from solvers.windows.incumbent import Search
from solvers.windows.params import BoundParams, WindowsParams
from solvers.windows.solution.decode import expand, order_of, try_out
from solvers.windows.solution.encode import choice_of
from tests.support.requests import ask


def peak_of(graph: Graph) -> int:
    return simulate(graph, store_all(graph)).peak_bytes


@pytest.mark.parametrize(
    ("graph", "budget", "optimum_s"),
    [
        (chain(1), 1, 1),
        (chain(5), 2, 5),
        (training_chain(3), 4, 6),
        (training_chain(3), 3, 7),
        (training_chain(8), 9, 16),
        (training_chain(8), 8, 17),
        (training_chain(8), 3, 16 + 7 * 6 // 2),
        (training_chain(12), 3, 24 + 11 * 10 // 2),
        (diamond(), 9, 9),
        (diamond(), 8, 10),
        (two_outputs(), 7, 3),
        (kept_output(), 8, 4),
        (kept_output(), 7, 5),
        (kept_output(), 6, 5),
    ],
)
def test_known_optima(graph: Graph, budget: int, optimum_s: float) -> None:
    result = solve(ask(graph, budget, tolerance=1e-6))
    assert result.status is Status.OPTIMAL
    assert result.time_s == pytest.approx(optimum_s)
    assert result.bound_s == pytest.approx(optimum_s)
    assert result.peak_bytes is not None
    assert result.peak_bytes <= budget


@pytest.mark.parametrize(
    ("graph", "budget"), [(chain(5), 1), (training_chain(8), 2), (diamond(), 6), (two_outputs(), 6), (kept_output(), 5)]
)
def test_infeasible_says_why(graph: Graph, budget: int) -> None:
    result = solve(ask(graph, budget))
    assert result.status is Status.INFEASIBLE
    assert result.schedule is None
    assert result.bound_s is None
    assert f"budget {budget} B is below {budget + 1} B" in result.message
    assert "Raise --budget" in result.message


def test_infeasible_though_every_op_fits() -> None:
    # d reads a and c (7 with its output), c cannot be made without b, and b not without a: no op takes more than
    # 7. But a must not run again, and is there beside b and c, 9.
    draft = Draft()
    (a,) = draft.op("a", [], [3])
    (b,) = draft.op("b", [a], [3])
    (c,) = draft.op("c", [b], [3])
    draft.op("d", [a, c], [1])
    graph = draft.graph()
    assert solve(ask(graph, 7)).time_s == 5
    draft = Draft()
    (seed,) = draft.op("seed", [], [3])
    (a,) = draft.op("a", [seed], [3])
    (b,) = draft.op("b", [a], [3])
    (c,) = draft.op("c", [b], [3])
    draft.op("d", [a, c], [1])
    # a is made again from seed, which is made again too: c, seed and a are there at once.
    graph = draft.graph()
    assert least_budget_bound(graph).budget_bytes == 7
    result = solve(ask(graph, 8))
    assert result.status is Status.INFEASIBLE
    assert "is proved too small, though every op by itself fits within 7 B" in result.message
    assert solve(ask(graph, 9)).time_s == 5


def test_everything_fits() -> None:
    graph = skips(4)
    result = solve(ask(graph, peak_of(graph)))
    assert result.status is Status.OPTIMAL
    assert result.time_s == result.bound_s == graph.time_s
    assert result.gap == 0


@pytest.mark.parametrize("seed", range(6))
def test_lower_budgets_take_no_less_time(seed: int) -> None:
    graph = random_training_step(seed, 8)
    peak = peak_of(graph)
    times: list[float] = []
    for percent in (100, 90, 80, 70, 60, 50):
        result = solve(ask(graph, peak * percent // 100, tolerance=1e-6, time_limit_s=120))
        if result.status is Status.INFEASIBLE:
            break
        assert result.status is Status.OPTIMAL
        assert result.time_s is not None
        times.append(result.time_s)
    assert len(times) > 2
    assert all(later >= earlier * (1 - 1e-5) for earlier, later in pairwise(times))


@pytest.mark.parametrize("percent", [80, 60, 45])
def test_a_transformer(percent: int) -> None:
    graph = transformer(TransformerSize(layers=4))
    result = solve(ask(graph, peak_of(graph) * percent // 100, time_limit_s=300))
    assert result.status is Status.OPTIMAL
    assert result.gap is not None
    assert result.gap <= 1e-3
    assert result.bound_s is not None
    assert result.bound_s > graph.time_s


def test_ops_that_must_not_run_again_do_not() -> None:
    graph = transformer(TransformerSize(layers=2))
    result = solve(ask(graph, peak_of(graph) * 6 // 10, time_limit_s=300))
    assert result.schedule is not None
    computed = result.schedule.computed
    assert len(computed) > len(graph.ops)
    assert all(computed.count(op.id) == 1 for op in graph.ops if not op.recomputable)


def test_nothing_is_made_again_after_its_source_is_written_over() -> None:
    draft = Draft()
    weight = draft.static("weight", 1)
    (a,) = draft.op("a", [weight], [4])
    (b,) = draft.op("b", [a], [4])
    draft.op("step", [weight, b], [1], mutates=(weight,), recomputable=False)
    draft.op("c", [], [5])
    draft.op("d", [a], [1])
    graph = draft.graph()
    # a is held through c: 1 + 4 + 5. Were it made again after the step, 9 would do (a, b and weight).
    assert solve(ask(graph, 10)).time_s == graph.time_s
    assert solve(ask(graph, 9)).status is Status.INFEASIBLE


def test_zero_times() -> None:
    draft = Draft()
    (a,) = draft.op("a", [], [2], time_s=0.0)
    (b,) = draft.op("b", [a], [2], time_s=0.0)
    (c,) = draft.op("c", [b], [2], time_s=0.0)
    (d,) = draft.op("d", [c], [2], time_s=0.0)
    draft.op("e", [a, d], [1], time_s=0.0)
    result = solve(ask(draft.graph(), 5))
    assert result.status is Status.OPTIMAL
    assert result.time_s == result.bound_s == 0
    assert result.schedule is not None
    assert len(result.schedule.computed) == 6


def test_bytes_matter_in_large_budgets() -> None:
    giga = 10**9
    draft = Draft()
    (a,) = draft.op("a", [], [giga])
    (b,) = draft.op("b", [a], [giga])
    (c,) = draft.op("c", [b], [giga])
    draft.op("d", [a, c], [1])
    graph = draft.graph()
    assert solve(ask(graph, 3 * giga)).time_s == 4
    assert solve(ask(graph, 3 * giga - 1)).time_s == 5


def test_what_the_result_says() -> None:
    result = solve(ask(training_chain(5), 4, tolerance=0.01, time_limit_s=60))
    assert result.solver == "windows"
    assert dict(result.settings) == {"tolerance": 0.01, "time_limit_s": 60, "params": WindowsParams().recorded()}
    assert set(result.versions) == {"highs", "scipy", "numpy"}
    assert result.seconds > 0
    assert get_solver("windows")(ask(training_chain(5), 4)).solver == "windows"


def test_progress_only_gets_better() -> None:
    seen: list[Progress] = []
    graph = random_training_step(3, 30)
    result = solve(ask(graph, peak_of(graph) * 6 // 10, time_limit_s=60, on_progress=seen.append))
    assert seen
    best = [p.best_s for p in seen if p.best_s is not None]
    bounds = [p.bound_s for p in seen if p.bound_s is not None]
    assert best == sorted(best, reverse=True)
    assert bounds == sorted(bounds)
    assert best[-1] == result.time_s
    assert all(p.seconds <= result.seconds for p in seen)
    assert all(p.activity for p in seen)


def test_a_stop_gives_the_best_so_far() -> None:
    graph = random_training_step(5, 60)
    best: list[float] = []

    def note(progress: Progress) -> None:
        if progress.best_s is not None:
            best.append(progress.best_s)

    result = solve(
        ask(graph, peak_of(graph) * 4 // 10, tolerance=0.0, time_limit_s=3600, on_progress=note, should_stop=lambda: bool(best))
    )
    assert result.status is Status.FEASIBLE
    assert result.time_s is not None
    assert result.time_s <= best[0]


def test_a_stop_before_anything_is_found() -> None:
    graph = training_chain(30)
    result = solve(ask(graph, 5, should_stop=lambda: True))
    assert result.status is Status.LIMIT
    assert "Raise --time-limit or --budget" in result.message


def test_a_time_limit_that_has_passed() -> None:
    assert solve(ask(training_chain(30), 5, time_limit_s=1e-9)).status is Status.LIMIT


def test_without_memory_to_grow_there_is_still_a_schedule() -> None:
    params = WindowsParams(bound=BoundParams(most_bytes=-1))
    graph = transformer(TransformerSize(layers=2))
    budget = int(0.7 * peak_of(graph))
    result = solve(ask(graph, budget, time_limit_s=3, params=params))
    assert result.schedule is not None
    assert simulate(graph, result.schedule).peak_bytes <= budget


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not say")
def test_resident_memory_is_known() -> None:
    before = resident_bytes()
    block = np.ones(10_000_000)
    assert 60_000_000 < resident_bytes() - before < 200_000_000
    del block
    give_back()
    assert resident_bytes() - before < 40_000_000


@pytest.mark.parametrize("share", [9, 7, 6])
def test_no_other_method_is_faster_even_where_time_is_short(share: int) -> None:
    graph = transformer(TransformerSize(layers=4))
    budget = peak_of(graph) * share // 10
    search = Search(ask(graph, budget, tolerance=0.0, time_limit_s=60.0))
    imitate(search)
    policies = [name for name, entry in SOLVERS.items() if entry.module.startswith("solvers.policies.")]
    times = [get_solver(name)(ask(graph, budget)).time_s for name in policies]
    assert search.best_trial().peak_bytes <= budget
    assert search.best_trial().time_s <= min(time_s for time_s in times if time_s is not None)


# The parts.


def test_order_and_choice_are_inverse() -> None:
    graph = training_chain(6)
    problem = problem_of(graph, 4)
    result = solve(ask(graph, 4))
    assert result.schedule is not None
    # An op per window, and further executions in program order: nothing is left open.
    detail = Discretization(tuple(range(len(graph.ops))))
    choice = choice_of(problem, detail, result.schedule.computed)
    order = order_of(detail, expand(problem, detail, choice))
    assert try_out(problem, order).time_s == result.time_s
    assert choice_of(problem, detail, order.computed) == choice


def test_a_schedule_that_fits_solves_every_relaxation() -> None:
    graph = random_training_step(2, 15)
    budget = peak_of(graph) * 6 // 10
    result = solve(ask(graph, budget))
    assert result.schedule is not None
    problem = problem_of(graph, budget)
    n = len(graph.ops)
    for ends in ((n - 1,), (n // 2, n - 1), tuple(range(n))):
        detail = Discretization(ends, frozenset(range(n)))
        model = build_relaxation(problem, detail)
        choice = choice_of(problem, detail, result.schedule.computed)
        # Its R, Q and S are fixed; what is left are the H and U, for which there must be values.
        program = model.program
        for (k, i), column in model.again.items():
            program.lower[column] = program.upper[column] = i in choice.again[k]
        for (k, t), column in model.handed.items():
            program.lower[column] = program.upper[column] = t in choice.handed[k]
        assert solve_program(program, clock=WallClock(60)).outcome is Outcome.OPTIMAL


def test_spans_are_halved_down_to_two_windows() -> None:
    assert halves(1, 1) == []
    assert halves(1, 2) == [(1, 2)]
    assert halves(1, 4) == [(1, 4), (1, 2), (3, 4)]


def test_splitting_windows_never_weakens_the_linear_relaxation() -> None:
    """Windows that are split stay as spans; without them some of these bounds fall."""

    def linear_bound(problem: Problem, detail: Discretization) -> float:
        program = build_relaxation(problem, detail).program
        answer = solve_program(replace(program, integer=np.zeros(len(program.cost), dtype=bool)), clock=WallClock(60))
        return answer.bound

    for seed in (3, 5):
        graph = random_training_step(seed, 60)
        problem = problem_of(graph, peak_of(graph) * 4 // 10)
        n = len(graph.ops)
        detail = Discretization((n // 2, n - 1))
        bound = linear_bound(problem, detail)
        for ends in (range(0, n, 9), range(0, n, 4), range(n)):
            detail = detail.split(ends)
            finer = linear_bound(problem, detail)
            assert finer >= bound - 1e-6
            bound = finer


def test_what_is_split_and_what_was_halved_is_remembered() -> None:
    detail = Discretization((1, 5, 9)).split([3]).split([7])
    assert detail.ends == (1, 3, 5, 7, 9)
    assert detail.spans == {(2, 5), (6, 9), (2, 9)}
