"""Progress in words, in the log, in a notebook and as a line on a terminal: without asking only there."""

import contextlib
import io
import logging
import os
import pty
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType, SimpleNamespace
from typing import Any, TextIO

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner.cli.interrupt import StopOnInterrupt
from planner.graphs.errors import PlannerError
from planner.plans.plan import Plan
from planner.plans.record import describe_saved, plan_line
from planner.plans.solve import solve
from planner.progress import Event, LineView, LoggingView, NotebookView, Progress, Stage, Stages, list_default_views, list_views
from planner.progress.describe import describe
from planner.progress.line import PLAIN_EVERY_S
from planner.solvers.result import SolveProgress
from tests.support.cli import chain
from tests.support.logs import lines_of
from tests.support.models.backend import BrokenTwice


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


def solving(activity: str = "round 2", **given: Any) -> Progress:
    known = {"event": Event.ADVANCE, "stage": Stage.SOLVE, "fraction": None, "overall": 0.0, "left_s": None}
    return Progress(**{**known, "activity": activity, "seconds": 1.0, "stage_seconds": 1.0, "base_s": 2.0, **given})


def test_plain_lines_are_printed_without_a_terminal() -> None:
    stream, now_s = io.StringIO(), [0.0]
    with LineView(stream=stream, clock=lambda: now_s[0]) as view:
        for seconds in range(int(PLAIN_EVERY_S) * 2 + 2):
            now_s[0] = float(seconds)
            view(solving(f"at {seconds}"))
    shown = "".join(f"planner: at {seconds}, best so far none yet, {seconds} s\n" for seconds in (10, 20))
    assert stream.getvalue() == shown


def test_summary_line_stays_at_the_end() -> None:
    stream = io.StringIO()
    view = LineView(stream=stream)
    view(solving())
    view(solving(event=Event.DONE, summary="planned: much, 3.2 s"))
    assert stream.getvalue() == "planner: planned: much, 3.2 s\n"


