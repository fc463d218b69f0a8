"""Steps by other kernels, packed, or over what they read: bits, layouts, training, and the memory that was predicted."""

import copy
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

import planner
import planner.train.compile.compile as training
from planner.capture.lowering.lower import Capture
from planner.capture.options import apply_options, list_step_option_names
from planner.capture.options.in_place_variants import find_in_place_variant, find_out_variant
from planner.capture.options.kernels.worth import find_useless_ops
from planner.capture.options.traced import remove_useless_ops
from planner.capture.program.program import Call, Ref
from planner.capture.replay import RealStep, collect_written_tensors
from planner.capture.step import TrainingStep
from planner.capture.workload.models import Workload
from planner.graphs.errors import UsageError
from planner.graphs.ir import Phase
from planner.graphs.options import remove_options
from planner.graphs.options.surroundings import Link, Surroundings
from planner.graphs.schedule import Schedule, keep_everything
from planner.graphs.simulate import simulate
from planner.measure import run_plan, tracing
from planner.measure.pool_memory import measure_peak
from planner.measure.steps import measure_outcome
from planner.measure.tracing import capture_profiled
from planner.plans.solve import solve
from planner.runtime.executor import Executor
from planner.settings.option_settings import OptionSettings, build_option_settings
from planner.settings.plan import PlanSettings
from tests.support.budgets import between, on_the_way
from tests.support.marks import slow, slow_among
from tests.support.models.other_kernels import STEPS, ops_by, schedule_by, ways_of, with_all_ways
from tests.support.models.outcomes import assert_same, executed, may_differ, train
from tests.support.models.packed import does, mixed, packing
from tests.support.models.steps import make, random_schedule, solve_for

_WAYS = [
    ("convolutions", "channels_last"),
    ("convolutions", "native"),
    ("convolutions", "onednn"),
    ("convolutions", "weight"),
    ("convolutions", "in_place"),
    ("channels last", "contiguous"),
    ("channels last", "native"),
    ("channels last", "weight"),
    ("lines", "weight"),
    ("causal", "math"),
    ("causal", "in_place"),
    ("masked", "math"),
    ("halves", "math"),
    ("halves", "in_place"),
    ("written", "in_place"),
]

_ALIKE = {
    ("channels last", "native"),
    ("channels last", "weight"),
    ("lines", "weight"),
    ("halves", "in_place"),
    ("written", "in_place"),
}
_OPTIONS = [["kernels"], *slow(["kernels", "chunks"], ["kernels", "offload"])]


def predicted_bytes(capture: Capture, schedule: Schedule) -> int:
    """Of the peak; the gradient of the loss, which counts as there throughout, is not there yet in the forward pass."""
    found = simulate(capture.graph, schedule)
    peak = schedule.steps[found.peak_step]
    forward = capture.graph.ops[peak.op].phase is Phase.FORWARD
    tangent = next(capture.graph.tensors[source.tensor] for source in capture.program.sources if source.is_tangent)
    return found.peak_bytes - (tangent.size_bytes if forward else 0)


@pytest.mark.parametrize(("name", "way"), slow_among(_WAYS, *_ALIKE))
def test_a_step_by_other_kernels_is_the_step_but_for_rounding_in_the_memory_that_was_predicted(name: str, way: str) -> None:
    capture, workload = with_all_ways(name)
    ops = ops_by(capture.graph, way)
    assert ops
    program = replace(capture, graph=remove_options(capture.graph))
    wanted, _ = executed(program, keep_everything(program.graph), workload)
    schedule = schedule_by(capture.graph, ops)
    found, peak_bytes = executed(capture, schedule, workload)
    assert peak_bytes == predicted_bytes(capture, schedule)
    different = wanted.list_differences(found)
    assert set(different) <= set().union(*(may_differ(capture, op) for op in ops))
    for result in different:
        difference = wanted.compute_difference(result, found)
        assert difference.relative is not None and difference.relative < (2e-2 if name == "halves" else 1e-5), difference


def test_all_ways_are_tried_here() -> None:
    assert {way for _, way in _WAYS} == {way for name in STEPS for way in ways_of(with_all_ways(name)[0].graph)}


