"""``planner info``: what it shows of graphs and plans."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from graphs.io.formats import write_graph
from graphs.units import format_enough
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


def test_an_option_that_is_not_registered_is_shown_with_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = chain()
    op = replace(plain.ops[0], id=len(plain.ops), name="other", target="magic.f", optional=True, replaces=(0,))
    tensors = tuple(replace(t, producers=(*t.producers, op.id)) if 0 in t.producers else t for t in plain.tensors)
    path = tmp_path / "model.json"
    write_graph(replace(plain, ops=(*plain.ops, op), tensors=tensors, provenance={"options": ["magic"]}), path)
    said = call(capsys, "info", path)
    assert (said.code, said.err) == (0, "")
    assert "1 optional ops of an option that is not registered here, 'magic', all exact" in said.out
    assert "largest tensors" in said.out


def test_on_cuda_the_least_budget_is_said_in_reserved_memory_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = chain()
    tensors = tuple(replace(t, size_bytes=11 * 2**20) for t in plain.tensors)  # in segments of 12 MiB
    graph = replace(plain, tensors=tensors, provenance={"device": "h200"})
    path = tmp_path / "model.json"
    write_graph(graph, path)
    data = json.loads(call(capsys, "info", path, "--json").out)
    assert data["least_budget_bytes"] <= data["least_reserved_bytes"] <= data["least_reserved_found_bytes"]
    assert data["least_reserved_found_bytes"] % (2 * 2**20) == 0  # an arena of whole pages, in place of segments
    assert data["least_reserved_found_bytes"] < -(-data["least_budget_found_bytes"] // (11 * 2**20)) * 12 * 2**20
    text = call(capsys, "info", path).out
    assert f"if the budget counts it; known {format_enough(data['least_reserved_found_bytes'])}" in text
    write_graph(plain, path)
    assert json.loads(call(capsys, "info", path, "--json").out)["least_reserved_bytes"] is None
