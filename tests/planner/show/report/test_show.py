"""What a plan does, shown: the figures add up, and the page is whole and self-contained. A browser opens it elsewhere."""

import json
import math
import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from markupsafe import escape

import planner
from graphs.errors import OutputError, PlannerError
from graphs.io.formats import write_graph
from graphs.ir import Graph, Phase
from graphs.schedule import Compute, keep_everything
from graphs.simulate import simulate
from graphs.synthetic.small import make_training_chain
from graphs.units import format_bytes
from planner.capture.workload.models import build
from planner.cli.main import main
from planner.plans.document import write_plan
from planner.plans.plan import Plan
from planner.plans.solve import solve
from planner.show.facts.addresses import compute_reserved_addresses, plan_addresses
from planner.show.facts.baselines import build_baselines
from planner.show.facts.columns import compute_memory_columns
from planner.show.facts.lifetimes import compute_lifetimes
from planner.show.facts.step import StepFacts
from planner.show.facts.timeline import Timeline, block
from planner.show.report.chrome_trace import build_chrome_trace
from planner.show.report.lanes import RECOMPUTED, list_bars
from planner.show.report.page import render_page
from tests.support.report import assert_needs_nothing_else, parsed, without_scripts

HOSTILE = "</title><script>alert('x')</script>&\x1b[31m"


def graph(module: str = "model.h.{}.mlp", model: str = "chain") -> Graph:
    """A chain whose ops belong to blocks."""
    plain = make_training_chain(8)
    ops = tuple(replace(op, module=module.format(op.id % 4), target="aten.relu.default") for op in plain.ops)
    return Graph(ops, plain.tensors, plain.kept, {"model": model})


def plan(of: Graph) -> Plan:
    return solve(of, "100%" if "device" in of.provenance else "60%")


@pytest.fixture
def timeline() -> Timeline:
    return Timeline(graph(), plan(graph()))


def test_page_figures_add_up(timeline: Timeline) -> None:
    assert len(timeline.executions) == len(timeline.plan.schedule.computed)
    assert (
        timeline.peak.memory_bytes == timeline.plan.peak_bytes == max(compute_memory_columns(timeline, timeline.graph.pools[0]))
    )
    in_use = sum(one.tensor.size_bytes for one in timeline.held) + timeline.graph.static_bytes
    assert in_use + timeline.peak.op.workspace_bytes == timeline.plan.peak_bytes
    overhead_s = timeline.plan.time_s - timeline.graph.time_s
    assert overhead_s > 0
    assert math.isclose(sum(burst.time_s for burst in timeline.bursts), overhead_s)
    assert math.isclose(sum(cost.time_s for cost in timeline.module_costs), overhead_s)
    again = [bar for bar in list_bars(timeline) if bar.lane == RECOMPUTED]
    assert math.isclose(sum(bar.end_s - bar.start_s for bar in again), overhead_s)
    assert sum(burst.ops for burst in timeline.bursts) == len(timeline.executions) - len(timeline.graph.ops)
    assert {cost.module for cost in timeline.module_costs} <= {f"h.{i}" for i in range(4)}
    assert all(burst.reader is not None and burst.reader.phase is Phase.BACKWARD for burst in timeline.bursts)
    sizes = [one.tensor.size_bytes for one in timeline.held]
    assert sizes == sorted(sizes, reverse=True)


def test_bytes_saved_by_module_are_the_memory_below_keeping_everything(timeline: Timeline) -> None:
    kept = build_baselines(timeline.graph, timeline.plan)[0]
    until = keep_everything(timeline.graph).steps[: simulate(timeline.graph, keep_everything(timeline.graph)).peak_step + 1]
    peak_op = until[-1].op if isinstance(until[-1], Compute) else -1
    there = next(execution.memory_bytes for execution in timeline.executions if execution.op.id == peak_op)
    saved = sum(cost.saved_bytes for cost in timeline.module_costs)
    assert 0 < saved == kept.peak_bytes - there
    text = re.sub(r"<[^>]*>", " ", without_scripts(render_page(StepFacts.of(timeline))))
    assert all(format_bytes(cost.saved_bytes) in text for cost in timeline.module_costs)


