"""Requests in a line, small graphs with known optima, and what every answer must hold."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from planner.graphs.ir import Graph
from planner.graphs.options import remove_options
from planner.graphs.schedule import Schedule
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.small import make_chain, make_training_chain
from planner.solvers.clock import WallClock
from planner.solvers.highs import solve_program
from planner.solvers.highs.program import Outcome
from planner.solvers.problem import OBJECTIVE_SCALE, build_problem
from planner.solvers.registry import SOLVERS, Entry
from planner.solvers.request import Request
from planner.solvers.result import Result, SolveProgress, Status
from planner.solvers.tolerance import Tolerance
from planner.solvers.windows import solve
from planner.solvers.windows.relaxation.discretization import Discretization
from planner.solvers.windows.relaxation.models import build_relaxation
from tests.support.graphs.small_graphs import diamond, kept_output, two_outputs
from tests.support.solvers.brute_force import fastest


def ask(
    graph: Graph,
    budget_bytes: int,
    *,
    tolerance: float | Tolerance = 1e-3,
    time_limit_s: float = 3600.0,
    on_progress: Callable[[SolveProgress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    params: object = None,
) -> Request:
    """A request whose clock counts seconds, from now on."""
    return Request(graph, budget_bytes, Tolerance.of(tolerance), WallClock(time_limit_s), on_progress, should_stop, params)


def script_solver(monkeypatch: pytest.MonkeyPatch, name: str, solve: Callable[[Request], Result]) -> None:
    """Let `solve` answer for the solver `name`."""
    monkeypatch.setitem(sys.modules, f"scripted_{name}", SimpleNamespace(solve=solve))
    monkeypatch.setitem(SOLVERS, name, Entry(f"scripted_{name}", "answers as told"))


TOLERANCE = 1e-3
SLACK = 1e-6  # what HiGHS's arithmetic may be off by


def check(graph: Graph, budget_bytes: int, optimum: float | None) -> Result:
    """Everything a result promises, given the optimum."""
    result = solve(ask(graph, budget_bytes, tolerance=TOLERANCE, time_limit_s=60))
    if optimum is None:
        # A graph of this size is always decided.
        assert result.status is Status.INFEASIBLE
        assert result.message
        return result
    assert result.status is Status.OPTIMAL
    assert result.time_s is not None
    assert result.bound_s <= optimum * (1 + SLACK)
    simulation = simulate(graph, result.schedule)
    assert simulation.peak_bytes <= budget_bytes
    assert optimum * (1 - SLACK) <= simulation.time_s <= optimum * (1 + TOLERANCE) + SLACK
    return result


# A graph, a budget in bytes, and the seconds of the fastest schedule within it.
KNOWN_OPTIMA: tuple[tuple[Graph, int, float], ...] = (
    (make_chain(1), 1, 1),
    (make_chain(5), 2, 5),
    (make_training_chain(3), 4, 6),
    (make_training_chain(3), 3, 7),
    (make_training_chain(8), 8, 17),
    (diamond(), 9, 9),
    (diamond(), 8, 10),
    (two_outputs(), 7, 3),
    (kept_output(), 8, 4),
    (kept_output(), 7, 5),
    (kept_output(), 6, 5),
)


@dataclass(frozen=True)
class Case:
    """A small graph with optional ops, with round trips or without, a budget, and the best of all its schedules."""

    seed: int
    graph: Graph
    budget_bytes: int
    optimum: tuple[float, Schedule] | None


def check_optimum(one: Case) -> None:
    """The judge agrees with the brute force, which has rules and clocks of its own."""
    assert one.optimum is not None
    best_s, schedule = one.optimum
    simulation = simulate(one.graph, schedule)
    assert simulation.time_s == pytest.approx(best_s)
    assert simulation.peak_bytes <= one.budget_bytes


def check_answers(found: Sequence[Case]) -> tuple[int, int, int]:
    """Solve all; return how many have a schedule, are solved as fast, and are faster than without optional ops.

    The best of all schedules is one for the judge too, and no slower than the best without optional ops.
    """
    met = gained = 0
    for one in found:
        result = solve(ask(one.graph, one.budget_bytes, tolerance=TOLERANCE, time_limit_s=10))
        met += check_answer(one, result)
        if one.optimum is not None:
            check_optimum(one)
            without = fastest(remove_options(one.graph), one.budget_bytes)
            assert without is None or one.optimum[0] <= without * (1 + SLACK), one.seed
            gained += result.time_s is not None and (without is None or result.time_s < without * (1 - TOLERANCE))
    return sum(one.optimum is not None for one in found), met, gained


def check_answer(one: Case, result: Result) -> bool:
    """What every answer must hold, beside the best of all schedules; whether it is as fast."""
    assert result.status is not Status.ERROR and not (result.message and result.schedule), (one.seed, result.message)
    if one.optimum is None:
        assert result.schedule is None, one.seed
        return False
    best_s, _ = one.optimum
    assert result.status is not Status.INFEASIBLE, one.seed
    assert result.bound_s is None or result.bound_s <= best_s * (1 + SLACK) + SLACK, one.seed
    if result.schedule is None or result.time_s is None:
        return False
    assert simulate(one.graph, result.schedule).peak_bytes <= one.budget_bytes
    assert result.time_s >= best_s * (1 - SLACK), one.seed
    is_as_fast = result.time_s <= best_s * (1 + TOLERANCE) + SLACK
    assert is_as_fast or result.status is not Status.OPTIMAL, one.seed
    return is_as_fast


def check_models(one: Case, *, may_fail: bool = False) -> bool:
    """All rows, in windows of each place, in two, and in one, do not refute what exists.

    Args:
        may_fail: whether HiGHS may end without a solution; its bound must hold then too.

    Returns:
        Whether something does, and with a window for each place the bound is the optimum.
    """
    problem = build_problem(one.graph, one.budget_bytes)
    every = tuple(sorted(set(problem.places.last)))
    exact = False
    for ends in {every, tuple(sorted({every[len(every) // 2], every[-1]})), every[-1:]}:
        pairs = frozenset((end, x) for end in ends for x in range(end))
        merged = frozenset((first, last) for last in ends for first in range(last))
        firsts = frozenset(range(problem.ops))
        discretization = Discretization(ends, firsts, pairs, merged=merged, places=problem.places.last)
        answer = solve_program(build_relaxation(problem, discretization).program, clock=WallClock(60))
        if one.optimum is not None:
            assert answer.outcome is Outcome.OPTIMAL or (may_fail and answer.outcome is Outcome.FAILED), (one.seed, ends)
            bound_s = problem.base_s * (1 + answer.bound / OBJECTIVE_SCALE)
            assert bound_s <= one.optimum[0] * (1 + SLACK) + SLACK, (one.seed, ends)
            exact = exact or (ends == every and bound_s >= one.optimum[0] * (1 - TOLERANCE) - SLACK)
    return exact
