"""``planner solve`` and ``planner info``: what they print, write, show of graphs and plans, and refuse."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.graphs.errors import PlannerError
from planner.graphs.io.formats import read_graph, write_graph
from planner.graphs.simulate import simulate
from planner.graphs.units import format_enough
from planner.plans.plan import read_plan
from tests.support.cli import call, chain, refused


def test_solve_writes_a_plan_that_fits(graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_file = tmp_path / "plan.json"
    said = call(capsys, "solve", graph_file, "--budget", "70%", "-o", plan_file)
    assert (said.code, said.err) == (0, "")
    for words in (
        "budget",
        "70.00% of the",
        "predicted peak",
        "overhead",
        "bound",
        "gap",
        "%, tolerance 0.1%",
        "optimal, by windows",
        f"written to {plan_file}",
    ):
        assert words in said.out
    plan, graph = read_plan(plan_file), read_graph(graph_file)
    simulation = simulate(graph, plan.schedule)
    assert plan.graph.fingerprint == graph.fingerprint
    assert plan.budget_bytes == int(0.7 * plan.graph.keep_everything_peak_bytes)
    assert simulation.peak_bytes == plan.peak_bytes <= plan.budget_bytes
    assert simulation.time_s == plan.time_s
    assert simulation.recomputed > 0
    assert plan.settings["tolerance"] == 0.001


def test_solve_prints_json_and_keeps_the_plan_beside_the_graph(graph_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = call(capsys, "solve", graph_file, "--budget", "100%", "--solver", "keep-everything", "--json", "--quiet")
    assert (said.code, said.err) == (0, "")
    data = json.loads(said.out)
    beside = graph_file.with_name(f"{graph_file.stem}.plan.json")
    assert (data["status"], data["output"], data["recomputed"]) == ("optimal", str(beside), 0)
    assert data["overhead"] == pytest.approx(0, abs=1e-12)
    assert data["gap"] == pytest.approx(0, abs=1e-12)
    assert data["predicted_peak_bytes"] == data["budget_bytes"]
    assert set(graph_file.parent.iterdir()) == {graph_file, beside}
    assert read_plan(beside).graph.fingerprint == read_graph(graph_file).fingerprint


def test_a_plan_beside_the_graph_replaces_a_plan_and_nothing_else(graph_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    beside = graph_file.with_name(f"{graph_file.stem}.plan.json")
    for budget in ("100%", "80%"):
        assert f"written to {beside}" in call(capsys, "solve", graph_file, "--budget", budget).out
        assert read_plan(beside).budget_bytes <= read_plan(beside).graph.keep_everything_peak_bytes
    kept = read_plan(beside).budget_bytes
    assert kept == int(0.8 * read_plan(beside).graph.keep_everything_peak_bytes)
    for text in ("notes", graph_file.read_text()):
        beside.write_text(text)
        said = call(capsys, "solve", graph_file, "--budget", "80%")
        refused(said, 2, str(beside), "holds something else: name a file with -o")
        assert beside.read_text() == text


def test_a_work_limit_gives_the_same_plan_each_time(graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans = []
    for name in ("one.json", "two.json"):
        asked = ["solve", graph_file, "--budget", "70%", "--work-limit", "5", "-o", tmp_path / name]
        assert call(capsys, *asked).code == 0
        plans.append(json.loads((tmp_path / name).read_text()) | {"seconds": 0})
    assert plans[0] == plans[1]
    assert plans[0]["settings"]["work_limit"] == 5.0
    assert "first_slice" not in call(capsys, "info", tmp_path / "one.json").out  # parameters are for machines
    beaten = call(capsys, "solve", graph_file, "--budget", "70%", "--work-limit", "5", "--solver", "checkmate")
    refused(beaten, 1, "solvers that PuLP calls cannot be limited by work", "use the solver windows")


def test_solve_says_when_nothing_fits(graph_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = "budget 2.00 kB is below", "op 'op", "Raise the budget", "planner info"
    refused(call(capsys, "solve", graph_file, "--budget", "2kB"), 3, *said)
    limit = call(capsys, "solve", graph_file, "--budget", "90%", "--solver", "keep-everything")
    refused(limit, 4, "keeping everything needs")
    assert list(graph_file.parent.iterdir()) == [graph_file]


@pytest.mark.parametrize("name", ["info", "solve"])
def test_a_broken_file_is_one_line(name: str, graph_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph_file.write_text(graph_file.read_text()[:300])
    more = ["--budget", "60%"] if name == "solve" else []
    refused(call(capsys, name, graph_file, *more), 1, f"{graph_file}: the file is cut short")
    refused(call(capsys, name, graph_file.parent / "none.json", *more), 1, "there is no such file")


def test_a_message_of_many_lines_is_printed_in_one(
    graph_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PlannerError("one\ntwo")

    monkeypatch.setattr("planner.plans.solve.solve", fail)
    refused(call(capsys, "solve", graph_file, "--budget", "60%"), 1, "one two")


def test_a_max_overhead_finds_the_budget(graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_file = tmp_path / "plan.json"
    said = call(capsys, "solve", graph_file, "--max-overhead", "10%", "--work-limit", "10", "-o", plan_file)
    assert said.code == 0
    plan = read_plan(plan_file)
    assert 0 < plan.overhead <= 0.1
    assert plan.peak_bytes == plan.budget_bytes < plan.graph.keep_everything_peak_bytes
    assert "at max overhead" in said.out and "10.00%: proved to need no less than" in said.out
    refused(
        call(capsys, "solve", graph_file, "--max-overhead", "10%", "--solver", "checkmate", "--write-model", "x.lp"),
        2,
        "--budget",
    )


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


def test_info_says_that_its_time_limit_cut_the_searches_short(
    graph_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.memory.least_budget._remembered", {})
    said = "1 ms, which cut the searches for least budgets short: a longer --time-limit may find less"
    assert said in call(capsys, "info", graph_file, "--time-limit", "0.001").out
    assert "time limit" not in call(capsys, "info", graph_file).out


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
