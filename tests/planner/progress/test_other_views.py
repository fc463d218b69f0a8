"""Progress in words, in the log and in a notebook."""

import logging
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from graphs.errors import PlannerError
from planner.plans.plan import Plan
from planner.plans.record import describe_saved, plan_line
from planner.plans.solve import solve
from planner.progress import LoggingView, NotebookView, Progress, Stage, Stages
from planner.progress.describe import describe
from solvers.result import SolveProgress
from tests.support.cli import chain
from tests.support.logs import lines_of


def progress(**given: Any) -> Progress:
    known = {"event": "advance", "stage": Stage.MEASURE, "activity": "measuring ops", "fraction": None, "overall": 0.0}
    return Progress(**{**known, "seconds": 1.0, "stage_seconds": 1.0, "left_s": None, **given})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "measuring ops"),
        ({"fraction": 0.4267, "left_s": 12.4}, "measuring ops, 43%, about 12 s left"),
        ({"fraction": 1.0, "left_s": 0.4}, "measuring ops, 100%"),
        ({"event": "end", "fraction": 1.0, "left_s": 14.0}, "measuring ops, about 14 s left"),
        ({"stage": Stage.SOLVE, "fraction": 0.3, "base_s": 2.0}, "measuring ops, best so far none yet"),
        ({"stage": Stage.SOLVE, "fraction": 0.3}, "measuring ops, 30%"),
    ],
)
def test_describe_states_stage_fraction_and_time_left(given: dict[str, Any], words: str) -> None:
    assert describe(progress(**given)) == words


def test_schedules_are_described_by_their_overhead() -> None:
    def words(best_s: float | None, bound_s: float | None, base_s: float = 2.0) -> str:
        return describe(progress(stage=Stage.SOLVE, activity="x", best_s=best_s, bound_s=bound_s, base_s=base_s))

    assert words(None, 2.0) == "x, best so far none yet, bound +0.00%"
    assert words(2.2, 2.1) == "x, best so far +10.00%, bound +5.00%, gap 4.76%"
    assert words(2.0, 1.9999999999) == "x, best so far +0.00%, bound +0.00%, gap 0.00%"
    assert words(2.2, 2.1, base_s=0.0) == "x, best so far 2.2 s, bound 2.1 s, gap 4.76%"


def test_the_summary_is_one_line() -> None:
    line = describe_saved(8_000_000_000, 14_200_000_000, 0.061, 0.004)
    assert line == "planned: 8.00 GB of 14.20 GB, predicted 6.1% slower than keeping everything (proved within 0.4%)"
    assert describe_saved(8, 14, 0.1234, None) == "planned: 8 B of 14 B, predicted 12.3% slower than keeping everything"
    assert describe_saved(8, 14, 0.1, 0.00049).endswith("(proved within 0.049%)")
    assert describe_saved(8, 14, 0.1, 1.9).endswith("(proved within 190%)")
    assert describe_saved(8, 14, 0.1, 0.0).endswith("(proved optimal)")


def test_the_summary_of_a_plan_has_its_numbers() -> None:
    plan: Plan = solve(chain(), "70%")
    assert plan.overhead > 0
    expected = describe_saved(plan.peak_bytes, plan.graph.keep_everything_peak_bytes, plan.overhead, plan.gap)
    assert plan_line(plan) == expected


@pytest.fixture
def logged() -> Iterator[list[str]]:
    with lines_of("planner") as lines:
        yield lines


def plan_reporting_to(view: Any) -> None:
    now_s = [0.0]
    with Stages(view, clock=lambda: now_s[0]) as stages:
        with stages.run_stage(Stage.MEASURE) as stage:
            now_s[0] = 4.0
            stage.advance(1, 2)
        with stages.run_stage(Stage.SOLVE) as stage:
            now_s[0] = 5.5
            stage.report_solve(base_s=2.0)(SolveProgress(seconds=1.0, activity="x", best_s=2.2, bound_s=2.0))
        stages.finish("planned: much")


def test_the_log_has_begin_and_end_of_stages_and_the_summary(logged: list[str]) -> None:
    plan_reporting_to(LoggingView())
    assert logged == [
        "measure: measuring ops",
        "measure: done in 4.0 s",
        "solve: looking for a schedule",
        "solve: done in 1.5 s, gap 10.00%",
        "planned: much, 5.5 s",
    ]


def test_the_log_of_a_trainer_has_two_lines_for_a_plan(logged: list[str]) -> None:
    view = LoggingView(logging.getLogger("planner.trainer"), stages=False)
    for _ in range(2):
        plan_reporting_to(view)
    assert logged == ["planning: measuring ops", "planned: much, 5.5 s"] * 2


def test_log_names_the_stage_that_an_error_ended(logged: list[str]) -> None:
    with pytest.raises(ValueError, match="x"), Stages(LoggingView(), clock=lambda: 1.0) as stages, stages.run_stage(Stage.CHECK):
        raise ValueError("x")
    assert logged == [
        "check: rehearsing the plan",
        "check: ended by an error after 0.0 s",
    ]


class Cell:
    """The output of a notebook's cell."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []
        self.displays = 0

    def display(self, bundle: dict[str, str], *, raw: bool, display_id: bool) -> "Cell":
        assert raw and display_id
        self.displays += 1
        self.shown.append(bundle)
        return self

    def update(self, bundle: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.shown.append(bundle)


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    cell, display = Cell(), ModuleType("IPython.display")
    display.display = cell.display
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return cell


def test_a_notebook_has_one_bar_that_the_summary_replaces(cell: Cell) -> None:
    view = NotebookView(clock=lambda: 0.0)  # all reports come within one moment
    plan_reporting_to(view)
    assert cell.displays == 1
    texts = [bundle["text/plain"] for bundle in cell.shown]
    assert texts[0] == "measuring ops, 0 s"
    assert texts[-1] == "planned: much, 5.5 s"
    assert len(texts) == 5  # begin and end of two stages, and the summary
    assert all(('<progress value="' in bundle["text/html"]) == (bundle is not cell.shown[-1]) for bundle in cell.shown)
    plan_reporting_to(view)
    assert cell.displays == 2


def test_a_notebook_shows_names_as_text(cell: Cell) -> None:
    with Stages(NotebookView()).run_stage(Stage.CAPTURE, "capturing <b>"):
        pass
    assert "capturing &lt;b&gt;" in cell.shown[0]["text/html"]


def test_notebook_view_without_ipython_raises_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython.display", None)
    with pytest.raises(PlannerError, match="use LineView"):
        NotebookView()