def test_modelled_times_are_called_modelled() -> None:
    measured = graph()
    modelled = replace(measured, provenance={**measured.provenance, "times": "modelled", "device": "h200"})
    plain, said = (without_scripts(render_page(StepFacts.of(Timeline(shown, plan(shown))))) for shown in (measured, modelled))
    assert "modelled" not in plain and "Step time, predicted" in plain
    assert "All times on this page are modelled for h200, not measured." in said
    assert "Step time, modelled" in said and "Overhead, modelled" in said


def test_a_graph_without_times_is_drawn_evenly() -> None:
    timed = graph()
    untimed = Graph(tuple(replace(op, time_s=0.0) for op in timed.ops), timed.tensors, timed.kept)
    timeline = Timeline(untimed, solve(untimed, "60%"))
    assert max(compute_memory_columns(timeline, timeline.graph.pools[0])) == timeline.plan.peak_bytes
    assert_needs_nothing_else(render_page(StepFacts.of(timeline)))


def test_moments_and_lives_add_up_to_the_simulated_memory(timeline: Timeline) -> None:
    found = compute_lifetimes(timeline)
    peak = max(found.moments, key=lambda moment: moment.size_bytes)
    assert peak.size_bytes == timeline.plan.peak_bytes and peak.op == timeline.peak.op
    for index, moment in enumerate(found.moments):
        live_bytes = sum(life.tensor.size_bytes for life in found.lives if life.born <= index < life.dies)
        workspace_bytes = 0 if moment.op is None else moment.op.workspace_bytes
        assert timeline.graph.static_bytes + live_bytes + workspace_bytes == moment.size_bytes
    assert len(found.lives) == sum(len(execution.op.outputs) for execution in timeline.executions)
    assert all(life.born < life.dies for life in found.lives)


def test_page_shows_reserved_memory_for_cuda_devices() -> None:
    shown = graph()
    on_device = replace(shown, provenance={**shown.provenance, "device": "h200"})
    assert compute_reserved_addresses(Timeline(shown, plan(shown))) is None
    # All tensors are of some bytes, and share the small segment of 2 MiB that the first of them reserves.
    small = plan(on_device)
    found = compute_reserved_addresses(Timeline(on_device, small))
    assert found.by_step == (2 * 2**20,) * len(small.schedule.steps) and found.borders == (0,)
    large = replace(on_device, tensors=tuple(replace(t, size_bytes=12 * 2**20) for t in on_device.tensors))
    timeline = Timeline(large, plan(large))
    addresses = compute_reserved_addresses(timeline)
    assert all(held <= now for held, now in zip(timeline.simulation.memory_bytes, addresses.by_step, strict=True))
    assert addresses.by_step[-1] == addresses.total_bytes == timeline.plan.reserved_bytes == timeline.plan.peak_bytes
    text = without_scripts(render_page(StepFacts.of(timeline))).replace("&#39;", "'")
    assert "reserved by PyTorch's caching allocator in the third step" in text
    assert "Budget, reserved" in text and f"{format_bytes(addresses.total_bytes)} reserved" in text
    assert "as PyTorch's caching allocator puts them" in text and "as they could be planned in one arena" in text


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_addresses_of_tensors_in_memory_at_once_do_not_overlap(device: str) -> None:
    shown = replace(graph(), provenance={"device": device})
    shown = replace(shown, tensors=tuple(replace(t, size_bytes=(t.id % 3 + 1) * 2**20) for t in shown.tensors))
    timeline = Timeline(shown, solve(shown, "100%"))
    drawn = [plan_addresses(timeline), *([found] if (found := compute_reserved_addresses(timeline)) is not None else [])]
    assert len(drawn) == (1 if device == "cpu" else 2)
    for addresses in drawn:
        assert {stay.tensor for stay in addresses.stays} == {tensor.name for tensor in shown.tensors}
        for number, one in enumerate(addresses.stays):
            assert 0 <= one.address <= addresses.total_bytes - one.size_bytes
            for other in addresses.stays[:number]:
                apart = one.address >= other.address + other.size_bytes or other.address >= one.address + one.size_bytes
                assert apart or one.end_step <= other.first_step or other.end_step <= one.first_step