@pytest.mark.parametrize("name", STEPS)
def test_other_kernels_return_the_shapes_and_strides_of_the_program(name: str) -> None:
    capture, (model, loss_fn, batch) = with_all_ways(name)
    seen: dict[int, list[bool]] = {}

    def compare(op: int, made: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
        seen[op] = [
            (m.shape, m.stride(), m.dtype) == (w.shape, w.stride(), w.dtype)
            and m.untyped_storage().nbytes() == w.untyped_storage().nbytes() == capture.graph.tensors[t].size_bytes
            for m, w, t in zip(made, wanted, capture.graph.ops[op].outputs, strict=True)
        ]

    real = RealStep(capture, TrainingStep(model, loss_fn), batch)
    with real.preserve_state():
        ways = ((op, capture.program.calls[op.id].call) for op in capture.graph.ops if op.optional)
        real.run({op.id: Call(compare, (op.id, call, tuple(map(Ref, op.outputs)))) for op, call in ways})
    assert seen.keys() == {op.id for op in capture.graph.ops if op.optional}
    assert [capture.graph.ops[op].name for op, alike in seen.items() if not all(alike)] == []


@pytest.mark.parametrize("name", ["convolutions", "causal", "written"])
def test_three_steps_of_adamw_are_the_same_where_ways_are_exact(name: str) -> None:
    capture, workload = with_all_ways(name)
    for way in ("weight", "in_place"):
        ops = ops_by(capture.graph, way)
        assert all(op.exact for op in ops)
        assert_same(train(workload, None), train(workload, (capture, schedule_by(capture.graph, ops))))


def test_in_place_pairs_need_one_tensor_less() -> None:
    """Logits and their log-softmax are one tensor; the gradient of the one and of the other, too."""
    capture, _ = with_all_ways("causal")
    graph = capture.graph
    logits = 4 * 32 * 501 * 4
    for first, last in (("mm", "_log_softmax"), ("nll_loss_backward", "_log_softmax_backward_data")):
        (op,) = (op for op in ops_by(graph, "in_place") if graph.ops[op.replaces[0]].name == first)
        pair = [graph.ops[p] for p in op.replaces]
        assert [p.name for p in pair] == [first, last] and op.workspace_bytes < logits / 100
        assert not set(pair[0].outputs) & {*op.inputs, *op.outputs}


def test_gradients_of_a_convolution_one_at_a_time_need_not_have_its_input_beside_its_gradient() -> None:
    capture, _ = with_all_ways("convolutions")
    graph = capture.graph
    parts = {op.name: op for op in ops_by(graph, "weight")}
    whole = next(op for op in graph.program if op.name == "convolution_backward_2")
    weight, other = (parts[f"convolution_backward_2_{part}"] for part in ("weight", "input"))
    assert weight.replaces == (whole.id,) and other.replaces == ()
    assert set(other.inputs) < set(whole.inputs) and set(weight.outputs) | set(other.outputs) == set(whole.outputs)
    assert not set(weight.outputs) & set(other.outputs)


@pytest.mark.parametrize("options", _OPTIONS)
def test_plans_choose_of_them_and_run_as_they_say(options: list[str]) -> None:
    _, workload = with_all_ways("causal")
    traced = [name for name in options if name != "offload"]
    graph = tracing.trace(*workload, passes=1, options=traced)
    plain = tracing.trace(*workload, passes=1)
    budget = between(plain)
    plan = solve(graph, budget, options=options, tolerance=0.05)
    assert plan.peak_bytes <= budget
    report = run_plan.run(plan, *workload, repeats=1)
    assert report.measured_peak_bytes == plan.peak_bytes
    assert report.identical or plan.differs


@pytest.mark.slow
def test_training_takes_them_and_finds_its_plan_again(tmp_path: Path) -> None:
    _, (model, loss_fn, batch) = with_all_ways("causal")
    model = copy.deepcopy(model)
    plain = tracing.trace(model, loss_fn, batch, passes=1)
    how = {"budget": between(plain), "options": ["kernels"], "passes": 1, "cache": tmp_path, "tolerance": 0.05}
    step = training.compile(model, loss_fn, batch, **how)
    again = training.compile(model, loss_fn, batch, **how)
    assert again.plan.schedule == step.plan.schedule and again.plan.measured_peak_bytes == step.plan.measured_peak_bytes
    assert step.plan.measured_peak_bytes <= between(plain)


def test_neither_faster_nor_smaller_kernels_are_left_out() -> None:
    capture, _ = with_all_ways("convolutions")
    graph = capture.graph
    slow = {op.id for op in ops_by(graph, "native") + ops_by(graph, "channels_last")}
    ops = tuple(
        replace(op, time_s=1.0 if op.id in slow else 0.1, workspace_bytes=10**6 if op.optional else 0) for op in graph.ops
    )
    measured = replace(capture, graph=replace(graph, ops=ops))
    assert find_useless_ops(measured) >= slow
    left = remove_useless_ops(measured)
    assert [op.name for op in left.graph.ops if op.optional and op.name in {graph.ops[i].name for i in slow}] == []
    assert len(left.graph.ops) == len(left.program.calls) == len(left.nodes)
    assert set(left.graph.provenance["left_out"]) >= {graph.ops[i].name for i in slow}


def test_much_faster_kernels_are_kept() -> None:
    capture, _ = with_all_ways("convolutions")
    graph = capture.graph
    fast = {op.id for op in ops_by(graph, "native")}
    ops = tuple(replace(op, time_s=0.1 if op.id in fast else 1.0) for op in graph.ops)
    assert find_useless_ops(replace(capture, graph=replace(graph, ops=ops))).isdisjoint(fast)


KINDS = ("from_bits", "from_result")


@cache
def captured(*options: str, channels_last: bool = False) -> tuple[Capture, Workload]:
    workload = mixed(channels_last=channels_last)
    return capture_profiled(
        workload, PlanSettings(optimizer="adamw", passes=1, options=OptionSettings(("pack", *options)))
    ), workload


def assert_exact(capture: Capture, workload: Workload, schedule: Schedule) -> None:
    """What three steps leave behind is what they leave in eager PyTorch, and the peak is as predicted, to the byte."""
    assert_same(train(workload, None), train(workload, (capture, schedule)))
    model, loss_fn, batch = workload
    executor = Executor(capture, schedule, model, loss_fn)
    measured = measure_peak(capture, executor, TrainingStep(model, loss_fn), batch)
    assert measured.peak_bytes == simulate(capture.graph, schedule).peak_bytes


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_packing_is_exact(kind: str, *, channels_last: bool) -> None:
    capture, workload = captured(channels_last=channels_last)
    ops = does(capture.graph, kind)
    assert ops and all(op.exact for op in ops)
    schedule = packing(capture.graph, ops)
    assert {op.id for op in ops} <= set(schedule.computed)
    assert_exact(capture, workload, schedule)


def test_all_of_them_together_hold_less_between_the_passes() -> None:
    capture, workload = captured()
    graph = capture.graph
    schedule = packing(graph, [op for kind in KINDS for op in does(graph, kind)])
    assert_exact(capture, workload, schedule)

    def held_bytes(schedule: Schedule) -> int:
        executor = Executor(capture, schedule, workload.model, workload.loss_fn)
        return sum(graph.tensors[t].size_bytes for t in executor.code.saved)

    names = {t.name: t.size_bytes for t in graph.tensors}
    gone = ("relu", "convolution_1", "convolution_2", "native_dropout[0]")
    packed = sum(size for name, size in names.items() if "@" in name)
    assert held_bytes(packing(graph, ())) - held_bytes(schedule) == sum(names[name] for name in gone) - packed


def test_solved_plans_are_exact() -> None:
    capture, workload = captured()
    # Measured times may say that packing gains nothing.
    ops = tuple(replace(op, time_s=1e-6 if op.optional else 1e-4) for op in capture.graph.ops)
    capture = replace(capture, graph=replace(capture.graph, ops=ops))
    graph, plain = capture.graph, apply_options(capture.graph, ())
    executed = set()
    for budget in on_the_way(plain, 0.15, 0.4, 0.8):
        plan = solve(graph, budget, options=["pack"], work_limit=20.0)
        assert plan.differs == () and plan.peak_bytes <= budget
        executed.update(graph.ops[op].target for op in plan.schedule.computed if graph.ops[op].optional)
        assert_exact(capture, workload, plan.schedule)
    assert executed


def test_beside_copies_to_the_host() -> None:
    capture, _ = captured()
    graph = apply_options(capture.graph, ["offload", "pack"], Surroundings(Link.even(25e9), host_bytes=10**9))
    (budget,) = on_the_way(apply_options(capture.graph, ()), 0.3)
    plan = solve(capture.graph, budget, options=["offload", "pack"], link=25e9, work_limit=20.0)
    assert plan.peak_bytes <= budget and any(op.is_transfer for op in graph.ops)
    assert simulate(graph, plan.schedule).peak_bytes == plan.peak_bytes


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
def captured_in_place(name: str) -> tuple[Capture, Workload]:
    torch.manual_seed(7)
    workload = make(name)
    return capture_profiled(workload, PlanSettings(passes=1, options=OptionSettings(("in-place",)))), workload


@pytest.mark.parametrize("name", ["gpt2_written", "tied", "shared_gradient", "rotated", *slow("resnet18", "unet")])
def test_a_step_is_the_same_in_the_memory_that_is_predicted(name: str) -> None:
    capture, workload = captured_in_place(name)
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
    plan = planner.solve(graph, budget, options=["in-place"], tolerance=0.5)
    without = planner.solve(graph, budget, tolerance=0.5)
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
        plan = planner.solve(graph, budget, options=names, link=link, exact=True, work_limit=5.0)
        report = run_plan.run(plan, *workload, repeats=1)
        assert report.identical and not report.eager_differences
        assert report.measured_peak_bytes == plan.peak_bytes <= budget
        within, apart = (sum(simulate(each, plan.schedule).memory_bytes) for each in (offered, offered.out_of_place()))
        over += within < apart
    assert over > 0


def test_graph_traced_without_in_place_raises() -> None:
    with pytest.raises(UsageError, match="was traced without the option 'in-place'"):
        planner.solve(tracing.trace(*make("tied"), roofline="cpu"), "90%", options=["in-place"])
