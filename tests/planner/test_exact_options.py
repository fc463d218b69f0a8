"""Of the options that are named, only ops that differ in not a bit."""

from dataclasses import replace
from pathlib import Path

import pytest

from graphs.errors import MismatchError, PlannerError
from graphs.io.formats import write_graph
from graphs.ir import Graph
from planner import solve
from planner.capture.options.traced import replace_graph
from planner.capture.workload.models import Workload
from planner.measure import run_plan, tracing
from planner.plans.document import write_plan
from planner.plans.plan import read_plan
from planner.plans.plan_check import check_plan
from planner.settings.option_settings import apply_recorded_options, build_option_settings
from planner.settings.plan import PlanSettings
from tests.support.cli import call, refused
from tests.support.models.alternatives import make


@pytest.fixture(scope="module")
def workload() -> Workload:
    return make("smoothed")


@pytest.fixture(scope="module")
def graph(workload: Workload) -> Graph:
    """Traced, as on a machine where the backward passes in 4 and 8 chunks came out exact."""
    found = tracing.trace(*workload, passes=1, options=["chunks"])
    exact = [op.name for op in found.ops if op.optional and "backward" in op.target and op.target.endswith((".4", ".8"))]
    ops = (replace(op, differs="" if op.name in exact else op.differs or "rounding") if op.optional else op for op in found.ops)
    return replace(found, ops=tuple(ops))


def test_only_exact_ops_are_offered_and_the_plan_says_which(graph: Graph, tmp_path: Path) -> None:
    plan = solve(graph, "100%", options=["chunks"], exact=True, tolerance=0.5)
    held = apply_recorded_options(graph, plan.settings)
    optional = [op for op in held.ops if op.optional]
    assert [op.target for op in optional] == [
        f"chunks.{kind}.{count}" for kind in ("backward", "backward_kept") for count in (4, 8)
    ]
    assert plan.settings["exact"] == [op.name for op in optional]
    assert plan.graph.optional_ops == 4 and plan.differs == ()
    check_plan(held, plan)
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    with pytest.raises(MismatchError, match="the exact ops 'all', which no solve records"):
        apply_recorded_options(graph, {**plan.settings, "exact": "all"})
    assert "exact" not in solve(graph, "100%", options=["chunks"], tolerance=0.5).settings


def test_exact_plan_runs_on_a_recaptured_step(graph: Graph, workload: Workload) -> None:
    """Nothing is compared then: which ops were exact is what the plan says."""
    plan = solve(graph, "100%", options=["chunks"], exact=True, tolerance=0.5)
    report = run_plan.run(plan, *workload, repeats=1)
    assert report.measured_peak_bytes <= plan.budget_bytes


def test_calls_go_with_the_ops_that_are_left(graph: Graph, workload: Workload) -> None:
    captured = tracing.restore_recorded(tracing.capture_step(workload, PlanSettings()), graph.provenance, ["chunks"])
    names = [op.name for op in graph.ops if op.optional and op.exact]
    held = replace_graph(captured, apply_recorded_options(captured.graph, {"options": ["chunks"], "exact": names}))
    before = dict(zip((op.name for op in captured.graph.ops), captured.program.calls, strict=True))
    assert [before[op.name].outputs for op in held.graph.ops] == [c.outputs for c in held.program.calls]
    assert all(before[op.name].composed is call.composed for op, call in zip(held.graph.ops, held.program.calls, strict=True))


def test_exact_without_an_option_raises() -> None:
    with pytest.raises(PlannerError, match=r"exact is given, but no option .*--options chunks"):
        build_option_settings([], exact=True)
    assert build_option_settings(["chunks"], exact=True).as_json == {"options": ["chunks"], "exact": True}


def test_commands_accept_exact(graph: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, plan = tmp_path / "model.json", tmp_path / "plan.json"
    write_graph(graph, model)
    assert any(line.split() == ["optional", "ops", "4"] for line in call(capsys, "info", model, "--exact").out.splitlines())
    done = call(
        capsys, "solve", model, "--budget", "100%", "--options", "chunks", "--exact", "--tolerance", "50%", "--quiet", "-o", plan
    )
    assert done.code == 0 and len(read_plan(plan).settings["exact"]) == 4
    refused(call(capsys, "solve", model, "--budget", "100%", "--exact"), 2, "exact is given", "--options chunks")
    refused(call(capsys, "info", plan, "--exact"), 2, "--exact selects optional ops of a graph")
