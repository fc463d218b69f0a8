"""The command in a process of its own, and a graph for it."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from graphs.ir import Graph, Op, Phase, Tensor

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0

WITH_ENDLESS_SOLVER = """
import sys, time, types
from pathlib import Path
from planner.cli.main import main
from solvers.baselines import keep_everything
from solvers.registry import SOLVERS, Entry

marker, listens, *arguments = sys.argv[1:]

def solve(request):
    Path(marker).touch()
    while not (listens == "listens" and request.interrupted()):
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


def command(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "planner", *map(str, arguments)],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=PATIENCE_S,
        **options,
    )


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
