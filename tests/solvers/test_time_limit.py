"""A solve ends when its time is up, however large the graph: what takes long looks at the clock."""

from dataclasses import replace

import pytest

from graphs.ir import Graph
from graphs.synthetic.small import make_training_chain
from solvers.clock import WallClock
from solvers.eviction.least_peak import find_least_evicting_schedule
from solvers.eviction.rules import EvictionRule, EvictionSettings
from solvers.highs.builder import BuildStoppedError
from solvers.problem import Problem, build_problem
from solvers.windows import driver
from solvers.windows.decoding.decode import Order
from solvers.windows.relaxation.discretization import Discretization
from solvers.windows.relaxation.models import build_relaxation
from solvers.windows.search import Search
from solvers.windows.strategies import first_schedules
from solvers.windows.strategies.first_schedules import find_evicted
from solvers.windows.strategies.refinement import Relaxation, refine
from tests.support.solvers.answers import ask


def untimed(layers: int) -> Graph:
    """A chain whose ops take no time: all schedules are optimal, and those of few bytes are long."""
    plain = make_training_chain(layers)
    return Graph(tuple(replace(op, time_s=0.0) for op in plain.ops), plain.tensors, plain.kept)


class Clock:
    """True after it has been asked so often."""

    def __init__(self, asked: int) -> None:
        self.left = asked

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_building_a_large_model_stops_on_request() -> None:
    problem = build_problem(untimed(40), 20)
    discretization = Discretization(tuple(range(problem.ops)))
    whole = build_relaxation(problem, discretization, should_stop=Clock(10**9)).program
    assert whole.matrix.nnz > 20_000
    clock = Clock(3)
    with pytest.raises(BuildStoppedError):
        build_relaxation(problem, discretization, should_stop=clock)
    assert clock.left == -1


def test_a_model_that_was_given_up_ends_the_refinement() -> None:
    search = Search.of(ask(untimed(40), 20, tolerance=1e-3, time_limit_s=3600.0, should_stop=Clock(3)))
    discretization = Discretization(tuple(range(search.problem.ops)))
    assert refine(search, discretization, 3600.0) == (discretization, False)
    assert search.stopping.halted


def test_rules_of_eviction_look_at_the_clock_of_the_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    stops: list[bool] = []

    def order(problem: Problem, rule: EvictionRule, settings: EvictionSettings) -> Order | None:
        stops.append(settings.should_stop())
        search.stopping.halt()
        stops.append(settings.should_stop())
        return find_evicted(problem, rule, settings)

    monkeypatch.setattr(first_schedules, "find_evicted", order)
    search = Search.of(ask(untimed(20), 8, tolerance=1e-3, time_limit_s=3600.0))
    monkeypatch.setattr(Relaxation, "step", lambda *_: True)
    driver.run(search)
    assert stops == [False, True]
    assert search.incumbent.best is None


def test_no_rule_is_begun_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    monkeypatch.setattr("solvers.eviction.least_peak.find_evicting_order", lambda *_, **__: begun.append(1))
    assert find_least_evicting_schedule(untimed(20), WallClock(-1.0)) is None
    assert begun == []
    assert find_least_evicting_schedule(untimed(20), WallClock(60.0)) is None
    assert begun
