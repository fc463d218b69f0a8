"""What a plan does beside the computation, shown: copies, waits and other memories are where the clocks have them."""

import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from bokeh.models import Span

from graphs.clocks import find_passages
from graphs.io.formats import write_graph
from graphs.options.surroundings import Link, Surroundings
from graphs.pools import COMPUTE, DEVICE, DEVICE_TO_HOST, HOST, HOST_TO_DEVICE
from graphs.schedule import Compute, keep_everything
from graphs.simulate import simulate
from graphs.synthetic.small import make_training_chain
from planner.capture.options import apply_options
from planner.cli.main import main
from planner.plans.document import write_plan
from planner.show.facts import step as step_module, timeline as timeline_module
from planner.show.facts.addresses import compute_reserved_addresses
from planner.show.facts.baselines import build_baselines
from planner.show.facts.columns import COLUMNS, compute_memory_columns, count_left_bytes, list_stretches
from planner.show.facts.lifetimes import compute_lifetimes
from planner.show.facts.step import StepFacts
from planner.show.facts.streams import list_offloads, list_streams, list_waits
from planner.show.facts.timeline import Timeline
from planner.show.report.chart import draw_charts
from planner.show.report.chrome_trace import build_chrome_trace
from planner.show.report.lanes import list_bars, list_lanes
from planner.show.report.page import render_page
from tests.support.graphs.event_judge import during, live, runs
from tests.support.graphs.random_choices import graph_with_choices, schedule_with_choices
from tests.support.report import ROUND_TRIP, assert_needs_nothing_else, chain, parsed, plan_of, solved, without_scripts

_IDS = re.compile(r'id="[^"]*"')  # that Bokeh draws anew for each page
HOSTILE = "</title><script>alert('x')</script>&\x1b[31m"


@pytest.fixture
def timeline() -> Timeline:
    return chain()


def test_waits_of_the_compute_stream_are_reported(timeline: Timeline) -> None:
    first, second = list_waits(timeline, COMPUTE)
    assert (first.start_s, first.end_s, first.awaited.op.name) == (2, 3, "copy_f1_device_to_host")
    assert (second.start_s, second.end_s, second.awaited.op.name) == (7, 8, "copy_f1_host_to_device")
    assert first.following is timeline.graph.tensors[0]
    assert second.following is timeline.graph.ops[6] and second.following.name == "g2"
    # The host's memory goes when the copy back has read it: its owner, the stream out, is there until 8.
    assert [(w.start_s, w.end_s) for w in list_waits(timeline, DEVICE_TO_HOST)] == [(0, 1), (3, 8), (8, 10)]


def test_wait_names_the_copy_it_depends_on() -> None:
    # At 8 the copy of f1 has come in, which g2 reads, and that of g4 has gone out, which was issued later.
    timeline = chain(ROUND_TRIP.replace("<f1 g3 -f2 -g4", "<f1 >g4 g3 -f2"))
    assert [(e.op.name, e.end_s) for e in timeline.executions if e.end_s == 8] == [
        ("copy_f1_host_to_device", 8),
        ("copy_g4_device_to_host", 8),
    ]
    assert list_waits(timeline, COMPUTE)[-1].awaited.op.name == "copy_f1_host_to_device"


def test_the_computation_waits_for_the_last_copy() -> None:
    timeline = chain(f"{ROUND_TRIP} >g2")
    last = list_waits(timeline, COMPUTE)[-1]
    assert (last.start_s, last.end_s, last.awaited.op.name, last.following) == (10, 11, "copy_g2_device_to_host", None)
    assert ["10 s", "1 s", "copy_g2_device_to_host", "the end of the step"] in parsed(render_page(StepFacts.of(timeline))).rows


def test_a_copy_that_is_made_anew_is_another_trip() -> None:
    timeline = chain("f1 >f1 -f1@host >f1 f2 -f1 f3 f4 g4 -f3 -f4 <f1 -f1 <f1 g3 -f2 -g4 g2 g1")
    assert [(offload.out.start_s, [e.end_s for e in offload.back]) for offload in list_offloads(timeline)] == [
        (1, []),
        (3, [10, 12]),
    ]
    # Copies are made again, and nothing is computed again.
    assert not any(execution.again for execution in timeline.executions)
    assert "0 of 8 executions are recomputations. 4 more are on other streams" in render_page(StepFacts.of(timeline))
    assert ["1 B", "f1", "synthetic", "host", "3 s", "10 s, 12 s"] in parsed(render_page(StepFacts.of(timeline))).rows


