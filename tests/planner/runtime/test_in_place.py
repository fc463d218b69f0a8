"""Ops that write over what they read: the same bits, in the memory that the judge says."""

import re
from functools import cache

import pytest
import torch

from graphs.errors import UsageError
from graphs.schedule import keep_everything
from graphs.simulate import simulate
from planner import solve
from planner.capture.lowering.lower import Capture
from planner.capture.options import apply_options, list_step_option_names
from planner.capture.options.in_place_variants import find_in_place_variant, find_out_variant
from planner.capture.replay import collect_written_tensors
from planner.capture.step import TrainingStep
from planner.capture.workload.models import Workload
from planner.measure import run_plan, tracing
from planner.measure.steps import measure_outcome
from planner.measure.tracing import capture_profiled
from planner.runtime.executor import Executor
from planner.settings.option_settings import OptionSettings, build_option_settings
from planner.settings.plan import PlanSettings
from tests.support.budgets import on_the_way
from tests.support.marks import slow
from tests.support.models.outcomes import executed
from tests.support.models.steps import make, random_schedule, solve_for

aten = torch.ops.aten
# Operators by what they are called with: x is written over, y is as large, c is a row of it, m a mask.
CALLS = {
    aten.add.Tensor: ("x", "y"),
    aten.sub.Tensor: ("x", "c"),
    aten.mul.Tensor: ("x", "x"),
    aten.leaky_relu.default: ("x", 0.3),
    aten.div.Tensor: ("c", "x"),
    aten.pow.Tensor_Scalar: ("x", 2),
    aten.neg.default: ("x",),
    aten.tanh.default: ("x",),
    aten.sigmoid.default: ("x",),
    aten.silu.default: ("x",),
    aten.gelu.default: ("x",),
    aten.relu.default: ("x",),
    aten.threshold_backward.default: ("x", "y", 0),
    aten.gelu_backward.default: ("x", "y"),
    aten.silu_backward.default: ("y", "x"),
    aten.tanh_backward.default: ("x", "y"),
    aten.sigmoid_backward.default: ("y", "x"),
    aten.where.self: ("m", "x", "y"),
    aten.masked_fill.Scalar: ("x", "m", -1.5),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", CALLS, ids=str)
def test_in_place_operators_equal_out_of_place_ones(target: torch._ops.OpOverload, dtype: torch.dtype) -> None:
    for shape in ((1, 1), (3, 5), (7, 129), (33, 1021)):
        torch.manual_seed(shape[1])
        x, y, c = (torch.randn(size).to(dtype) for size in (shape, shape, shape[1:]))
        given = {"x": x, "y": y, "c": c, "m": torch.rand(shape) < 0.5}
        wanted = target(*(given.get(a, a) for a in CALLS[target]))
        given["x"] = over = x.clone()
        args = [given.get(a, a) for a in CALLS[target]]
        if (out := find_out_variant(target)) is not None:
            found = out[0](*args, **{out[1]: over})
        else:
            variant = find_in_place_variant(target)
            assert CALLS[target][0] == "x"
            found = variant(*args)
        assert found.data_ptr() == over.data_ptr()
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


def test_a_product_with_a_number_which_rounds_otherwise_in_place_has_no_variant() -> None:
    assert find_out_variant(aten.mul.Scalar) is None and find_in_place_variant(aten.mul.Scalar) is None


@cache
def captured(name: str) -> tuple[Capture, Workload]:
    torch.manual_seed(7)
    workload = make(name)
    return capture_profiled(workload, PlanSettings(passes=1, options=OptionSettings(("in-place",)))), workload


@pytest.mark.parametrize("name", ["gpt2_written", "tied", "shared_gradient", "rotated", *slow("resnet18", "unet")])
def test_a_step_is_the_same_in_the_memory_that_is_predicted(name: str) -> None:
    capture, workload = captured(name)
    model, loss_fn, batch = workload
    step = TrainingStep(model, loss_fn)
    eager = measure_outcome(step, model, batch, seed=0, written=collect_written_tensors(capture, step, batch))
    graph = capture.graph
    assert any(op.overwrites for op in graph.ops)
    schedules = [keep_everything(graph), *(random_schedule(graph, seed) for seed in range(2))]
    schedules += [solve_for(0.0, graph, budget).schedule for budget in on_the_way(graph, 0.5, 0.1)]
    over = 0
    for schedule in schedules:
        found, peak_bytes = executed(capture, schedule, workload)
        assert not eager.list_differences(found)
        assert peak_bytes == simulate(graph, schedule).peak_bytes
        over += len(re.findall(r"out=t|\w_\w+\(t", Executor(capture, schedule, model, loss_fn).code.source))
    assert over > 0


@pytest.mark.slow
def test_plan_runs_at_its_solved_peak_and_percentages_refer_to_eager() -> None:
    workload = make("unet")
    graph = tracing.trace(*workload, passes=1, options=["in-place"])
    (budget,) = on_the_way(graph.out_of_place(), 0.2)
    plan = solve(graph, budget, options=["in-place"], tolerance=0.5)
    without = solve(graph, budget, tolerance=0.5)
    eager, in_place = (simulate(each, keep_everything(graph)) for each in (graph.out_of_place(), graph))
    assert plan.graph.keep_everything_peak_bytes == without.graph.keep_everything_peak_bytes == eager.peak_bytes
    assert sum(in_place.memory_bytes) < sum(eager.memory_bytes)
    for solved in (plan, without):
        report = run_plan.run(solved, *workload, repeats=1)
        assert report.identical and not report.eager_differences
        assert report.measured_peak_bytes == solved.peak_bytes <= budget


@pytest.mark.slow
@pytest.mark.parametrize("others", [("offload",), ("chunks", "kernels", "offload"), ("kernels", "offload")])
def test_plans_with_other_choices_are_run_in_the_memory_that_is_predicted(others: tuple[str, ...]) -> None:
    workload = make("unet" if "chunks" not in others else "gpt2_written")
    names = ["in-place", *others]
    graph = tracing.trace(*workload, passes=1, options=list_step_option_names(names))
    link = 25e9 if "offload" in others else None
    offered = build_option_settings(names, link, exact=True).apply(graph)
    over = 0
    for budget in on_the_way(apply_options(graph, ()), 0.15, 0.5):
        plan = solve(graph, budget, options=names, link=link, exact=True, work_limit=5.0)
        report = run_plan.run(plan, *workload, repeats=1)
        assert report.identical and not report.eager_differences
        assert report.measured_peak_bytes == plan.peak_bytes <= budget
        within, apart = (sum(simulate(each, plan.schedule).memory_bytes) for each in (offered, offered.out_of_place()))
        over += within < apart
    assert over > 0


def test_graph_traced_without_in_place_raises() -> None:
    with pytest.raises(UsageError, match="was traced without the option 'in-place'"):
        solve(tracing.trace(*make("tied"), roofline="cpu"), "90%", options=["in-place"])
