"""What a plan does, shown: figures that add up, a whole and self-contained page, copies and waits where the clocks have them."""

import json
import math
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from bokeh.models import Span
from markupsafe import escape

import planner
from planner.capture.options import apply_options
from planner.capture.workload.models import build
from planner.cli.main import main
from planner.graphs.clocks import find_passages
from planner.graphs.errors import OutputError, PlannerError
from planner.graphs.io.formats import write_graph
from planner.graphs.ir import Graph, Phase
from planner.graphs.options.surroundings import Link, Surroundings
from planner.graphs.pools import COMPUTE, DEVICE, DEVICE_TO_HOST, HOST, HOST_TO_DEVICE
from planner.graphs.schedule import Compute, keep_everything
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.small import make_training_chain
from planner.graphs.units import format_bytes
from planner.plans.document import write_plan
from planner.plans.plan import Plan
from planner.plans.solve import solve
from planner.show.facts import step as step_module, timeline as timeline_module
from planner.show.facts.addresses import compute_reserved_addresses, plan_addresses
from planner.show.facts.baselines import build_baselines
from planner.show.facts.columns import COLUMNS, compute_memory_columns, count_left_bytes, list_stretches
from planner.show.facts.lifetimes import compute_lifetimes
from planner.show.facts.step import StepFacts
from planner.show.facts.streams import list_offloads, list_streams, list_waits
from planner.show.facts.timeline import Timeline, block
from planner.show.report.chart import draw_charts
from planner.show.report.chrome_trace import build_chrome_trace
from planner.show.report.lanes import RECOMPUTED, list_bars, list_lanes
from planner.show.report.page import render_page
from tests.support.graphs.event_judge import during, live, runs
from tests.support.graphs.random_choices import graph_with_choices, schedule_with_choices
from tests.support.report import ROUND_TRIP, assert_needs_nothing_else, chain, parsed, plan_of, solved, without_scripts

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
    assert "other.csv holds no points of a curve: planner curve model.json -o curve.csv writes one" in capsys.readouterr().err


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


_IDS = re.compile(r'id="[^"]*"')  # that Bokeh draws anew for each page


@pytest.fixture
def trip() -> Timeline:
    return chain()


def test_waits_of_the_compute_stream_are_reported(trip: Timeline) -> None:
    first, second = list_waits(trip, COMPUTE)
    assert (first.start_s, first.end_s, first.awaited.op.name) == (2, 3, "copy_f1_device_to_host")
    assert (second.start_s, second.end_s, second.awaited.op.name) == (7, 8, "copy_f1_host_to_device")
    assert first.following is trip.graph.tensors[0]
    assert second.following is trip.graph.ops[6] and second.following.name == "g2"
    # The host's memory goes when the copy back has read it: its owner, the stream out, is there until 8.
    assert [(w.start_s, w.end_s) for w in list_waits(trip, DEVICE_TO_HOST)] == [(0, 1), (3, 8), (8, 10)]


def test_wait_names_the_copy_it_depends_on() -> None:
    # At 8 the copy of f1 has come in, which g2 reads, and that of g4 has gone out, which was issued later.
    trip = chain(ROUND_TRIP.replace("<f1 g3 -f2 -g4", "<f1 >g4 g3 -f2"))
    assert [(e.op.name, e.end_s) for e in trip.executions if e.end_s == 8] == [
        ("copy_f1_host_to_device", 8),
        ("copy_g4_device_to_host", 8),
    ]
    assert list_waits(trip, COMPUTE)[-1].awaited.op.name == "copy_f1_host_to_device"


def test_the_computation_waits_for_the_last_copy() -> None:
    trip = chain(f"{ROUND_TRIP} >g2")
    last = list_waits(trip, COMPUTE)[-1]
    assert (last.start_s, last.end_s, last.awaited.op.name, last.following) == (10, 11, "copy_g2_device_to_host", None)
    assert ["10 s", "1 s", "copy_g2_device_to_host", "the end of the step"] in parsed(render_page(StepFacts.of(trip))).rows


def test_a_copy_that_is_made_anew_is_another_trip() -> None:
    trip = chain("f1 >f1 -f1@host >f1 f2 -f1 f3 f4 g4 -f3 -f4 <f1 -f1 <f1 g3 -f2 -g4 g2 g1")
    assert [(offload.out.start_s, [e.end_s for e in offload.back]) for offload in list_offloads(trip)] == [
        (1, []),
        (3, [10, 12]),
    ]
    # Copies are made again, and nothing is computed again.
    assert not any(execution.again for execution in trip.executions)
    assert "0 of 8 executions are recomputations. 4 more are on other streams" in render_page(StepFacts.of(trip))
    assert ["1 B", "f1", "synthetic", "host", "3 s", "10 s, 12 s"] in parsed(render_page(StepFacts.of(trip))).rows