def test_streams_report_executions_busy_time_and_bytes(timeline: Timeline) -> None:
    found = {s.name: (len(s.executions), s.busy_s, s.made_bytes) for s in list_streams(timeline)}
    assert found == {COMPUTE: (8, 8, 8), DEVICE_TO_HOST: (1, 2, 1), HOST_TO_DEVICE: (1, 2, 1)}
    assert not any(execution.again for execution in timeline.executions)
    (offload,) = list_offloads(timeline)
    assert (offload.tensor.name, offload.copy.name, offload.out.start_s) == ("f1", "f1@host", 1)
    assert [execution.end_s for execution in offload.back] == [8]


def test_stretches_report_bytes_in_each_pool(timeline: Timeline) -> None:
    device, host = timeline.graph.pools
    found = [(s.start_s, s.end_s, s.size_bytes) for s in list_stretches(timeline, host)]
    assert found == [(0, 1, 0), (1, 3, 1), (3, 8, 1), (8, 10, 0)]
    # f1; f1 f2, until the copy is out; f2 f3; f2 f3 f4; g4 too; the memory of f1 is taken when f3 and f4 are gone, beside f2
    # and g4; g3 too; f1 and g3 while the computation waits; g2 too; g2 and g1.
    found = [(s.start_s, s.end_s, s.size_bytes) for s in list_stretches(timeline, device)]
    assert found == [
        *((0, 1, 1), (1, 2, 2), (2, 3, 2), (3, 4, 2), (4, 5, 3), (5, 6, 4), (6, 6, 3), (6, 7, 4)),
        *((7, 8, 2), (8, 9, 3), (9, 10, 2)),
    ]
    assert count_left_bytes(timeline, device) == 2 and count_left_bytes(timeline, host) == 0
    tenth = COLUMNS // 10
    assert compute_memory_columns(timeline, host, 10) == [0, 1, 1, 1, 1, 1, 1, 1, 1, 0]
    assert compute_memory_columns(timeline, device)[7 * tenth + 1 : 8 * tenth] == [2] * (tenth - 1)


def test_tensors_at_the_peak_are_held_since_their_allocation() -> None:
    # Out 1-3 and 3-5, for which memory waits; in 7-9 and 9-11, both issued at 7; g3 waits for f2.
    script = "f1 >f1 f2 >f2 f3 -f1 -f2 f4 g4 {} g3 -f2 -g4 g2 g1"
    timeline = chain(script.format("-f3 -f4 <f1 <f2"), works="g3")
    assert timeline.peak.op.name == "g3" and timeline.plan.peak_bytes == 5
    assert {one.tensor.name: one.since_s for one in timeline.held} == {"f1": 7, "f2": 7, "g4": 6, "g3": 11}
    assert "5 B at 11 s, while <b>g3</b> runs: 0 B static memory, 4 B in 4 tensors of the step, 1 B of workspace" in render_page(
        StepFacts.of(timeline)
    )
    issued = render_page(StepFacts.of(chain(script.format("<f1 <f2 -f3 -f4"))))
    assert (
        "5 B at 7 s, while <b>copy_f2_host_to_device</b> is issued: 0 B static memory, 5 B in 5 tensors of the step, 0 B of work"
        in issued
    )


def test_bars_are_where_the_clocks_have_them(timeline: Timeline) -> None:
    found = [(bar.lane, bar.start_s, bar.end_s, bar.title, bar.said, bar.purpose, bar.reader_s) for bar in list_bars(timeline)]
    assert found == [
        ("device to host", 1, 3, "copy_f1_device_to_host", "1 B in 2 s", "for g2, synthetic, at 8 s", 8),
        ("host to device", 6, 8, "copy_f1_host_to_device", "1 B in 2 s", "for g2, synthetic, at 8 s", 8),
        ("wait", 2, 3, "waits for copy_f1_device_to_host", "1 s", "before memory of f1 goes", None),
        ("wait", 7, 8, "waits for copy_f1_host_to_device", "1 s", "before g2", None),
    ]
    assert list_lanes(timeline, list_bars(timeline)) == ("wait", "device to host", "host to device")


def test_the_page_has_the_sums(timeline: Timeline) -> None:
    text = render_page(StepFacts.of(timeline))
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
def test_the_page_is_whole_and_needs_nothing_else(name: str) -> None:
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
    timeline = Timeline(apply_options(graph, ["offload"], Surroundings(Link.even(10e9), 10**12)), plan)
    rows = parsed(render_page(StepFacts.of(timeline))).rows
    header = next(row for row in rows if row[-1] == "elsewhere")
    held = rows[rows.index(header) + 1 :]
    gone = {offload.tensor.name for offload in list_offloads(timeline)}
    assert 0 < len(held) <= 15 and all(len(row) == len(header) for row in held)
    assert all(row[-1].startswith("to host at ") == (row[1] in gone) for row in held)
    assert any(row[-1] for row in held) and not all(row[-1] for row in held)


