"""What HiGHS is asked and how its answers are read."""

import gc
import math
import time

import highspy
import numpy as np
import pytest

from planner.solvers.clock import WallClock
from planner.solvers.highs import OUTCOMES, solve_program
from planner.solvers.highs.program import HighsError, Matrix, Milp, Outcome, SolveCallbacks


def program(
    cost: list[float],
    rows: list[list[float]],
    lower: list[float],
    upper: list[float],
    *,
    integer: bool = True,
) -> Milp:
    """Variables from 0 to 1."""
    n, places = len(cost), range(len(cost) * len(lower))
    return Milp(
        cost=np.array(cost, dtype=float),
        lower=np.zeros(n),
        upper=np.ones(n),
        integer=np.full(n, integer),
        matrix=Matrix.of((len(lower), n), [p // n for p in places], [p % n for p in places], [v for row in rows for v in row]),
        row_lower=np.array(lower, dtype=float),
        row_upper=np.array(upper, dtype=float),
    )


def knapsack(seed: int = 0, variables: int = 200, rows: int = 20) -> Milp:
    """A program that HiGHS finds solutions of at once and does not solve in minutes."""
    draw = np.random.default_rng(seed)
    weights = draw.integers(0, 40, (rows, variables)).astype(float)
    return program(
        list(-draw.integers(10, 30, variables) - weights.mean(axis=0)),
        weights.tolist(),
        [-math.inf] * rows,
        list(weights.sum(axis=1) / 3),
    )


def test_every_status_of_highs_is_mapped() -> None:
    assert set(OUTCOMES) == set(highspy.HighsModelStatus.__members__.values())
    status = highspy.HighsModelStatus
    assert OUTCOMES[status.kOptimal] is Outcome.OPTIMAL
    assert OUTCOMES[status.kInfeasible] is Outcome.INFEASIBLE
    assert OUTCOMES[status.kTimeLimit] is OUTCOMES[status.kInterrupt] is Outcome.STOPPED
    # A failure is never taken for a proof.
    assert {OUTCOMES[s] for s in (status.kUnknown, status.kSolveError, status.kNotset)} == {Outcome.FAILED}


@pytest.mark.parametrize("seconds", [60.0, 0.5])
def test_nothing_of_a_solve_stays_in_memory(seconds: float) -> None:
    def solvers_alive() -> int:
        gc.collect()
        return sum(issubclass(type(alive), highspy.Highs) for alive in gc.get_objects())

    before = solvers_alive()
    told: list[float] = []
    callbacks = SolveCallbacks(on_incumbent=lambda values, objective: told.append(objective) or False)
    asked = knapsack() if seconds < 1 else knapsack(variables=20)
    solve_program(asked, clock=WallClock(seconds), start=np.zeros(len(asked.cost)), callbacks=callbacks)
    assert told
    assert solvers_alive() <= before


def test_optimum_of_a_0_1_program() -> None:
    answer = solve_program(program([-5, -4, -3], [[2, 3, 1]], [-math.inf], [4]), clock=WallClock(10))
    assert answer.outcome is Outcome.OPTIMAL
    assert answer.values is not None
    assert list(np.round(answer.values)) == [1, 0, 1]
    assert answer.objective == pytest.approx(-8)
    assert answer.bound == pytest.approx(-8)


def test_linear_relaxation_is_a_bound() -> None:
    answer = solve_program(program([-5, -4, -3], [[2, 3, 1]], [-math.inf], [4], integer=False), clock=WallClock(10))
    assert answer.outcome is Outcome.OPTIMAL
    assert answer.bound == pytest.approx(-8 - 4 / 3)


@pytest.mark.parametrize("integer", [True, False])
def test_infeasible_program_has_outcome_infeasible(integer: bool) -> None:
    answer = solve_program(program([1, 1], [[1, 1]], [3], [math.inf], integer=integer), clock=WallClock(10))
    assert answer.outcome is Outcome.INFEASIBLE
    assert answer.values is None
    assert answer.bound == math.inf


@pytest.mark.parametrize(("lower", "outcome"), [(0.0, Outcome.OPTIMAL), (1.0, Outcome.INFEASIBLE)])
def test_program_without_variables_is_decided_by_its_rows(lower: float, outcome: Outcome) -> None:
    assert solve_program(program([], [], [lower], [math.inf]), clock=WallClock(10)).outcome is outcome


def test_a_column_twice_in_a_row_is_added_up() -> None:
    matrix = Matrix.of((2, 3), [1, 0, 1, 1], [2, 1, 0, 2], [0.5, 4.0, 3.0, 0.25])
    assert (matrix.starts.tolist(), matrix.columns.tolist(), matrix.values.tolist()) == ([0, 1, 3], [1, 0, 2], [4.0, 3.0, 0.75])


def test_unbounded_variables_are_refused() -> None:
    good = program([1], [[1]], [0], [1])
    with pytest.raises(HighsError, match="finite bounds"):
        Milp(good.cost, good.lower, np.array([math.inf]), good.integer, good.matrix, good.row_lower, good.row_upper)


def test_a_matrix_of_another_shape_is_refused() -> None:
    good = program([1], [[1]], [0], [1])
    with pytest.raises(HighsError, match=r"\(1, 1\) for 2 rows and 1 variables"):
        Milp(good.cost, good.lower, good.upper, good.integer, good.matrix, np.zeros(2), np.ones(2))


def test_an_option_that_does_not_exist() -> None:
    with pytest.raises(HighsError, match="no_such_option"):
        solve_program(program([1], [[1]], [0], [1]), clock=WallClock(10), options={"no_such_option": 1})


def test_expired_clock_stops_the_solve() -> None:
    answer = solve_program(program([1], [[1]], [0], [1]), clock=WallClock(0))
    assert (answer.outcome, answer.values, answer.bound) == (Outcome.STOPPED, None, -math.inf)


def test_time_that_is_up_while_the_program_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = WallClock(1.0)
    moments = iter((0.5, 1.5))
    monkeypatch.setattr(WallClock, "now", property(lambda _: next(moments, 1.5)))
    answer = solve_program(knapsack(), clock=clock)
    assert answer.outcome is Outcome.STOPPED


def test_time_limit_keeps_the_best_and_the_bound() -> None:
    answer = solve_program(knapsack(), clock=WallClock(1))
    assert answer.outcome is Outcome.STOPPED
    assert answer.bound < answer.objective


def test_a_stop_ends_a_running_solve() -> None:
    asked: list[float] = []
    polled: list[float] = []

    def should_stop() -> bool:
        polled.append(time.monotonic())
        return bool(asked)

    def on_incumbent(values: np.ndarray, objective: float) -> bool:
        asked.append(objective)
        return False

    # Without the stop this takes minutes, and the limit of an hour would end the whole run of tests.
    answer = solve_program(
        knapsack(), clock=WallClock(3600), callbacks=SolveCallbacks(should_stop=should_stop, on_incumbent=on_incumbent)
    )
    assert answer.outcome is Outcome.STOPPED
    assert answer.values is not None
    assert polled


def test_an_incumbent_that_is_good_enough_ends_the_solve() -> None:
    seen: list[float] = []

    def enough(values: np.ndarray, objective: float) -> bool:
        assert -(knapsack().cost @ values) == pytest.approx(-objective)
        seen.append(objective)
        return True

    assert (
        solve_program(knapsack(), clock=WallClock(3600), callbacks=SolveCallbacks(on_incumbent=enough)).outcome is Outcome.STOPPED
    )
    assert seen


def test_bounds_are_reported_and_rise() -> None:
    bounds: list[float] = []
    answer = solve_program(knapsack(), clock=WallClock(2), callbacks=SolveCallbacks(on_bound=bounds.append))
    assert bounds
    assert bounds == sorted(bounds)
    assert bounds[-1] <= answer.bound


def test_a_start_is_taken_up() -> None:
    first = solve_program(knapsack(), clock=WallClock(1))
    assert first.values is not None
    seen: list[float] = []

    def look(values: np.ndarray, objective: float) -> bool:
        seen.append(objective)
        return True

    solve_program(knapsack(), clock=WallClock(60), start=first.values, callbacks=SolveCallbacks(on_incumbent=look))
    assert seen[0] <= first.objective + 1e-6


def test_an_error_in_a_callback_reaches_the_caller() -> None:
    def fail(values: np.ndarray, objective: float) -> bool:
        raise RuntimeError("from the callback")

    with pytest.raises(RuntimeError, match="from the callback"):
        solve_program(knapsack(), clock=WallClock(60), callbacks=SolveCallbacks(on_incumbent=fail))


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    solve_program(knapsack(variables=30, rows=5), clock=WallClock(5))
    assert capfd.readouterr() == ("", "")