def test_streams_report_executions_busy_time_and_bytes(trip: Timeline) -> None:
    found = {s.name: (len(s.executions), s.busy_s, s.made_bytes) for s in list_streams(trip)}
    assert found == {COMPUTE: (8, 8, 8), DEVICE_TO_HOST: (1, 2, 1), HOST_TO_DEVICE: (1, 2, 1)}
    assert not any(execution.again for execution in trip.executions)
    (offload,) = list_offloads(trip)
    assert (offload.tensor.name, offload.copy.name, offload.out.start_s) == ("f1", "f1@host", 1)
    assert [execution.end_s for execution in offload.back] == [8]


def test_stretches_report_bytes_in_each_pool(trip: Timeline) -> None:
    device, host = trip.graph.pools
    found = [(s.start_s, s.end_s, s.size_bytes) for s in list_stretches(trip, host)]
    assert found == [(0, 1, 0), (1, 3, 1), (3, 8, 1), (8, 10, 0)]
    # f1; f1 f2, until the copy is out; f2 f3; f2 f3 f4; g4 too; the memory of f1 is taken when f3 and f4 are gone, beside f2
    # and g4; g3 too; f1 and g3 while the computation waits; g2 too; g2 and g1.
    found = [(s.start_s, s.end_s, s.size_bytes) for s in list_stretches(trip, device)]
    assert found == [
        *((0, 1, 1), (1, 2, 2), (2, 3, 2), (3, 4, 2), (4, 5, 3), (5, 6, 4), (6, 6, 3), (6, 7, 4)),
        *((7, 8, 2), (8, 9, 3), (9, 10, 2)),
    ]
    assert count_left_bytes(trip, device) == 2 and count_left_bytes(trip, host) == 0
    tenth = COLUMNS // 10
    assert compute_memory_columns(trip, host, 10) == [0, 1, 1, 1, 1, 1, 1, 1, 1, 0]
    assert compute_memory_columns(trip, device)[7 * tenth + 1 : 8 * tenth] == [2] * (tenth - 1)


def test_tensors_at_the_peak_are_held_since_their_allocation() -> None:
    # Out 1-3 and 3-5, for which memory waits; in 7-9 and 9-11, both issued at 7; g3 waits for f2.
    script = "f1 >f1 f2 >f2 f3 -f1 -f2 f4 g4 {} g3 -f2 -g4 g2 g1"
    trip = chain(script.format("-f3 -f4 <f1 <f2"), works="g3")
    assert trip.peak.op.name == "g3" and trip.plan.peak_bytes == 5
    assert {one.tensor.name: one.since_s for one in trip.held} == {"f1": 7, "f2": 7, "g4": 6, "g3": 11}
    assert "5 B at 11 s, while <b>g3</b> runs: 0 B static memory, 4 B in 4 tensors of the step, 1 B of workspace" in render_page(
        StepFacts.of(trip)
    )
    issued = render_page(StepFacts.of(chain(script.format("<f1 <f2 -f3 -f4"))))
    assert (
        "5 B at 7 s, while <b>copy_f2_host_to_device</b> is issued: 0 B static memory, 5 B in 5 tensors of the step, 0 B of work"
        in issued
    )


def test_bars_are_where_the_clocks_have_them(trip: Timeline) -> None:
    found = [(bar.lane, bar.start_s, bar.end_s, bar.title, bar.said, bar.purpose, bar.reader_s) for bar in list_bars(trip)]
    assert found == [
        ("device to host", 1, 3, "copy_f1_device_to_host", "1 B in 2 s", "for g2, synthetic, at 8 s", 8),
        ("host to device", 6, 8, "copy_f1_host_to_device", "1 B in 2 s", "for g2, synthetic, at 8 s", 8),
        ("wait", 2, 3, "waits for copy_f1_device_to_host", "1 s", "before memory of f1 goes", None),
        ("wait", 7, 8, "waits for copy_f1_host_to_device", "1 s", "before g2", None),
    ]
    assert list_lanes(trip, list_bars(trip)) == ("wait", "device to host", "host to device")


