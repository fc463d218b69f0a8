"""Clocks: what is spent, whose turn it is, solves that do the same whatever the time, and end when it is up."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from planner.graphs.ir import Graph
from planner.graphs.synthetic.random_graphs import draw_training_step
from planner.graphs.synthetic.small import make_training_chain
from planner.plans.document import plan_to_dict
from planner.plans.solve import solve as plan
from planner.solvers.clock import Clock, WallClock, WorkClock, measure_rest
from planner.solvers.eviction.least_peak import find_least_evicting_schedule
from planner.solvers.eviction.rules import EvictionRule, EvictionSettings
from planner.solvers.highs.builder import BuildStoppedError
from planner.solvers.highs.run import HighsRun
from planner.solvers.problem import Problem, build_problem
from planner.solvers.request import Request
from planner.solvers.result import Result, Status
from planner.solvers.tolerance import Tolerance
from planner.solvers.windows import driver, search, solve
from planner.solvers.windows.decoding.decode import Order
from planner.solvers.windows.relaxation.discretization import Discretization
from planner.solvers.windows.relaxation.models import build_relaxation
from planner.solvers.windows.search import Search
from planner.solvers.windows.strategies import first_schedules
from planner.solvers.windows.strategies.first_schedules import find_evicted
from planner.solvers.windows.strategies.refinement import Relaxation, refine
from tests.support.budgets import budget_at
from tests.support.marks import slow
from tests.support.solvers.answers import ask

GRAPH = draw_training_step(2, 80)
BUDGET = budget_at(GRAPH, 0.25)
LIMIT = 1.0


@pytest.mark.parametrize("make", [WallClock, WorkClock])
def test_a_part_has_no_more_than_the_whole(make: type[WallClock] | type[WorkClock]) -> None:
    clock = make(10.0)
    assert clock.start_part(3.0).limit == 3.0
    assert clock.start_part(30.0).limit == pytest.approx(10.0, abs=1.0)
    assert measure_rest(clock) <= 10.0


def test_work_is_counted_in_the_whole_and_in_its_parts() -> None:
    clock = WorkClock(10.0)
    clock.spend(2.0)
    part = clock.start_part(100.0)
    assert (part.now, part.limit) == (0.0, 8.0)
    part.spend(3.0)
    assert (part.now, clock.now) == (3.0, 5.0)
    time.sleep(0.01)
    assert (part.now, clock.now) == (3.0, 5.0)
    assert part.seconds >= 0.01


def test_threads_go_on_by_the_work_that_they_have_done() -> None:
    for pause in ("here", "beside"):  # whichever is slower
        clock = WorkClock()
        seen: list[tuple[str, float]] = []

        def beside(clock: Clock = clock, pause: str = pause, seen: list[tuple[str, float]] = seen) -> None:
            for _ in range(6):
                time.sleep(0.02 * (pause == "beside"))
                seen.append(("beside", clock.now))
                clock.spend(2.0)

        clock.spend(1.0)
        other = clock.start(beside)
        for _ in range(4):
            time.sleep(0.02 * (pause == "here"))
            seen.append(("here", clock.now))
            clock.spend(3.0)
        other.end(0.0)
        assert not other.running
        assert seen == [
            ("here", 1.0),
            ("beside", 1.0),
            ("beside", 3.0),
            ("here", 4.0),
            ("beside", 5.0),
            ("beside", 7.0),
            ("here", 7.0),
            ("beside", 9.0),
            ("here", 10.0),
            ("beside", 11.0),
        ]
        assert clock.now == 13.0


def test_clock_after_waiting_for_a_thread_is_deterministic() -> None:
    for pause in (0.0, 0.05):
        clock = WorkClock()
        seen: list[float] = []

        def third(clock: Clock = clock, pause: float = pause) -> None:
            clock.spend(1.0)
            time.sleep(pause)
            clock.spend(2.0)

        def second(clock: Clock = clock, seen: list[float] = seen, third: Callable[[], None] = third) -> None:
            other = clock.start(third)
            clock.spend(0.5)
            other.end(0.0)
            seen.append(clock.now)

        other = clock.start(second)
        for _ in range(8):
            clock.spend(1.0)
        assert not other.running
        assert (seen, clock.now) == ([3.0], 8.0)


def test_a_thread_that_fails_leaves_the_turn_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    clock = WorkClock()

    def beside() -> None:
        clock.spend(0.5)
        raise RuntimeError("no such choice")

    other = clock.start(beside)
    clock.spend(1.0)
    clock.spend(1.0)
    assert not other.running
    other.end(0.0)
    assert clock.now == 2.0


def searched(limit: float) -> tuple[Result, float]:
    clock = WorkClock(limit)
    result = solve(Request(GRAPH, BUDGET, Tolerance.of(0.0), clock))
    return result, clock.now


@cache
def searched_at_once() -> tuple[Result, float]:
    return searched(LIMIT)


@pytest.mark.parametrize("slow", ["HiGHS", *slow("trials")])
def test_work_done_is_the_same_on_a_slower_machine(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quick, quick_spent = searched_at_once()
    if slow == "trials":
        tried = search.try_out

        def try_out(*given: Any) -> Any:
            time.sleep(0.002)
            return tried(*given)

        monkeypatch.setattr(search, "try_out", try_out)
    else:
        called = HighsRun._handle_callback

        def late(run: HighsRun, *told: Any) -> None:
            time.sleep(0.002)
            called(run, *told)

        monkeypatch.setattr(HighsRun, "_handle_callback", late)
    slow_one, slow_spent = searched(LIMIT)
    assert quick.schedule is not None
    assert (quick.schedule, quick.bound_s, quick.status) == (slow_one.schedule, slow_one.bound_s, slow_one.status)
    assert quick_spent == slow_spent >= LIMIT
    assert quick.settings["work_limit"] == LIMIT


@pytest.mark.slow
def test_plans_by_work_are_equal_but_for_the_seconds() -> None:
    first, second = (plan_to_dict(plan(GRAPH, BUDGET, work_limit=LIMIT)) for _ in range(2))
    assert first.pop("seconds") != second.pop("seconds")
    assert first == second


def test_work_can_be_stopped_from_outside() -> None:
    polls: list[int] = []

    def should_stop() -> bool:
        polls.append(1)
        return len(polls) > 3

    clock = WorkClock(1000.0)
    result = solve(Request(GRAPH, BUDGET, Tolerance.of(0.0), clock, should_stop=should_stop))
    assert result.status in (Status.FEASIBLE, Status.LIMIT)
    assert clock.now < 500.0


def untimed(layers: int) -> Graph:
    """A chain whose ops take no time: all schedules are optimal, and those of few bytes are long."""
    plain = make_training_chain(layers)
    return Graph(tuple(replace(op, time_s=0.0) for op in plain.ops), plain.tensors, plain.kept)


class CountedClock:
    """True after it has been asked so often."""

    def __init__(self, asked: int) -> None:
        self.left = asked

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_building_a_large_model_stops_on_request() -> None:
    problem = build_problem(untimed(40), 20)
    discretization = Discretization(tuple(range(problem.ops)))
    whole = build_relaxation(problem, discretization, should_stop=CountedClock(10**9)).program
    assert len(whole.matrix.values) > 20_000
    clock = CountedClock(3)
    with pytest.raises(BuildStoppedError):
        build_relaxation(problem, discretization, should_stop=clock)
    assert clock.left == -1


def test_a_model_that_was_given_up_ends_the_refinement() -> None:
    search = Search.of(ask(untimed(40), 20, tolerance=1e-3, time_limit_s=3600.0, should_stop=CountedClock(3)))
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
    monkeypatch.setattr("planner.solvers.eviction.least_peak.find_evicting_order", lambda *_, **__: begun.append(1))
    assert find_least_evicting_schedule(untimed(20), WallClock(-1.0)) is None
    assert begun == []
    assert find_least_evicting_schedule(untimed(20), WallClock(60.0)) is None
    assert begun
