"""Stages of planning: order, fractions and estimates, with a clock that stands still between reports."""

import pytest

from planner.progress import Event, Progress, Stage, Stages
from planner.solvers.result import SolveProgress


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def seen() -> list[Progress]:
    return []


def test_stages_are_reported_from_their_begin(clock: Clock, seen: list[Progress]) -> None:
    with Stages(seen.append, clock=clock) as stages, stages.run_stage(Stage.CAPTURE):
        (first,) = seen
        assert (first.event, first.stage, first.fraction, first.overall, first.left_s) == ("begin", "capture", None, 0.0, None)
        assert first.activity == "capturing the training step"
        clock.now_s += 4
    assert [(p.event, p.fraction, p.seconds, p.stage_seconds) for p in seen[1:]] == [("end", 1.0, 4.0, 4.0)]


def test_time_left_is_extrapolated_from_the_speed_so_far(clock: Clock, seen: list[Progress]) -> None:
    stages = Stages(seen.append, stages=(Stage.CAPTURE, Stage.MEASURE), clock=clock)
    with stages.run_stage(Stage.CAPTURE):
        clock.now_s += 3  # says nothing about the time of a step
    assert (seen[-1].left_s, seen[-1].overall) == (None, 0.0)
    with stages.run_stage(Stage.MEASURE) as stage:
        stage.advance(0, 10)
        assert seen[-1].left_s is None
        clock.now_s += 2
        stage.advance(1, 10)
        assert seen[-1].left_s == pytest.approx(18.0)
        clock.now_s += 8
        stage.advance(10, 10)
        assert seen[-1].left_s == 0.0
    stages.finish()
    assert (seen[-1].event, seen[-1].left_s, seen[-1].overall, seen[-1].seconds) == ("done", 0.0, 1.0, 13.0)


def test_later_stages_are_estimated_from_the_time_that_measuring_takes(clock: Clock, seen: list[Progress]) -> None:
    stages = Stages(seen.append, stages=(Stage.MEASURE, Stage.COMPARE), clock=clock)
    with stages.run_stage(Stage.MEASURE) as stage:
        clock.now_s += 1
        stage.advance(1, 5)
        assert seen[-1].left_s == pytest.approx(4.0 + 7.0)
        clock.now_s += 1  # faster than before
        stage.advance(4, 4)
    assert seen[-1].left_s == pytest.approx(2.8)


def test_expected_times_are_used_in_estimates(clock: Clock, seen: list[Progress]) -> None:
    stages = Stages(seen.append, clock=clock)
    with stages.run_stage(Stage.CAPTURE):
        clock.now_s += 4
    stages.expect({Stage.SOLVE: 3.0, Stage.CHECK: 10.0, Stage.COMPARE: 0.0})
    with stages.run_stage(Stage.SOLVE):
        assert seen[-1].left_s == 13.0
        clock.now_s += 100  # longer than was expected
    assert seen[-1].left_s == 10.0


def test_fractions_never_fall(clock: Clock, seen: list[Progress]) -> None:
    stages = Stages(seen.append, clock=clock)
    with stages.run_stage(Stage.CAPTURE):
        clock.now_s += 1
    with stages.run_stage(Stage.MEASURE) as stage:
        for done, count in ((1, 4), (3, 4), (1, 4), (0, 1), (4, 4), (5, 4), (0, 0)):
            clock.now_s += 5
            stage.advance(done, count)
    for _ in range(2):  # the plan is solved for again with a lower budget
        with stages.run_stage(Stage.SOLVE):
            clock.now_s += 3
        with stages.run_stage(Stage.CHECK):
            clock.now_s += 2
    measured = [p.fraction for p in seen if p.stage is Stage.MEASURE and p.event is Event.ADVANCE]
    assert measured == [0.25, 0.75, 0.75, 0.75, 1.0, 1.0, 1.0]
    overall = [p.overall for p in seen]
    assert overall == sorted(overall)
    assert 0 < overall[-1] < 1


def test_a_solve_reports_schedules_and_its_share_of_the_time(clock: Clock, seen: list[Progress]) -> None:
    stages = Stages(seen.append, clock=clock)
    with stages.run_stage(Stage.SOLVE) as stage:
        tell = stage.report_solve(base_s=2.0, limit_s=4.0)
        tell(SolveProgress(seconds=1.0, activity="", best_s=None, bound_s=None))
        tell(SolveProgress(seconds=2.0, activity="round 2", best_s=2.2, bound_s=2.0))
        tell(SolveProgress(seconds=9.0, activity="round 3", best_s=2.1, bound_s=2.0))
    told = [(p.activity, p.fraction, p.best_s, p.bound_s, p.base_s) for p in seen[1:-1]]
    assert told == [
        ("looking for a schedule", 0.25, None, None, 2.0),
        ("round 2", 0.5, 2.2, 2.0, 2.0),
        ("round 3", 1.0, 2.1, 2.0, 2.0),
    ]
    assert seen[1].gap is None
    assert seen[2].gap == pytest.approx(0.1)


def test_a_solve_that_ends_with_its_gap_has_no_fraction(clock: Clock, seen: list[Progress]) -> None:
    with Stages(seen.append, clock=clock).run_stage(Stage.SOLVE) as stage:
        stage.report_solve(base_s=2.0)(SolveProgress(seconds=1.0, activity="x", best_s=2.0, bound_s=1.0))
        assert (seen[-1].fraction, seen[-1].left_s) == (None, None)


def test_an_error_is_the_last_report(clock: Clock, seen: list[Progress]) -> None:
    def interrupted() -> None:
        clock.now_s += 2
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Stages(seen.append, clock=clock) as stages, stages.run_stage(Stage.MEASURE):
        interrupted()
    assert [p.event for p in seen] == ["begin", "failed"]
    assert (seen[-1].stage, seen[-1].stage_seconds) == ("measure", 2.0)


def test_summary_has_the_planning_time(clock: Clock, seen: list[Progress]) -> None:
    first = Stages(seen.append, clock=clock)
    clock.now_s += 50
    with first.restart() as stages:
        with stages.run_stage(Stage.CAPTURE):
            clock.now_s += 3.21
        stages.finish("planned: much")
    assert [p.summary for p in seen] == ["", "", "planned: much, 3.2 s"]


def test_without_a_stage_nothing_is_reported(clock: Clock, seen: list[Progress]) -> None:
    with Stages(seen.append, clock=clock) as stages:
        stages.finish("planned")
    with pytest.raises(ValueError, match="early"), Stages(seen.append, clock=clock):
        raise ValueError("early")
    assert seen == []
