"""The command in a process of its own, and a graph for it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from graphs.ir import Graph, Op, Phase, Tensor

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0


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
