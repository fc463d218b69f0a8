"""Progress is shown without asking on a terminal and in a notebook, and nowhere else."""

import io
import os
import pty
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner.progress import LineView, LoggingView, NotebookView, list_default_views, list_views
from tests.support.models.backend import BrokenTwice

X, Y = torch.randn(8, 16), torch.randn(8, 4)


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], bytes]]:
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
    with terminal(monkeypatch) as read:
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
    with terminal(monkeypatch) as read:
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
    with terminal(monkeypatch) as read:
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
    with terminal(monkeypatch) as read:
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
    with terminal(monkeypatch):
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
