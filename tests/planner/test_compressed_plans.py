"""Plans that keep tensors compressed, on real tensors: what stays exact, how large the error is, and how much memory it takes."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import planner
from benchmarks.all_compressed import compress_all
from planner.capture.lowering.lower import Capture
from planner.capture.options import apply_options
from planner.capture.step import TrainingStep
from planner.capture.workload.models import Workload, build
from planner.graphs.errors import MismatchError, PlannerError
from planner.graphs.options import remove_options
from planner.graphs.options.compress import COMPRESS, KEEP, RESTORE, VARIANCE
from planner.graphs.schedule import keep_everything
from planner.graphs.simulate import simulate
from planner.measure import run_plan, steps as measure, tracing
from planner.measure.pool_memory import measure_peak
from planner.plans.document import write_plan
from planner.plans.plan import read_plan
from planner.plans.plan_check import check_plan
from planner.plans.solve import solve
from planner.runtime.executor import Executor
from planner.settings.option_settings import OptionSettings
from planner.settings.plan import PlanSettings
from planner.train.compile.step import PlannedStep

FACTOR = 2.0  # that a measured gradient error is from the predicted one at most


@pytest.fixture(scope="module")
def workload() -> Workload:
    torch.manual_seed(0)
    return build("mlp", layers=8, width=64, batch=1024, classes=10, dropout=0.1)


@pytest.fixture(scope="module")
def captured(workload: Workload) -> Capture:
    return tracing.capture_profiled(workload, PlanSettings(passes=1, options=OptionSettings(("compress",))))


def outcome(executor: Executor, workload: Workload) -> measure.StepOutcome:
    return measure.measure_outcome(executor, workload.model, workload.batch, seed=3)


@pytest.mark.parametrize("form", ["2", "4", "8", "float8"])
def test_loss_and_random_state_are_exact_and_gradients_as_predicted(workload: Workload, captured: Capture, form: str) -> None:
    graph = apply_options(captured.graph, ["compress:1"])
    model, loss_fn, _ = workload
    schedule = compress_all(graph, form)
    planned = Executor(replace(captured, graph=graph), schedule, model, loss_fn)
    program = remove_options(captured.graph)
    keeping = Executor(replace(captured, graph=program), keep_everything(program), model, loss_fn)
    wanted, found = outcome(keeping, workload), outcome(planned, workload)
    different = wanted.list_differences(found)
    assert different and all(name.startswith("gradient of ") for name in different)
    predicted = math.sqrt(graph.used(VARIANCE, schedule.computed))
    assert predicted / FACTOR < wanted.compute_gradient_error(found) < predicted * FACTOR
    assert not found.list_differences(outcome(planned, workload))  # each time the same
    peak = measure_peak(captured, planned, TrainingStep(model, loss_fn), workload.batch).peak_bytes
    # To the byte, but for the gradient of the loss, which autograd lets go when it has been read.
    assert simulate(graph, schedule).peak_bytes - peak in (0, wanted.values["loss"].nbytes)


def test_variances_fall_with_the_bits_and_are_measured_the_same_each_time(workload: Workload, captured: Capture) -> None:
    graph = captured.graph
    assert graph.provenance["sensitivity"] == "measured"
    by_form = {form: [op.used(VARIANCE) for op in graph.ops if op.target == f"{RESTORE}.{form}"] for form in ("1", "2", "4", "8")}
    for coarse, fine in (("1", "2"), ("2", "4"), ("4", "8")):
        assert all(a > b > 0 for a, b in zip(by_form[coarse], by_form[fine], strict=True))


def test_a_solved_plan_is_lossy_where_that_pays_and_says_how_much(captured: Capture, tmp_path: Path) -> None:
    graph = captured.graph
    # Whatever this machine takes for it: keeping compressed takes no time, and computing again does.
    cheap = replace(
        graph, ops=tuple(replace(op, time_s=0.0 if op.target.startswith((KEEP, RESTORE)) else 1.0) for op in graph.ops)
    )
    program = remove_options(graph)
    peak = simulate(program, keep_everything(program)).peak_bytes
    least = simulate(apply_options(graph, ["compress:1"]), compress_all(graph, "4")).peak_bytes
    budget, graph_s = (3 * least + peak) // 4, len(program.ops)
    plans = {bits: solve(cheap, budget, options=[f"compress:{bits}"], work_limit=2) for bits in (4, 8)}
    exact = solve(cheap, budget, work_limit=2)
    assert exact.time_s > graph_s, "the budget asks for nothing"
    assert exact.gradient_error is None and not exact.differs
    for plan in plans.values():
        assert plan.peak_bytes <= budget and plan.time_s <= exact.time_s
    four = plans[4]
    assert any(said.startswith("lossy: ") for said in four.differs)
    offered = apply_options(cheap, ["compress:4"])
    assert 0 < four.gradient_error <= math.sqrt(dict(offered.limits)[VARIANCE]) * (1 + 1e-6)
    assert "gradient error" in str(four)
    check_plan(offered, four)
    path = tmp_path / "plan.json"
    write_plan(four, path)
    assert read_plan(path) == four
    with pytest.raises(MismatchError, match="gradient error"):
        check_plan(offered, replace(four, gradient_error=four.gradient_error / 2))
    # The bits are chosen tensor by tensor: a looser limit lets no plan be slower.
    assert four.time_s <= plans[8].time_s


def test_compile_with_compression_reports_and_refreshes_the_gradient_error(workload: Workload) -> None:
    model, loss_fn, batch = workload
    step = planner.compile(model, loss_fn, batch, budget="85%", options=["compress:4"], passes=1, time_limit_s=5)
    plan = step.plan
    assert plan.settings["options"] == ["compress:4"]
    assert plan.eager.gradient_error <= FACTOR * plan.gradient_error + 1e-6
    before = [op.used(VARIANCE) for op in step.measured.ops]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    step.refresh_sensitivity(*batch)
    after = [op.used(VARIANCE) for op in step.measured.ops]
    assert after != before
    assert any(op.target.startswith(f"{COMPRESS}.") for op in step.measured.ops)
    loss = step(*batch)
    loss.backward()
    report = run_plan.run(step.plan, *workload, repeats=1)
    assert report.predicted_gradient_error == step.plan.gradient_error
    assert report.measured_gradient_error <= FACTOR * step.plan.gradient_error + 1e-6
    with pytest.raises(PlannerError, match="compress:4"):
        PlannedStep(step.plan, step, None).refresh_sensitivity(*batch)