def test_the_arena_of_a_plan_on_cuda_is_shown() -> None:
    shown = replace(graph(), provenance={"device": "h200"})
    shown = replace(shown, tensors=tuple(replace(t, size_bytes=(t.id % 3 + 2) * 2**20) for t in shown.tensors))
    timeline = Timeline(shown, solve(shown, "100%", arena=True))
    found = compute_reserved_addresses(timeline)
    assert (found.total_bytes, found.borders, found.by_step) == (timeline.plan.arena_bytes, (), ())
    assert {stay.tensor for stay in found.stays} == {tensor.name for tensor in shown.tensors}
    text = without_scripts(render_page(StepFacts.of(timeline)))
    assert "as they are planned in the arena of the step" in text and "as they could be planned" not in text
    assert "reserved by PyTorch" not in text
    events = json.loads(build_chrome_trace(timeline, found))["traceEvents"]
    begins = [event for event in events if event["ph"] == "b"]
    assert len(begins) == len(found.stays)


def test_the_trace_has_the_address_of_each_buffer_on_cuda() -> None:
    shown = replace(graph(), provenance={"device": "h200"})
    timeline = Timeline(shown, plan(shown))
    addresses = compute_reserved_addresses(timeline)
    events = json.loads(build_chrome_trace(timeline, compute_reserved_addresses(timeline)))["traceEvents"]
    begins = [event for event in events if event["ph"] == "b"]
    assert [event["args"]["address"] for event in begins] == [stay.address for stay in addresses.stays]
    assert len([event for event in events if event["ph"] == "e"]) == len(begins)
    assert {event["args"]["bytes"] for event in events if event["name"] == "reserved"} == {2 * 2**20}


def test_recomputations_link_to_their_readers(timeline: Timeline) -> None:
    again = [bar for bar in list_bars(timeline) if bar.lane == RECOMPUTED]
    starts = {execution.op.name: execution.start_s for execution in timeline.executions if not execution.again}
    assert again
    for bar in again:
        reader = bar.purpose.removeprefix("for ").split(",")[0]
        assert bar.reader_s == starts[reader] >= bar.end_s


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("model.h.3.attn.out", "h.3"),
        ("model.encoder.layers.0", "encoder.layers.0"),
        ("model.head", "head"),
        ("", ""),
        ("fc1", "fc1"),
    ],
)
def test_modules_belong_to_blocks(module: str, name: str) -> None:
    assert block(module) == name


@pytest.mark.parametrize("model", ["chain", HOSTILE])
def test_the_page_is_whole_and_needs_nothing_else(model: str) -> None:
    shown = graph(module=model, model=model)
    text = render_page(StepFacts.of(Timeline(shown, plan(shown))))
    assert_needs_nothing_else(text)
    assert escape(model.replace("\x1b", "\\x1b")) in text


def test_page_states_recomputations_peak_and_fingerprint(timeline: Timeline) -> None:
    text = re.sub(r"<[^>]*>", " ", without_scripts(render_page(StepFacts.of(timeline))))
    assert f"{len(timeline.executions) - len(timeline.graph.ops)} of {len(timeline.executions)} executions" in text
    assert timeline.peak.op.name in text
    assert timeline.graph.fingerprint in text
    keeping = Timeline(timeline.graph, solve(timeline.graph, "100%"))
    assert "None: all saved tensors stay in memory" in render_page(StepFacts.of(keeping))


