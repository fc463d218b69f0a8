"""``planner info``: what it shows of graphs and plans."""

import json
from pathlib import Path

import pytest

from graphs.io.formats import write_graph
from graphs.ir import Graph, Op, Tensor
from planner.plans.plan import read_plan
from tests.support.cli import call, chain


def test_info_shows_a_graph(graph_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = call(capsys, "info", graph_file)
    assert (said.code, said.err) == (0, "")
    for words in (
        "model",
        "chain",
        "forward 6 ms, backward 6 ms",
        "static memory  1.00 kB",
        "without recomputation",
        "least budget",
    ):
        assert words in said.out
    data = json.loads(call(capsys, "info", graph_file, "--json").out)
    graph = chain()
    assert data["holds"] == "graph"
    assert data["ops"] == 12
    assert data["fingerprint"] == graph.fingerprint
    assert data["static_bytes_by_kind"] == {"activation": 1000}
    assert data["least_budget_op"] in {op.name for op in graph.ops}
    assert len(data["largest_ops"]) == len(data["largest_tensors"]) == 10
    assert data["largest_ops"][0]["total_bytes"] == 3000


def test_info_shows_a_plan(graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_file = tmp_path / "plan.json"
    assert call(capsys, "solve", graph_file, "--budget", "60%", "-o", plan_file).code == 0
    said = call(capsys, "info", plan_file)
    assert (said.code, said.err) == (0, "")
    assert "chain" in said.out
    assert "windows" in said.out
    data = json.loads(call(capsys, "info", plan_file, "--json").out)
    assert data["holds"] == "plan"
    assert data["graph"]["fingerprint"] == chain().fingerprint
    assert data["steps"] == len(read_plan(plan_file).schedule.steps)


def test_names_cannot_drive_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    op = Op(0, "a\x1b[31m\nb", "t", (), (0,), 1.0, module="m\r")
    path = tmp_path / "model.json"
    write_graph(Graph((op,), (Tensor(0, "t\x07", 5, (0,)),), frozenset(), {"model": "x\ty"}), path)
    said = call(capsys, "info", path)
    assert said.code == 0
    assert all(line.isprintable() for line in said.out.splitlines())
