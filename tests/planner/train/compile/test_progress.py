"""What ``planner.compile`` reports while it plans."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import planner
from planner.graphs.errors import InfeasibleError
from planner.plans.record import plan_line
from planner.progress import Event, Progress, Stage
from tests.support.logs import lines_of
from tests.support.marks import slow_among
from tests.support.models.planned import workload

PLANNING = [stage for stage in Stage if stage is not Stage.COMPILE]
STAGES = [stage.value for stage in PLANNING]


def begun(seen: list[Progress]) -> list[str]:
    return [p.stage for p in seen if p.event is Event.BEGIN]


def test_each_stage_is_reported_in_order_and_no_fraction_falls() -> None:
    seen: list[Progress] = []
    step = planner.compile(*workload(), budget="100%", passes=1, on_progress=seen.append)
    assert begun(seen) == STAGES
    assert [p.stage for p in seen] == sorted((p.stage for p in seen), key=STAGES.index)
    assert [p.stage for p in seen if p.event is Event.END] == STAGES
    for stage in PLANNING:
        fractions = [p.fraction for p in seen if p.stage is stage and p.fraction is not None]
        assert fractions == sorted(fractions) and fractions[-1] == 1.0
    overall = [p.overall for p in seen]
    assert overall == sorted(overall)
    assert (overall[0], overall[-1]) == (0.0, 1.0)
    solved = [p for p in seen if p.stage is Stage.SOLVE and p.best_s is not None]
    assert solved[-1].best_s == step.plan.time_s and solved[-1].base_s == step.plan.graph.time_s
    assert seen[-1].event is Event.DONE
    assert seen[-1].summary == f"{plan_line(step.plan)}, {seen[-1].seconds:.1f} s"


def test_capture_is_reported_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Progress] = []

    def capture(*args: object, **kwargs: object) -> None:
        assert [(p.event, p.stage) for p in seen] == [("begin", "capture")]
        raise InterruptedError

    monkeypatch.setattr("planner.train.distributed.wrappers.capture_step", capture)
    with pytest.raises(InterruptedError):
        planner.compile(*workload(), budget="100%", on_progress=seen.append)
    assert [p.event for p in seen] == ["begin", "failed"]


def test_measuring_has_a_fraction_from_op_to_op() -> None:
    seen: list[Progress] = []
    planner.trace(*workload(), passes=1, on_progress=seen.append)
    assert begun(seen) == ["capture", "measure"]
    assert len({p.fraction for p in seen if p.stage is Stage.MEASURE and p.event is Event.ADVANCE}) > 5
    assert (seen[-1].event, seen[-1].summary) == ("done", "")


def test_cached_plan_skips_profiling_and_solving(tmp_path: Path) -> None:
    planner.compile(*workload(), budget="100%", passes=1, cache=tmp_path)
    seen: list[Progress] = []
    planner.compile(*workload(), budget="100%", passes=1, cache=tmp_path, compare_eager=False, on_progress=seen.append)
    assert begun(seen) == ["capture", "check"]
    assert seen[-1].summary.startswith("planned: ")


def test_each_size_is_a_planning_of_its_own() -> None:
    seen: list[Progress] = []
    model, loss_fn, batch = workload(8)
    step = planner.compile(model, loss_fn, batch, budget="100%", passes=1, dynamic=True, on_progress=seen.append)
    assert begun(seen) == STAGES
    step(batch[0][:6], batch[1][:6]).backward()
    assert begun(seen) == [*STAGES, *STAGES[:-1]]
    assert [p.overall for p in seen if p.event is Event.DONE] == [1.0, 1.0]


def test_an_error_ends_the_stage() -> None:
    seen: list[Progress] = []
    with pytest.raises(InfeasibleError):
        planner.compile(*workload(), budget="1kB", passes=1, on_progress=seen.append)
    assert (seen[-1].event, seen[-1].stage) == ("failed", "solve")


@pytest.mark.parametrize("stage", slow_among(PLANNING, Stage.MEASURE, Stage.CHECK))
def test_an_interrupt_ends_planning_in_any_stage(stage: Stage) -> None:
    seen: list[Progress] = []

    def interrupt(progress: Progress) -> None:
        seen.append(progress)
        if progress.stage is stage and progress.event is Event.BEGIN:
            raise KeyboardInterrupt

    model, loss_fn, batch = workload()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(KeyboardInterrupt):
        planner.compile(model, loss_fn, batch, budget="100%", passes=1, on_progress=interrupt)
    assert (seen[-1].event, seen[-1].stage) == ("failed", stage)
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, model.parameters(), strict=True))


@pytest.fixture
def logged() -> Iterator[list[str]]:
    with lines_of("planner") as lines:
        yield lines


def test_planning_is_logged_where_logging_is_set_up(logged: list[str]) -> None:
    step = planner.compile(*workload(), budget="100%", passes=1)
    assert [line.split(":")[0] for line in logged] == [stage for stage in STAGES for _ in range(2)] + ["planned"]
    assert logged[-1].startswith(plan_line(step.plan))


def test_without_logging_planning_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    assert not logging.getLogger("planner").hasHandlers()
    planner.compile(*workload(), budget="100%", passes=1)
    assert capfd.readouterr() == ("", "")