def test_the_page_has_the_sums(trip: Timeline) -> None:
    text = render_page(StepFacts.of(trip))
    rows = parsed(text).rows
    assert ["device to host", "1", "1 B", "2 s", "20.00%", ""] in rows
    assert ["host to device", "1", "1 B", "2 s", "20.00%", ""] in rows
    assert ["2 s", "1 s", "copy_f1_device_to_host", "memory of f1 goes"] in rows
    assert ["7 s", "1 s", "copy_f1_host_to_device", "g2"] in rows
    assert ["1 B", "f1", "synthetic", "host", "1 s", "8 s"] in rows
    assert "0 of 8 executions are recomputations. 2 more are on other streams, and the computation waits 2 s (20.00% of" in text
    assert "The computation waits 2 s (20.00% of the step), at 2 places. Host memory: at most 1 B, of 2 B." in text
    assert "all saved tensors stay in memory or are reloaded" in text
    assert "host memory: at most 1 B, without a limit" in render_page(StepFacts.of(chain(host_bytes=None)))


def test_a_capacity_that_is_near_is_drawn() -> None:
    drawn = [draw_charts(StepFacts.of(chain(host_bytes=size))).document.get_model_by_name("pool0") for size in (4, 5)]
    assert [len(plot.select(type=Span)) for plot in drawn] == [1, 0]


@pytest.mark.parametrize("name", ["f1", HOSTILE])
def test_pages_of_streams_are_whole_and_need_nothing_else(name: str) -> None:
    assert_needs_nothing_else(render_page(StepFacts.of(chain(name=name))))


def test_a_plan_that_copies_nothing_has_the_page_of_a_graph_without_streams() -> None:
    plain = make_training_chain(4)
    offered = apply_options(plain, ["offload"], Surroundings(Link.even(1.0), 10))
    text, as_ever = (
        render_page(StepFacts.of(Timeline(graph, plan_of(graph, keep_everything(plain))))) for graph in (offered, plain)
    )
    assert "Other streams" not in as_ever
    shown, plainly = (_IDS.sub("", without_scripts(one)) for one in (text, as_ever))
    assert shown.replace(offered.fingerprint, plain.fingerprint) == plainly


def test_held_tensors_report_their_offload() -> None:
    graph, plan = solved()
    trip = Timeline(apply_options(graph, ["offload"], Surroundings(Link.even(10e9), 10**12)), plan)
    rows = parsed(render_page(StepFacts.of(trip))).rows
    header = next(row for row in rows if row[-1] == "elsewhere")
    held = rows[rows.index(header) + 1 :]
    gone = {offload.tensor.name for offload in list_offloads(trip)}
    assert 0 < len(held) <= 15 and all(len(row) == len(header) for row in held)
    assert all(row[-1].startswith("to host at ") == (row[1] in gone) for row in held)
    assert any(row[-1] for row in held) and not all(row[-1] for row in held)


