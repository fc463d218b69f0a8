"""The progress line on a terminal."""

import contextlib
import io
import os
import pty
import signal
from collections.abc import Iterator
from typing import Any, TextIO

import pytest

from planner.cli.interrupt import StopOnInterrupt
from planner.progress import Event, LineView, Progress, Stage
from planner.progress.line import PLAIN_EVERY_S


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
