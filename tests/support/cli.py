"""The command, called in this process and in one of its own, and graphs for it."""

import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from planner.cli.main import main
from planner.graphs.ir import Graph, Op, Phase, Tensor
from planner.graphs.synthetic.small import make_training_chain
from planner.measure.run_plan import RunReport


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
    """Return what ``planner.measure.run_plan.run`` might, with `changes`."""
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


ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0

WITH_ENDLESS_SOLVER = """
import sys, time, types
from pathlib import Path
from planner.cli.main import main
from planner.solvers.baselines import keep_everything
from planner.solvers.registry import SOLVERS, Entry

marker, listens, *arguments = sys.argv[1:]

def solve(request):
    request.is_interrupted()
    Path(marker).touch()
    while not (listens == "listens" and request.is_interrupted()):
        time.sleep(0.01)
    return keep_everything.solve(request)

module = types.ModuleType("endless")
module.solve = solve
sys.modules["endless"] = module
SOLVERS["endless"] = Entry("endless", "never ends by itself")
sys.exit(main(arguments))
"""


def chain() -> Graph:
    """Six ops forward and six backward, each of which reads what its counterpart has read."""
    tensors, ops = [Tensor(0, "x", 1000, ())], []
    for i in range(12):
        forward = i < 6
        inputs = (i,) if forward else (i, 11 - i)
        tensors.append(Tensor(i + 1, f"t{i}", 1000, (i,)))
        ops.append(Op(i, f"op{i}", "example", inputs, (i + 1,), 0.001, phase=Phase.FORWARD if forward else Phase.BACKWARD))
    return Graph(tuple(ops), tuple(tensors), frozenset({12}), {"model": "chain", "device": "cpu"})


def run_python(*words: object, timeout: float = PATIENCE_S, **options: Any) -> subprocess.CompletedProcess[str]:
    """What an interpreter of its own has said and returned, in the folder of the repository."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=timeout, **options)


def command(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "planner", *arguments, **options)


def start(marker: Path, *arguments: object) -> "subprocess.Popen[str]":
    """A process, once it has made the file `marker`."""
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + PATIENCE_S
    while not marker.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"it did not start: {process.communicate()}")
        time.sleep(0.01)
    return process


def chain_of_six() -> Graph:
    """``make_training_chain(6)`` with tensors of a kilobyte: a peak of 7000 bytes, a least budget of 3000."""
    graph = make_training_chain(6)
    return replace(graph, tensors=tuple(replace(tensor, size_bytes=1000) for tensor in graph.tensors))