def test_the_trace_has_a_row_for_each_stream_and_a_counter_for_each_memory(trip: Timeline) -> None:
    events = json.loads(build_chrome_trace(trip, compute_reserved_addresses(trip)))["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(rows.values())[-3:] == ["compute: waiting", DEVICE_TO_HOST, HOST_TO_DEVICE]
    assert len(set(rows)) == len(rows) == 7
    ran = {(rows[e["tid"]], e["name"]): (e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["ph"] == "X"}
    assert ran[DEVICE_TO_HOST, "copy_f1_device_to_host"] == (1, 2)
    assert ran[HOST_TO_DEVICE, "copy_f1_host_to_device"] == (6, 2)
    assert ran["compute: waiting", "waits for copy_f1_host_to_device"] == (7, 1)
    assert ran["compute: forward", "f4"] == (4, 1) and ran["compute: backward", "g1"] == (9, 1)
    assert len(ran) == len(trip.executions) + 2
    assert next(e for e in events if e["name"] == "copy_f1_host_to_device")["args"]["made_bytes"] == 1
    counts = {
        name: [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["name"] == name]
        for name in ("memory of host", "memory")
    }
    assert counts["memory of host"] == [0, 1, 1, 0, 0]
    assert max(counts["memory"]) == trip.plan.peak_bytes and counts["memory"][-1] == 2


def drawn(monkeypatch: pytest.MonkeyPatch, count: int) -> Iterator[Timeline]:
    """Random schedules on two streams or three, with copies, stand-ins and several memories."""
    # Plans are for graphs that a solver knows; these have all choices that there can be.
    monkeypatch.setattr(timeline_module, "check_plan", lambda graph, plan: simulate(graph, plan.schedule))
    small = make_training_chain(3)
    other = plan_of(small, keep_everything(small))
    for seed in range(count):
        draw = random.Random(seed)
        graph = graph_with_choices(draw)
        schedule = schedule_with_choices(draw, graph)
        if runs(graph, schedule.steps):
            yield Timeline(graph, replace(other, schedule=schedule))


@pytest.mark.slow
def test_timeline_matches_the_judge_on_random_streams_and_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = 0
    small = make_training_chain(3)
    # These programs are on several streams and in several memories: keeping everything and the baselines are not made for them.
    monkeypatch.setattr(Timeline, "dropped", frozenset())
    monkeypatch.setattr(step_module, "build_baselines", lambda graph, plan: build_baselines(small, plan))
    for trip in drawn(monkeypatch, 60):
        graph, steps = trip.graph, trip.plan.schedule.steps
        for stream in list_streams(trip):
            found = list_waits(trip, stream.name)
            busy = sorted((*((e.start_s, e.end_s) for e in stream.executions), *((w.start_s, w.end_s) for w in found)))
            assert all(after[0] == before[1] for before, after in pairwise(busy))
            assert math.isclose(stream.busy_s + sum(wait.time_s for wait in found), trip.time_s)
            assert all(wait.time_s > 0 and wait.awaited.end_s == wait.end_s for wait in found)
            assert all(wait.awaited.op.stream != stream.name for wait in found)
            seen += len(found)
        for pool, peak_bytes in zip(graph.pools, trip.simulation.pool_peaks_bytes, strict=True):
            held = list_stretches(trip, pool)
            assert max(stretch.size_bytes for stretch in held) == peak_bytes
            assert held[0].start_s == 0 and held[-1].end_s == max(trip.clocks.clocks_s)
            assert all(before.end_s == after.start_s for before, after in pairwise(held))
            # By the judge of the tests: what is there in between, and during what runs.
            own = find_passages(graph, trip.plan.schedule, trip.clocks, pool.owner)
            expected, now_s = set(), 0.0
            for k, (start_s, end_s) in enumerate(own):
                if start_s > now_s:
                    left = (graph.tensors[t] for t in live(graph, steps[:k]))
                    expected.add((now_s, start_s, sum(t.size_bytes for t in left if t.pool == pool.name)))
                if isinstance(steps[k], Compute) and end_s > start_s:
                    expected.add((start_s, end_s, during(graph, steps, k, pool.name)))
                now_s = end_s
            assert expected <= {(s.start_s, s.end_s, s.size_bytes) for s in held}
        lives = compute_lifetimes(trip)
        assert all(lives.moments[lives.at_step[execution.step]].op is execution.op for execution in trip.computed)
        done: set[int] = set()
        for execution in trip.executions:
            places = {p.id for p in graph.program if p.id in (execution.op.id, *execution.op.replaces)}
            assert execution.again == (bool(places) and places <= done)
            done |= places
        at_peak = trip.peak
        held_bytes = sum(
            graph.tensors[t].size_bytes for t in live(graph, steps[: at_peak.step]) if graph.tensors[t].pool == DEVICE
        )
        made_bytes = sum(graph.tensors[t].size_bytes for t in at_peak.op.outputs if graph.tensors[t].pool == DEVICE)
        if seen > 60:  # a page takes a third of a second
            continue
        text = render_page(StepFacts.of(trip))
        assert f" {trip.simulation.peak_bytes - held_bytes - made_bytes} B of workspace" in text
        assert_needs_nothing_else(text)
        assert {e["name"] for e in json.loads(build_chrome_trace(trip, compute_reserved_addresses(trip)))["traceEvents"]} >= {
            "memory",
            "memory of host",
        }
    assert seen > 100


@pytest.mark.slow
def test_the_command_shows_such_plans(tmp_path: Path) -> None:
    graph, plan = solved()
    graph_file, plan_file, html, trace = (tmp_path / name for name in ("model.json", "plan.json", "report.html", "trace.json"))
    write_graph(graph, graph_file)
    write_plan(replace(plan, graph_file="model.json"), plan_file)
    assert main(["show", str(plan_file), "-o", str(html), "--trace", str(trace)]) == 0
    rows = parsed(html.read_text()).rows
    copies = [row for row in rows if row[0] in ("device to host", "host to device")]
    assert sum(int(row[1]) for row in copies) == plan.copied > 0
    counts = [e["args"]["bytes"] for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "memory of host"]
    assert max(counts) == plan.pool_peaks_bytes[HOST]
    # The same where the graph in the file offers it already.
    offered = apply_options(graph, ["offload"], Surroundings(Link.even(10e9), 10**12))
    write_graph(offered, graph_file)
    write_plan(replace(plan, settings=replace(plan.settings, options={})), plan_file)
    assert main(["show", str(plan_file), "--graph", str(graph_file), "-o", str(html)]) == 0
    assert parsed(html.read_text()).rows == rows


def test_the_device_is_shown_as_ever(trip: Timeline) -> None:
    assert trip.graph.pools[0].name == DEVICE
    assert max(compute_memory_columns(trip, trip.graph.pools[0])) == trip.plan.peak_bytes == trip.peak.memory_bytes
