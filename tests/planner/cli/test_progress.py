"""What the terminal shows while a solve runs."""

import contextlib
import io
import os
import pty
import signal
from collections.abc import Iterator
from typing import TextIO

import pytest
from planner.cli.progress import PLAIN_EVERY_S, LineView, describe

from planner.cli.interrupt import StopOnInterrupt
from solvers.result import SolveProgress


def test_progress_is_told_as_overhead() -> None:
    nothing = SolveProgress(seconds=1, activity="", best_s=None, bound_s=None)
    assert describe(nothing, base_s=2.0) == "solving, best so far none yet"
    bound = SolveProgress(seconds=1, activity="round 1", best_s=None, bound_s=2.0)
    assert describe(bound, base_s=2.0) == "round 1, best so far none yet, bound +0.00%"
    both = SolveProgress(seconds=1, activity="round 2", best_s=2.2, bound_s=2.1)
    assert describe(both, base_s=2.0) == "round 2, best so far +10.00%, bound +5.00%, gap 4.76%"
    rounding = SolveProgress(seconds=1, activity="x", best_s=2.0, bound_s=1.9999999999)
    assert describe(rounding, base_s=2.0) == "x, best so far +0.00%, bound +0.00%, gap 0.00%"
    assert describe(both, base_s=0.0) == "round 2, best so far 2.2 s, bound 2.1 s, gap 4.76%"


def at(seconds: float) -> SolveProgress:
    return SolveProgress(seconds=seconds, activity=f"at {seconds:.0f}", best_s=None, bound_s=None)


def test_without_a_terminal_there_is_a_plain_line_now_and_then() -> None:
    stream = io.StringIO()
    with LineView(stream=stream, base_s=1.0) as progress:
        for seconds in range(int(PLAIN_EVERY_S) * 2 + 2):
            progress(at(float(seconds)))
        progress.say("not shown")
    assert stream.getvalue() == "".join(f"planner: at {seconds}, best so far none yet, {seconds} s\n" for seconds in (10, 20))


def test_quiet_says_nothing() -> None:
    stream = io.StringIO()
    with LineView(quiet=True, stream=stream) as progress:
        progress(at(1000.0))
        progress.say("nothing")
        progress.note("nothing")
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


def test_on_a_terminal_there_is_one_line_that_goes_away(terminal: tuple[int, TextIO]) -> None:
    with LineView(stream=terminal[1], base_s=2.0) as progress:
        progress(SolveProgress(seconds=1, activity="round 2 [of many]", best_s=2.2, bound_s=2.1))
        progress.note("something that stays [bold]")
    shown = sent_to(terminal)
    assert "round 2 [of many], best so far +10.00%, bound +5.00%, gap 4.76%, " in shown
    assert "something that stays [bold]\r\n" in shown
    assert shown.rindex("\x1b[?25h") > shown.index("\x1b[?25l")


def test_a_line_that_is_abandoned_gives_the_cursor_back(terminal: tuple[int, TextIO]) -> None:
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
