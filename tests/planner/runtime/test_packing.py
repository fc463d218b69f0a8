"""Steps that pack what they keep: every bit as in eager PyTorch, in the memory that was predicted."""

from dataclasses import replace
from functools import cache

import pytest

from graphs.options.surroundings import Link, Surroundings
from graphs.schedule import Schedule
from graphs.simulate import simulate
from planner.capture.lowering.lower import Capture
from planner.capture.options import apply_options
from planner.capture.step import TrainingStep
from planner.capture.workload.models import Workload
from planner.measure.pool_memory import measure_peak
from planner.measure.tracing import capture_profiled
from planner.plans.solve import solve
from planner.runtime.executor import Executor
from planner.settings.option_settings import OptionSettings
from planner.settings.plan import PlanSettings
from tests.support.budgets import on_the_way
from tests.support.models.outcomes import assert_same, train
from tests.support.models.packed import does, mixed, packing

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
