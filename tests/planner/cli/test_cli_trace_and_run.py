"""``planner trace`` and ``planner run``: from a model to a measured step."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from graphs.io.formats import read_graph
from graphs.ir import Graph
from planner.capture.workload.models import Workload
from planner.capture.workload.workload import parse_spec
from planner.measure.run_plan import RunReport
from planner.plans.plan import read_plan
from planner.progress import LineView
from planner.settings.option_settings import OptionSettings
from planner.settings.plan import PlanSettings
from tests.support.budgets import between
from tests.support.cli import ROOT, call, chain, refused, run_report
from tests.support.marks import slow


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """In place of the modules that trace and run, one that notes what it is asked for."""
    import planner

    module = types.ModuleType("asked")
    module.calls = []

    def trace_workload(workload: Workload, settings: PlanSettings, on_progress: LineView) -> Graph:
        module.calls.append((len(workload), settings))
        return chain()

    def run(plan: object, *workload: object, on_progress: LineView, **options: object) -> RunReport:
        module.calls.append((len(workload), options))
        differences = () if options["seed"] == 0 else ("gradient of 'w'",)
        arena = {"arena_bytes": 1920, "outside_arena_bytes": 60} if options["arena"] else {}
        return run_report(identical=not differences, differences=differences, **arena)

    module.trace_workload, module.run = trace_workload, run
    for name in ("tracing", "run_plan"):
        monkeypatch.setitem(sys.modules, f"planner.measure.{name}", module)
        monkeypatch.setattr(planner.measure, name, module, raising=False)
    return module


TINY = "zoo:mlp,batch=2,layers=1,width=4,classes=3"


def test_trace_passes_its_options_on(asked: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.json"
    how = ("--optimizer", "adamw", "--accumulate", "--roofline", "h200", "--passes", "3", "--options", "chunks")
    said = call(capsys, "trace", TINY, "-o", path, *how)
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith(f"{path}: 12 ops and 0 optional ones, 13 tensors, step time 12 ms")
    assert read_graph(path) == chain()
    given = PlanSettings(
        optimizer="adamw", accumulate=True, roofline="h200", passes=3, name=TINY, options=OptionSettings(("chunks",))
    )
    assert asked.calls == [(3, given)]
    data = json.loads(call(capsys, "trace", TINY, "-o", path, "--json", "--measure-link").out)
    assert data["ops"] == 12
    assert data["output"] == str(path)
    assert asked.calls[1][1] == PlanSettings(measure_link=True, name=TINY)


def test_run_reports_and_has_a_code_for_gradients_that_differ(
    asked: Any, graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_file = tmp_path / "plan.json"
    assert call(capsys, "solve", graph_file, "--budget", "100%", "-o", plan_file).code == 0
    same = call(capsys, "run", plan_file, "--model", TINY, "--repeats", "2")
    assert (same.err, same.code) == ("", 0)
    for words in (
        "1.99 kB   1.98 kB",
        "11 ms     12 ms",
        "1.1000    1.2000",
        "within the budget of 2.00 kB",
        "identical to keeping",
    ):
        assert words in same.out
    assert asked.calls == [(3, {"repeats": 2, "seed": 0, "arena": None})]
    other = call(capsys, "run", plan_file, "--model", TINY, "--seed", "1")
    assert other.code == 6
    assert "DIFFERENT from keeping everything:\n  gradient of 'w'" in other.out
    in_arena = call(capsys, "run", plan_file, "--model", TINY, "--arena")
    assert "arena: 1.92 kB, 60 B outside" in in_arena.out
    data = json.loads(call(capsys, "run", plan_file, "--model", TINY, "--json").out)
    assert (data["identical"], data["measured_peak_bytes"], data["differences"]) == (True, 1980, [])


@pytest.mark.parametrize(
    "model",
    [f"{ROOT}/examples/own_model.py:build,batch=256,width=32,depth=3", *slow("zoo:mlp,batch=256,layers=6,width=32,classes=16")],
)
def test_from_a_model_to_a_measured_step(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph_file, plan_file = tmp_path / "model.json", tmp_path / "plan.json"
    assert call(capsys, "trace", model, "-o", graph_file, "--passes", "2").code == 0
    assert call(capsys, "info", graph_file).code == 0
    assert read_graph(graph_file).provenance["model"] == str(parse_spec(model))
    budget = f"{between(read_graph(graph_file))}B"
    assert call(capsys, "solve", graph_file, "--budget", budget, "-o", plan_file).code == 0
    ran = call(capsys, "run", plan_file, "--repeats", "2", "--json")
    assert ran.code == 0, ran.err
    data = json.loads(ran.out)
    assert data["identical"]
    assert data["measured_peak_bytes"] <= data["budget_bytes"]
    assert read_plan(plan_file).overhead > 0
    other = model.replace("batch=256", "batch=128")
    refused(call(capsys, "run", plan_file, "--model", other), 1, "the plan is for another graph", "128")


def test_a_model_of_any_size_is_traced_for_a_device_that_is_not_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph_file = tmp_path / "model.json"
    model = "zoo:mlp,layers=2,width=200000,batch=4096,classes=8"
    assert call(capsys, "trace", model, "-o", graph_file, "--roofline", "h200", "--optimizer", "adamw").code == 0
    graph = read_graph(graph_file)
    assert graph.static_bytes > 900 * 10**9  # two layers of 160 GB, and twice that for AdamW
    assert graph.static_bytes_by_kind["optimizer_state"] == 2 * graph.static_bytes_by_kind["parameter"]
    assert graph.time_s > 0
    assert call(capsys, "solve", graph_file, "--budget", "98%").code == 3