def test_missing_bokeh_prints_the_install_command(
    files: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("bokeh.document", "bokeh.events", "bokeh.models"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["show", files[0], "--graph", files[1], "-o", str(tmp_path / "report.html")]) == 1
    assert capsys.readouterr().err == ("planner: error: the report page needs Bokeh: pip install 'remat-planner[plots]'\n")


def test_a_curve_is_shown_with_the_budget_of_the_plan(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curve, html = tmp_path / "curve.csv", tmp_path / "report.html"
    assert main(["curve", files[1], "--budgets", "3", "-o", str(curve), "--quiet"]) == 0
    show = ["show", files[0], "--graph", files[1], "-o", str(html), "--curve"]
    assert main([*show, str(curve)]) == 0
    assert "Overhead against budget" in html.read_text()
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    assert main([*show, str(tmp_path / "other.csv")]) == 1
    assert "is not a curve that planner curve -o wrote" in capsys.readouterr().err


def test_the_trace_holds_every_execution(timeline: Timeline) -> None:
    trace = json.loads(build_chrome_trace(timeline, compute_reserved_addresses(timeline)))
    runs = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in runs] == [execution.op.name for execution in timeline.executions]
    assert math.isclose(sum(event["dur"] for event in runs), 1e6 * timeline.plan.time_s)
    assert all(math.isclose(b["ts"], a["ts"] + a["dur"]) for a, b in pairwise(runs))
    memory = [event["args"]["bytes"] for event in trace["traceEvents"] if event["ph"] == "C"]
    assert max(memory) == timeline.plan.peak_bytes == trace["otherData"]["peak_bytes"]
    again = {event["tid"] for event, execution in zip(runs, timeline.executions, strict=True) if execution.again}
    first = {event["tid"] for event, execution in zip(runs, timeline.executions, strict=True) if not execution.again}
    assert again and not again & first


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    write_graph(graph(), tmp_path / "model.json")
    write_plan(plan(graph()), tmp_path / "plan.json")
    return str(tmp_path / "plan.json"), str(tmp_path / "model.json")


def test_show_command_writes_page_and_trace(files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html, trace = tmp_path / "report.html", tmp_path / "trace.json"
    assert main(["show", files[0], "--graph", files[1], "-o", str(html), "--trace", str(trace)]) == 0
    assert html.read_text().startswith("<!DOCTYPE html>")
    assert "traceEvents" in json.loads(trace.read_text())
    assert f"written to {html}\nwritten to {trace}" in capsys.readouterr().out
    assert main(["show", files[0], "--graph", files[1], "-o", str(html), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"output": str(html), "trace": None}


def test_a_plan_finds_its_graph_wherever_both_are_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "here" / "plans").mkdir(parents=True)
    write_graph(graph(), tmp_path / "here" / "model.json")
    solved = ["solve", str(tmp_path / "here" / "model.json"), "--budget", "60%", "--quiet"]
    assert main([*solved, "-o", str(tmp_path / "here" / "plans" / "plan.json")]) == 0
    moved, html = (tmp_path / "here").rename(tmp_path / "there"), tmp_path / "report.html"
    show = ["show", str(moved / "plans" / "plan.json"), "-o", str(html)]
    assert main(show) == 0
    assert html.read_text().startswith("<!DOCTYPE html>")

    written = parsed(html.read_text()).rows
    write_graph(make_training_chain(5), moved / "model.json")
    assert main(show) == 1
    assert "the plan is for another graph" in capsys.readouterr().err
    (moved / "model.json").unlink()
    assert main(show) == 2
    assert f"was in {moved / 'plans' / '..' / 'model.json'}, where there is no file now" in capsys.readouterr().err
    write_graph(graph(), tmp_path / "kept.json")
    assert main([*show, "--graph", str(tmp_path / "kept.json")]) == 0
    assert parsed(html.read_text()).rows == written


def test_a_plan_that_names_no_graph_needs_one(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", files[0], "-o", "report.html"]) == 2
    assert "does not say where its graph is: name what it was solved for (--graph model.json)" in capsys.readouterr().err


def test_a_compiled_step_is_shown_without_a_file(tmp_path: Path) -> None:
    workload = build("mlp", batch=8, layers=3, width=16, classes=3)
    html, trace, kept = tmp_path / "report.html", tmp_path / "trace.json", tmp_path / "kept"
    step = planner.compile(*workload, budget="100%", passes=1, cache=kept)
    step.report(html, trace=trace)
    assert step.plan.graph.fingerprint in html.read_text()
    assert repr(step) == f"PlannedStep({step.plan!r})" and str(step).startswith(str(step.plan))
    assert "<svg" in step._repr_html_()
    assert json.loads(trace.read_text())["otherData"]["budget_bytes"] == step.plan.budget_bytes
    with pytest.raises(OutputError, match="there is no folder"):
        step.report(tmp_path / "no" / "report.html")
    with pytest.raises(PlannerError, match="loaded from a cache, and its ops were not measured"):
        planner.compile(*workload, budget="100%", passes=1, cache=kept).report(html)