def test_quiet_prints_nothing() -> None:
    stream, now_s = io.StringIO(), [0.0]
    with LineView(quiet=True, stream=stream, clock=lambda: now_s[0]) as view:
        now_s[0] = 1000.0
        view(solving())
        view.show_activity("nothing")
        view.note("nothing")
        view(solving(event=Event.DONE, summary="nothing"))
    assert stream.getvalue() == ""


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, TextIO]]:
    """The two ends of a terminal."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    main, other = pty.openpty()
    with os.fdopen(other, "w") as stream:
        yield main, stream
    os.close(main)


def sent_to(terminal: tuple[int, TextIO]) -> str:
    """All that was written to the terminal, which is closed: what was written arrives in pieces."""
    main, stream = terminal
    stream.close()
    shown = b""
    # Linux says by an error that the other end is closed, others by an empty read.
    with contextlib.suppress(OSError):
        while piece := os.read(main, 65536):
            shown += piece
    return shown.decode()


def test_line_on_a_terminal_is_removed_at_the_end(terminal: tuple[int, TextIO]) -> None:
    with LineView(stream=terminal[1]) as progress:
        progress(solving("round 2 [of many]", best_s=2.2, bound_s=2.1))
        progress.note("something that stays [bold]")
    shown = sent_to(terminal)
    assert "round 2 [of many], best so far +10.00%, bound +5.00%, gap 4.76%, " in shown
    assert "something that stays [bold]\r\n" in shown
    assert shown.rindex("\x1b[?25h") > shown.index("\x1b[?25l")


@pytest.mark.parametrize("event", [Event.DONE, Event.FAILED])
def test_unclosed_line_is_removed_at_exit(event: Event, terminal: tuple[int, TextIO]) -> None:
    view = LineView(stream=terminal[1])
    view(solving("round 1", event=Event.BEGIN))
    view(solving(event=event, summary="planned: much" if event is Event.DONE else ""))
    shown = sent_to(terminal)
    assert "round 1, best so far none yet, 0 s" in shown
    assert shown.rindex("\x1b[?25h") > shown.index("\x1b[?25l")
    assert shown.endswith("planner: planned: much\r\n") == (event is Event.DONE)


def test_abandoned_line_restores_the_cursor(terminal: tuple[int, TextIO]) -> None:
    with LineView(stream=terminal[1]) as progress:
        progress.abandon()
    assert "\r\x1b[K\x1b[?25h" in sent_to(terminal)


def test_an_interrupt_is_a_request_while_a_solve_runs() -> None:
    stream = io.StringIO()
    before = signal.getsignal(signal.SIGINT)
    with LineView(stream=stream) as progress, StopOnInterrupt(progress) as interrupted:
        assert not interrupted()
        assert stream.getvalue() == ""
        signal.raise_signal(signal.SIGINT)
        assert interrupted() and interrupted()
    assert stream.getvalue().count("interrupted: ending with the best schedule found so far") == 1
    assert signal.getsignal(signal.SIGINT) is before


X, Y = torch.randn(8, 16), torch.randn(8, 4)


@contextmanager
def pseudo_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], bytes]]:
    """Inside, stderr is a terminal; yield a function that returns what was written to it."""
    reader, writer = pty.openpty()
    os.set_blocking(reader, False)

    def read() -> bytes:
        written = b""
        with suppress(BlockingIOError):
            while part := os.read(reader, 1 << 16):  # at most what the terminal buffers
                written += part
        return written

    with os.fdopen(writer, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        yield read
    os.close(reader)


def compiled(**options: Any) -> None:
    planner.compile(nn.Linear(16, 4), F.mse_loss, (X, Y), budget="1MB", passes=1, compare_eager=False, **options)


def test_a_terminal_shows_a_line_and_the_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    with pseudo_terminal(monkeypatch) as read:
        compiled(on_progress=False)
        assert read() == b""
        compiled()
        assert b"planned: " in read()


def loss_of(model: nn.Module) -> torch.Tensor:
    return F.mse_loss(model(X), Y)


def train(model: nn.Module) -> None:
    for _ in range(3):
        loss_of(model).backward()


def test_a_terminal_shows_what_each_function_does(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = planner.trace(nn.Linear(16, 4), F.mse_loss, (X, Y), passes=1)
    with pseudo_terminal(monkeypatch) as read:
        planner.solve(graph, "100%", on_progress=False)
        planner.curve(graph, 2, on_progress=False)
        assert read() == b""
        planner.solve(graph, "100%")
        assert b"looking for a schedule" in read()
        planner.curve(graph, 2)
        assert b"looking for the least feasible budget" in read()
        planner.advise(nn.Linear(16, 4), F.mse_loss, (X, Y), passes=1, time_limit_s=20, options=[])
        assert b"capturing" in (written := read()) and b"looking for" in written


@pytest.mark.usefixtures("fresh_compiler")
def test_a_model_without_a_loop_of_ours_has_one_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    with pseudo_terminal(monkeypatch) as read:
        loss_of(planner.checkpoint(nn.Linear(16, 4), budget="1MB", on_progress=False)).backward()
        loss_of(torch.compile(nn.Linear(16, 4), backend="planner", options={"budget": "1MB", "on_progress": False})).backward()
        assert read() == b""
        for model in (
            planner.checkpoint(nn.Linear(16, 4), budget="1MB"),
            torch.compile(nn.Linear(16, 4), backend="planner", options={"budget": "1MB"}),
        ):
            train(model)
            assert read().count(b"planned: ") == 1


@pytest.mark.usefixtures("fresh_compiler")
def test_all_graphs_of_a_step_have_one_summary_and_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2)]
    model = planner.checkpoint(BrokenTwice(*linear, nn.Linear(16, 4)), budget="1MB")
    with pseudo_terminal(monkeypatch) as read:
        with pytest.warns(UserWarning, match="several graphs") as told:
            train(model)
        shown = read()
    assert len(told) == 1 and shown.count(b"planned: ") == 1 and b", 3 graphs, " in shown


def test_nothing_is_shown_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    compiled()
    assert stream.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", None)
    assert [type(view) for view in list_views(None)] == [LoggingView]


def test_a_notebook_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("IPython")
    with pseudo_terminal(monkeypatch):
        assert [type(view) for view in list_views(None)] == [LoggingView, LineView]
        monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=object()))
        assert [type(view) for view in list_views(None)] == [LoggingView, NotebookView]


def test_calls_of_a_cell_share_its_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("IPython")
    shell = SimpleNamespace(kernel=object(), execution_count=1)
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    first = list_default_views()
    assert list_default_views() == first
    shell.execution_count = 2
    assert list_default_views() != first


def test_a_view_takes_the_place_of_all() -> None:
    seen: list[object] = []
    assert list_views(seen.append) == (seen.append,)
