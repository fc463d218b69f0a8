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
from planner.progress import LineView, LoggingView, NotebookView, views_of

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


def test_nothing_is_shown_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    compiled()
    assert stream.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", None)
    assert [type(view) for view in views_of(None)] == [LoggingView]


def test_a_notebook_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("IPython")
    with terminal(monkeypatch):
        assert [type(view) for view in views_of(None)] == [LoggingView, LineView]
        monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=object()))
        assert [type(view) for view in views_of(None)] == [LoggingView, NotebookView]


def test_a_view_takes_the_place_of_all() -> None:
    seen: list[object] = []
    assert views_of(seen.append) == (seen.append,)
