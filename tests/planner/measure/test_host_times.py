"""How long the host takes to issue ops: measured on CUDA, and told in plans, reports and advice where it is the limit."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner.capture.signature import call
from planner.capture.trace import capture
from planner.capture.workload.models import Workload
from planner.cli.main import main
from planner.graphs.errors import GraphError
from planner.graphs.io.formats import read_graph, write_graph
from planner.graphs.ir import Graph
from planner.graphs.schedule import keep_everything
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.small import make_training_chain
from planner.graphs.units import format_ratio, format_seconds
from planner.measure.observation import OpTimer, _TimedStep
from planner.measure.steps import get_loss
from planner.plans.plan import Plan
from planner.plans.solve import judge_on, solve
from planner.runtime.executor import Executor
from planner.show.facts.step import StepFacts
from planner.show.facts.timeline import Timeline
from planner.show.report.describe import plan_text
from planner.show.report.page import render_page
from tests.support.cuda_device import cuda_device, on_device


def with_host_times(graph: Graph, host_s: float) -> Graph:
    return replace(graph, ops=tuple(replace(op, host_s=host_s) for op in graph.ops))


def small_step() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 4))
    return Workload(model, F.mse_loss, (torch.randn(8, 16), torch.randn(8, 4)))


def test_a_plan_says_that_it_is_host_bound_and_keeps_it_in_its_file(tmp_path: Path) -> None:
    fast = make_training_chain(6)
    slow = with_host_times(fast, 2 * max(op.time_s for op in fast.ops))
    budget = int(0.7 * solve(fast, "100%").peak_bytes)
    plain, plan = (solve(graph, budget, work_limit=2.0) for graph in (fast, slow))
    assert plan.schedule == plain.schedule and (plan.time_s, plan.bound_s) == (plain.time_s, plain.bound_s)
    assert plain.step_s is None and plain.host_bound == "" and "host-bound" not in str(plain)
    assert plan.step_s == simulate(slow, plan.schedule).step_s and plan.step_s > plan.time_s
    assert plan.overhead == plan.step_s / plan.graph.step_s - 1
    for text in (str(plan), plan_text(plan), render_page(StepFacts.of(Timeline(slow, plan)))):
        assert "host-bound" in text and "cuda_graph=True" in text
    plan.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert (read.step_s, read.graph.step_s, read.host_bound) == (plan.step_s, plan.graph.step_s, plan.host_bound)
    assert judge_on(fast, plan).step_s is None
    plain.save(tmp_path / "plain.json")
    assert "step_s" not in (tmp_path / "plain.json").read_text()


def test_a_host_that_is_ahead_of_the_kernels_is_not_the_limit() -> None:
    graph = make_training_chain(6)
    plan = solve(with_host_times(graph, min(op.time_s for op in graph.ops) / 1000), "100%")
    assert plan.step_s >= plan.time_s and plan.host_bound == ""


def test_a_graph_keeps_its_host_times_in_its_file(tmp_path: Path) -> None:
    graph = make_training_chain(3)
    write_graph(with_host_times(graph, 1.5e-6), tmp_path / "graph.json")
    assert all(op.host_s == 1.5e-6 for op in read_graph(tmp_path / "graph.json").ops)
    write_graph(graph, tmp_path / "graph.json")
    assert all("host_s" not in op for op in json.loads((tmp_path / "graph.json").read_text())["ops"])
    assert main(["info", str(tmp_path / "graph.json")]) == 0


def test_steps_on_the_cpu_have_no_host_times() -> None:
    graph = planner.trace(*small_step(), passes=1)
    assert not graph.has_host_times and solve(graph, "100%").step_s is None


def test_the_first_steps_correct_host_times_too() -> None:
    with cuda_device():
        workload = on_device(small_step())
        graph = planner.trace(*workload, passes=2)
        captured = capture(*workload)
        # As if each op had been measured alone ten thousand times as slow as it is in steps.
        slow = replace(captured, graph=replace(with_host_times(captured.graph, 10.0), provenance=graph.provenance))
        executor = Executor(slow, keep_everything(slow.graph), workload.model, workload.loss_fn)
        timer = OpTimer(executor, steps=2)
        for done in (False, False, True):
            get_loss(call(executor, workload.batch)).backward()
            assert timer.done is done
        corrected = timer.correct_costs(slow.graph)
    assert 0 < sum(op.host_s for op in corrected.ops) < 0.1 * len(slow.graph.ops)
    assert len({op.host_s for op in corrected.ops}) == 1
    assert simulate(corrected, executor.schedule).step_s < simulate(slow.graph, executor.schedule).step_s / 100


def test_the_time_around_the_passes_counts_for_each_schedule_alike(tmp_path: Path) -> None:
    fast = make_training_chain(6)
    graph = replace(fast, around_s=fast.time_s)
    budget = int(0.7 * solve(fast, "100%").peak_bytes)
    plain, plan = (solve(each, budget, work_limit=2.0) for each in (fast, graph))
    assert (plan.schedule, plan.time_s, plan.gap) == (plain.schedule, plain.time_s, plain.gap)
    assert plan.step_s == plan.time_s + fast.time_s and plan.graph.step_s == 2 * fast.time_s
    assert plan.overhead == pytest.approx(plain.overhead / 2) and plan.host_bound.endswith(
        "around them: a larger batch gives each more to do"
    )
    assert plan.graph.compute_overhead(plan.time_s) == pytest.approx(plan.overhead)
    assert planner.curve(graph, [budget]).rows[0].overhead == pytest.approx(plan.overhead)
    for text in (plan_text(plan), render_page(StepFacts.of(Timeline(graph, plan)))):
        assert format_seconds(plan.step_s) in text and format_ratio(plan.overhead) in text
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").graph == plan.graph
    write_graph(graph, tmp_path / "graph.json")
    assert read_graph(tmp_path / "graph.json") == graph
    with pytest.raises(GraphError, match=r"time around its ops -1\.0"):
        replace(graph, around_s=-1.0)


def test_the_time_around_the_passes_is_measured_in_steps_without_marks() -> None:
    workload = small_step()
    captured = capture(*workload)
    executor = Executor(captured, keep_everything(captured.graph), workload.model, workload.loss_fn)
    timer = OpTimer(executor, steps=2)
    steps_s = []
    for done in (False, False, True):
        start_s = time.perf_counter()
        loss = executor(*workload.batch)
        forward_s = time.perf_counter() - start_s
        time.sleep(0.01)  # in the training loop
        assert not timer.done
        start_s = time.perf_counter()
        loss.backward()
        steps_s.append(forward_s + time.perf_counter() - start_s)
        assert timer.done is done
    step = simulate(timer.correct_costs(captured.graph), executor.schedule)
    assert 0 < step.time_s < step.step_s < min(steps_s)
    assert step.step_s > 0.5 * min(steps_s)


def test_forward_passes_alone_end_the_timing() -> None:
    workload = small_step()
    captured = capture(*workload)
    executor = Executor(captured, keep_everything(captured.graph), workload.model, workload.loss_fn)
    timer = OpTimer(executor, steps=1)
    for _ in range(5):
        executor(*workload.batch)
    assert timer.done and timer.correct_costs(captured.graph).around_s == 0


def test_times_of_ops_sum_to_those_of_their_passes() -> None:
    workload = small_step()
    captured = capture(*workload)
    timer = OpTimer(Executor(captured, keep_everything(captured.graph), workload.model, workload.loss_fn), steps=2)
    # Each op is slower once. At their fastest, they sum to 6 s, and the passes of the fastest step to 7 s.
    timer._marks.passes = [[(-1, 0.0), (0, 1.0), (1, 3.0)], [(-1, 3.0), (2, 7.0)], [(-1, 9.0), (0, 11.0), (1, 12.0)]]
    timer._marks.passes.append([(-1, 20.0), (2, 25.0)])
    timer._steps = [_TimedStep([(0.0, 3.5), (5.0, 9.0)]), _TimedStep([(0.0, 3.0), (5.0, 9.0)])]
    assert timer.compute_times_s() == pytest.approx({0: 7 / 6, 1: 7 / 6, 2: 4 * 7 / 6})


def test_the_host_is_the_limit_of_small_kernels_unless_a_cuda_graph_issues_them() -> None:
    with cuda_device():
        workload = on_device(small_step())
        graph = planner.trace(*workload, passes=2)
        assert all(op.host_s > 0 for op in graph.program if op.time_s)
        step = planner.compile(*workload, budget="100%", swap="never", compare_eager=False)
        recorded = planner.compile(*workload, budget="110MB", cuda_graph=True, compare_eager=False)
    assert "host-bound" in str(step.plan) and step.plan.step_s > step.plan.time_s
    assert recorded.plan.step_s is None and "host-bound" not in str(recorded.plan)
