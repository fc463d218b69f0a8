"""The command, called in this process."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from planner.cli.main import main
from planner.running import RunReport


@dataclass(frozen=True, slots=True)
class Said:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> Said:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return Said(code, captured.out, captured.err)


def refused(said: Said, code: int, *words: str) -> None:
    assert said.code == code
    assert said.out == ""
    assert said.err.startswith("planner: error: ")
    assert said.err.count("\n") == 1
    for word in words:
        assert word in said.err


def run_report(*, identical: bool | None, **changes: Any) -> RunReport:
    """Return what ``planner.running.run`` might, with `changes`."""
    usual = RunReport(
        budget_bytes=2000,
        predicted_peak_bytes=1990,
        measured_peak_bytes=1980,
        needed_bytes=changes.get("measured_peak_bytes", 1980),
        reserved_bytes=None,
        predicted_host_bytes=None,
        measured_host_bytes=None,
        predicted_time_s=0.011,
        measured_time_s=0.012,
        predicted_ratio=1.1,
        timeline=(),
        measured_ratio=1.2,
        eager_ratio=1.05,
        overhead=1.2 / 1.05 - 1,
        spread=0.03,
        identical=identical,
        differences=(),
        eager_differences=(),
    )
    return replace(usual, **changes)
