"""Steps that pack what they keep: every bit as in eager PyTorch, in the memory that was predicted."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from graphs.errors import InfeasibleError
from graphs.options.surroundings import Link, Surroundings
from graphs.schedule import Schedule
from graphs.simulate import simulate
from planner.capture.lowering.lower import Capture
from planner.capture.options import apply_options
from planner.capture.step import TrainingStep
from planner.capture.workload.models import Workload, build
from planner.measure.pool_memory import measure_peak
from planner.measure.tracing import capture_profiled
from planner.plans.solve import solve
from planner.runtime.executor import Executor
from planner.settings.option_settings import OptionSettings
from planner.settings.plan import PlanSettings
from solvers.bounds import bound_least_budget
from tests.support.budgets import on_the_way
from tests.support.models.outcomes import assert_same, train
from tests.support.models.packed import does, mixed, packing

KINDS = ("from_bits", "mask_drawn_again", "from_narrow", "from_places", "from_result", "of_shape")


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


def test_adaptive_pooling_is_exact() -> None:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(36, 5))
    workload = Workload(model, nn.CrossEntropyLoss(), (torch.randn(5, 3, 17, 15), torch.randint(5, (5,))))
    capture = capture_profiled(workload, PlanSettings(optimizer="adamw", passes=1, options=OptionSettings(("pack",))))
    (op,) = does(capture.graph, "of_shape")
    assert op.inputs == capture.graph.ops[op.replaces[0]].inputs[:1]
    assert_exact(capture, workload, packing(capture.graph, [op]))


def test_all_of_them_together_hold_less_between_the_passes() -> None:
    capture, workload = captured()
    graph = capture.graph
    ops = [op for kind in ("from_bits", "from_narrow", "from_places", "from_result") for op in does(graph, kind)]
    pool = next(op for op in does(graph, "of_shape") if op.name.startswith("avg_pool"))
    schedule = packing(graph, [*ops, pool])
    assert_exact(capture, workload, schedule)

    def held_bytes(schedule: Schedule) -> int:
        executor = Executor(capture, schedule, workload.model, workload.loss_fn)
        return sum(graph.tensors[t].size_bytes for t in executor.code.saved)

    names = {t.name: t.size_bytes for t in graph.tensors}
    gone = ("relu", "max_pool2d_with_indices[1]", "convolution_1", "convolution_2", "convolution_4", "native_dropout[1]", "gt")
    packed = sum(size for name, size in names.items() if "@" in name)
    assert held_bytes(packing(graph, ())) - held_bytes(schedule) >= 0.9 * (sum(names[name] for name in gone) - packed)


def test_a_mask_is_drawn_from_the_state_that_dropout_drew_from() -> None:
    """Others may have drawn since the state was saved: it is read again under the lock, where the mask is drawn first."""
    capture, workload = captured()
    graph = capture.graph
    state = next(t.id for t in graph.tensors if t.name == "native_dropout_state")
    for kind, again in (("mask_drawn_again", True), ("from_bits", False)):
        executor = Executor(capture, packing(graph, does(graph, kind)), workload.model, workload.loss_fn)
        assert (f"draw_first(t{state}, generator, own_generator, " in executor.code.source) is again


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


def test_a_net_that_pools_fits_where_recomputing_does_not() -> None:
    """The gradients of its pooling and of its ReLU read bits and bytes, instead of what is as large as what they make."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(16 * 64, 5))
    workload = Workload(model, nn.CrossEntropyLoss(), (torch.randn(8, 3, 34, 34), torch.randint(5, (8,))))
    capture = capture_profiled(workload, PlanSettings(passes=1, options=OptionSettings(("pack",))))
    below = bound_least_budget(apply_options(capture.graph, ())).budget_bytes - 1
    with pytest.raises(InfeasibleError):
        solve(capture.graph, below, work_limit=20.0)
    assert_exact(capture, workload, solve(capture.graph, below, options=["pack"], work_limit=20.0).schedule)


def test_beside_copies_to_the_host() -> None:
    capture, _ = captured()
    graph = apply_options(capture.graph, ["offload", "pack"], Surroundings(Link.even(25e9), host_bytes=10**9))
    (budget,) = on_the_way(apply_options(capture.graph, ()), 0.3)
    plan = solve(capture.graph, budget, options=["offload", "pack"], link=25e9, work_limit=20.0)
    assert plan.peak_bytes <= budget and any(op.is_transfer for op in graph.ops)
    assert simulate(graph, plan.schedule).peak_bytes == plan.peak_bytes


def test_packing_with_chunks_is_exact() -> None:
    workload = build("gpt2", layers=1, width=16, heads=2, vocab=301, seq=8, batch=4)
    capture = capture_profiled(workload, PlanSettings(passes=1, options=OptionSettings(("chunks", "pack"))))
    graph = capture.graph
    alone = apply_options(graph, ["pack"])
    assert {op.target.partition(".")[0] for op in graph.ops if op.optional} == {"chunks", "pack"}
    assert {op.target.partition(".")[0] for op in alone.ops if op.optional} == {"pack"}
    assert_exact(capture, workload, packing(graph, does(graph, "from_bits")))
