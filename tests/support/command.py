"""The command, called in this process."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from planner.cli.main import main


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


@dataclass(frozen=True)
class FakeReport:
    """What ``planner.running.run`` returns."""

    identical: bool | None
    differences: tuple[str, ...] | None = ()
    budget_bytes: int = 2000
    predicted_peak_bytes: int = 1990
    measured_peak_bytes: int = 1980
    predicted_time_s: float = 0.011
    measured_time_s: float = 0.012
    predicted_ratio: float = 1.1
    measured_ratio: float | None = 1.2
    eager_ratio: float | None = 1.05
    reserved_bytes: int | None = None
    predicted_host_bytes: int | None = None
    measured_host_bytes: int | None = None
    eager_differences: tuple[str, ...] | None = ()
    differs: tuple[str, ...] = ()
    predicted_pools_bytes: Mapping[str, int] = field(default_factory=dict)
    measured_pools_bytes: Mapping[str, int] = field(default_factory=dict)
    predicted_gradient_error: float | None = None
    measured_gradient_error: float | None = None
    not_compared: str = ""