def test_the_trace_has_a_row_for_each_stream_and_a_counter_for_each_memory(timeline: Timeline) -> None:
    events = json.loads(build_chrome_trace(timeline, compute_reserved_addresses(timeline)))["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(rows.values())[-3:] == ["compute: waiting", DEVICE_TO_HOST, HOST_TO_DEVICE]
    assert len(set(rows)) == len(rows) == 7
    ran = {(rows[e["tid"]], e["name"]): (e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["ph"] == "X"}
    assert ran[DEVICE_TO_HOST, "copy_f1_device_to_host"] == (1, 2)
    assert ran[HOST_TO_DEVICE, "copy_f1_host_to_device"] == (6, 2)
    assert ran["compute: waiting", "waits for copy_f1_host_to_device"] == (7, 1)
    assert ran["compute: forward", "f4"] == (4, 1) and ran["compute: backward", "g1"] == (9, 1)
    assert len(ran) == len(timeline.executions) + 2
    assert next(e for e in events if e["name"] == "copy_f1_host_to_device")["args"]["made_bytes"] == 1
    counts = {
        name: [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["name"] == name]
        for name in ("memory of host", "memory")
    }
    assert counts["memory of host"] == [0, 1, 1, 0, 0]
    assert max(counts["memory"]) == timeline.plan.peak_bytes and counts["memory"][-1] == 2


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
    for timeline in drawn(monkeypatch, 60):
        graph, steps = timeline.graph, timeline.plan.schedule.steps
        for stream in list_streams(timeline):
            found = list_waits(timeline, stream.name)
            busy = sorted((*((e.start_s, e.end_s) for e in stream.executions), *((w.start_s, w.end_s) for w in found)))
            assert all(after[0] == before[1] for before, after in pairwise(busy))
            assert math.isclose(stream.busy_s + sum(wait.time_s for wait in found), timeline.time_s)
            assert all(wait.time_s > 0 and wait.awaited.end_s == wait.end_s for wait in found)
            assert all(wait.awaited.op.stream != stream.name for wait in found)
            seen += len(found)
        for pool, peak_bytes in zip(graph.pools, timeline.simulation.pool_peaks_bytes, strict=True):
            held = list_stretches(timeline, pool)
            assert max(stretch.size_bytes for stretch in held) == peak_bytes
            assert held[0].start_s == 0 and held[-1].end_s == max(timeline.clocks.clocks_s)
            assert all(before.end_s == after.start_s for before, after in pairwise(held))
            # By the judge of the tests: what is there in between, and during what runs.
            own = find_passages(graph, timeline.plan.schedule, timeline.clocks, pool.owner)
            expected, now_s = set(), 0.0
            for k, (start_s, end_s) in enumerate(own):
                if start_s > now_s:
                    left = (graph.tensors[t] for t in live(graph, steps[:k]))
                    expected.add((now_s, start_s, sum(t.size_bytes for t in left if t.pool == pool.name)))
                if isinstance(steps[k], Compute) and end_s > start_s:
                    expected.add((start_s, end_s, during(graph, steps, k, pool.name)))
                now_s = end_s
            assert expected <= {(s.start_s, s.end_s, s.size_bytes) for s in held}
        lives = compute_lifetimes(timeline)
        assert all(lives.moments[lives.at_step[execution.step]].op is execution.op for execution in timeline.computed)
        done: set[int] = set()
        for execution in timeline.executions:
            places = {p.id for p in graph.program if p.id in (execution.op.id, *execution.op.replaces)}
            assert execution.again == (bool(places) and places <= done)
            done |= places
        at_peak = timeline.peak
        held_bytes = sum(
            graph.tensors[t].size_bytes for t in live(graph, steps[: at_peak.step]) if graph.tensors[t].pool == DEVICE
        )
        made_bytes = sum(graph.tensors[t].size_bytes for t in at_peak.op.outputs if graph.tensors[t].pool == DEVICE)
        if seen > 60:  # a page takes a third of a second
            continue
        text = render_page(StepFacts.of(timeline))
        assert f" {timeline.simulation.peak_bytes - held_bytes - made_bytes} B of workspace" in text
        assert_needs_nothing_else(text)
        assert {
            e["name"] for e in json.loads(build_chrome_trace(timeline, compute_reserved_addresses(timeline)))["traceEvents"]
        } >= {
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
    asked = {name for name in plan.settings if name not in ("options", "link_bytes_per_s", "host_budget_bytes")}
    write_plan(replace(plan, settings={name: plan.settings[name] for name in asked}), plan_file)
    assert main(["show", str(plan_file), "--graph", str(graph_file), "-o", str(html)]) == 0
    assert parsed(html.read_text()).rows == rows


def test_the_device_is_shown_as_ever(timeline: Timeline) -> None:
    assert timeline.graph.pools[0].name == DEVICE
    assert (
        max(compute_memory_columns(timeline, timeline.graph.pools[0])) == timeline.plan.peak_bytes == timeline.peak.memory_bytes
    )
