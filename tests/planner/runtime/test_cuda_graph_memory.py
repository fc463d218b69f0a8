"""Recorded steps hold and allocate what was counted, within the budget; on a stand-in for CUDA, and on a GPU with ``-m gpu``."""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import planner
from graphs.errors import InfeasibleError
from graphs.ir import Kind
from graphs.schedule import keep_everything
from graphs.units import format_bytes
from planner.capture.step import TrainingStep
from planner.capture.trace import capture
from planner.capture.workload.models import Workload, build
from planner.measure.tracing import profile_capture
from planner.plans.document import plan_to_dict
from planner.plans.plan import Plan, plan_from_dict
from planner.runtime.cuda.cuda_graph import CudaGraphs
from planner.runtime.cuda.graph_pool import compute_pool_bytes
from planner.runtime.cuda.graphed_step import prepare_for_recording, record
from planner.runtime.executor import Executor
from planner.runtime.libraries import get_workspaces, warm_up_libraries
from planner.settings.budget import read_budget
from planner.settings.counted_memory import CountedMemory
from planner.settings.plan import PlanSettings
from planner.train.compile.compiler import Compiler
from planner.train.compile.step import PlannedStep
from planner.train.distributed.ranks import SingleProcess
from planner.train.distributed.wrappers import Unwrapped
from solvers.tolerance import Tolerance
from tests.support.cuda_device import Order, cuda_device, on_device
from tests.support.cuda_device.steps import dropout_and_norm, recorded, train
from tests.support.marks import slow
from tests.support.models.outcomes import assert_same
from tests.support.models.steps import make, random_schedule

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

MIB = 2**20


@pytest.mark.usefixtures("_stand_in")
def test_step_inputs_and_outputs_are_counted_twice() -> None:
    workload = dropout_and_norm()
    plain = capture(*workload)
    captured = prepare_for_recording(plain)
    inputs = sum(allocated(value.nbytes) for value in workload.batch)
    trained = sum(allocated(p.nbytes) for p in workload.model.parameters())
    loss = allocated(4)
    added = captured.graph.static_bytes - plain.graph.static_bytes
    assert added == inputs + loss + loss + trained  # inputs, the loss's gradient, the loss, gradients
    by_kind = captured.graph.static_bytes_by_kind
    assert by_kind[Kind.GRADIENT] == trained and by_kind[Kind.OUTPUT] == loss


def allocated(size_bytes: int) -> int:
    return -(-size_bytes // 512) * 512


@pytest.mark.usefixtures("_cuda")
def test_replayed_step_allocates_the_counted_bytes() -> None:
    workload = dropout_and_norm()
    by_kind = prepare_for_recording(capture(*workload)).graph.static_bytes_by_kind
    step = recorded(workload)
    for _ in range(2):
        for parameter in workload.model.parameters():
            parameter.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = step(*workload.batch)
        loss.backward()
        peak = torch.cuda.max_memory_allocated() - before
        del loss
    # And the gradient of the loss, by autograd.
    assert peak == by_kind[Kind.GRADIENT] + by_kind[Kind.OUTPUT] + allocated(4)


@pytest.mark.parametrize("name", ["gpt2_written", "mutated", *slow("resnet18")])
@pytest.mark.parametrize("seed", [1, *slow(None)])
@pytest.mark.usefixtures("_cuda")
def test_cuda_graph_pool_holds_the_predicted_bytes(name: str, seed: int | None) -> None:
    workload = on_device(make(name))
    device = next(workload.model.parameters()).device
    warm_up_libraries(device)
    step = TrainingStep(workload.model, workload.loss_fn)
    captured = profile_capture(prepare_for_recording(capture(*workload)), workload, PlanSettings(passes=1))
    schedule = random_schedule(captured.graph, seed) if seed else keep_everything(captured.graph)
    recorder = CudaGraphs(device)
    executor = Executor(captured, schedule, workload.model, workload.loss_fn)
    record(captured, executor, step, workload.batch, recorder)
    predicted = compute_pool_bytes(captured.graph, schedule, get_workspaces(device))
    # A workspace that a pass does not use is not in the pool.
    assert predicted - 2 * MIB <= recorder.count_held_bytes() <= predicted
    assert predicted >= sum(get_workspaces(device))


def solved(workload: Workload, budget: str | int, recorder: Callable[[], CudaGraphs]) -> PlannedStep:
    """The step within `budget`."""
    settings = PlanSettings(
        optimizer="adamw",
        passes=1,
        tolerance=Tolerance.of(0.05),
        time_limit_s=60.0,
        memory=CountedMemory.ALLOCATED,
        swap="never",
    )
    making = Compiler(Unwrapped(workload.model, SingleProcess()), workload.loss_fn, settings, recorder)
    return making.make(making.capture(workload.batch), workload.batch, read_budget(budget))


def budget_with_pool(workload: Workload) -> int:
    """Half way from the least to the peak of keeping everything, and what a pool takes besides its tensors."""
    captured = profile_capture(prepare_for_recording(capture(*workload, optimizer="adamw")), workload, PlanSettings(passes=1))
    device = next(workload.model.parameters()).device
    held_bytes = compute_pool_bytes(captured.graph, keep_everything(captured.graph), get_workspaces(device))
    return captured.graph.static_bytes + held_bytes


class LosesMemory(CudaGraphs):
    """Its first pool holds more than was predicted."""

    made: list["weakref.ref[LosesMemory]"]

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        assert all(before() is None for before in self.made)  # two recordings are never held
        self._lost = 0 if self.made else 100_000
        self.made.append(weakref.ref(self))

    def count_held_bytes(self) -> int:
        return super().count_held_bytes() + self._lost


@pytest.mark.usefixtures("_stand_in")
def test_budget_covers_memory_kept_by_the_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    workload, other = on_device(make("gpt2_written")), on_device(make("gpt2_written"))
    device = next(workload.model.parameters()).device
    monkeypatch.setattr(LosesMemory, "made", [], raising=False)
    budget = budget_with_pool(workload)
    gc.collect()
    gc.disable()
    try:
        step = solved(workload, budget, partial(LosesMemory, device))
    finally:
        gc.enable()
    assert len(LosesMemory.made) == 2
    assert step.plan.peak_bytes <= step.plan.measured_peak_bytes <= step.plan.budget_bytes == budget
    assert_same(train(other, TrainingStep(other.model, other.loss_fn)), train(workload, step))


@pytest.mark.slow
@pytest.mark.usefixtures("_stand_in")
def test_a_plan_leaves_room_for_segments_that_are_not_full() -> None:
    workload = on_device(build("gpt2", layers=3, width=64, heads=4, vocab=64, batch=16, seq=32))
    device = next(workload.model.parameters()).device
    recorders: list[CudaGraphs] = []

    def recorder() -> CudaGraphs:
        recorders.append(CudaGraphs(device))
        return recorders[-1]

    budget = budget_with_pool(workload) - 2 * MIB  # a segment less than where everything is kept
    step = solved(workload, budget, recorder)
    assert len(recorders) == 1 and len(step.plan.schedule.computed) > step.plan.graph.ops
    assert step.plan.measured_peak_bytes == step.plan.graph.static_bytes + recorders[0].count_held_bytes() <= budget


@pytest.mark.slow
@pytest.mark.usefixtures("_stand_in")
def test_a_budget_without_room_for_the_pool_is_refused_before_anything_is_recorded() -> None:
    workload = on_device(make("tied"))

    def none() -> Any:
        raise AssertionError("nothing is recorded")

    with pytest.raises(
        InfeasibleError,
        match=r"a CUDA graph keeps .* for .* of tensors: whole segments of 2 or 20 MiB, and .* that libraries work in.*"
        r"raise the budget to .* MB, or leave out cuda_graph=True",
    ):
        solved(workload, "100%", none)


class NeverFits(CudaGraphs):
    def count_held_bytes(self) -> int:
        return super().count_held_bytes() + 10**9


@pytest.mark.usefixtures("_stand_in")
def test_a_pool_that_never_fits_is_one_error() -> None:
    workload = on_device(make("tied"))
    device = next(workload.model.parameters()).device
    with pytest.raises(
        InfeasibleError, match=r"the measured peak is .*, over the budget of .*a CUDA graph keeps segments.*raise the budget"
    ):
        solved(workload, budget_with_pool(workload), partial(NeverFits, device))


@pytest.mark.usefixtures("_cuda")
def test_the_pool_of_cuda_graphs_is_within_the_budget() -> None:
    workload = dropout_and_norm()
    step = planner.compile(*workload, budget="1GB", optimizer="adamw", cuda_graph=True)
    assert step.plan.peak_bytes <= step.plan.measured_peak_bytes <= 10**9
    step(*workload.batch).backward()


@pytest.mark.parametrize("compare_eager", [False, *slow(True)])
@pytest.mark.parametrize("optimizer", ["adamw", *slow("none")])
@pytest.mark.usefixtures("_stand_in")
def test_plan_of_recorded_step_reports_its_reserved_memory(optimizer: str, *, compare_eager: bool) -> None:
    workload = on_device(build("gpt2", layers=2, width=256, heads=4, vocab=16384, batch=4, seq=32))
    step = planner.compile(
        *workload, budget="1GB", optimizer=optimizer, cuda_graph=True, passes=1, wait="2 work", compare_eager=compare_eager
    )
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    adam = torch.optim.AdamW(workload.model.parameters(), foreach=True)
    for _ in range(3):
        step(*workload.batch).backward()
        if optimizer == "adamw":
            adam.step()
        workload.model.zero_grad()
    torch.cuda.synchronize()
    found = step.plan.reserved
    assert found.pool_bytes > found.optimizer_bytes
    assert f"of it CUDA graphs {format_bytes(found.pool_bytes)} in a pool of their own" in str(step.plan)
    assert torch.cuda.max_memory_reserved() == found.total_bytes
    assert plan_from_dict(plan_to_dict(step.plan)).reserved == found


def planned_alone(budget: int | str, **settings: str) -> tuple[Plan, int]:
    """The plan of a step on a device of its own, and the most that is reserved in three steps."""
    with cuda_device(order=Order.RANDOM, seed=1):
        workload = on_device(build("gpt2", layers=3, width=64, heads=4, vocab=1024, batch=32, seq=64))
        step = planner.compile(
            *workload, budget=budget, cuda_graph=True, passes=1, wait="5 work", compare_eager=False, **settings
        )
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            step(*workload.batch).backward()
            workload.model.zero_grad()
        torch.cuda.synchronize()
        return step.plan, torch.cuda.max_memory_reserved()


@pytest.mark.slow
def test_budget_counts_reserved_memory_by_default() -> None:
    everything, _ = planned_alone("1GB")
    assert everything.memory is CountedMemory.RESERVED
    budget_bytes = everything.reserved.total_bytes - everything.reserved.pool_bytes // 4
    found, reserved_bytes = planned_alone(budget_bytes)
    assert found.measured_peak_bytes is not None
    assert len(found.schedule.computed) > found.graph.ops
    assert reserved_bytes == found.reserved.total_bytes <= found.budget_bytes == budget_bytes
    assert found.compute_needed_bytes(found.measured_peak_bytes) == found.reserved.total_bytes
    assert plan_from_dict(plan_to_dict(found)) == found


@pytest.mark.slow
def test_a_budget_of_allocated_bytes_is_for_static_memory_and_the_pool() -> None:
    plan, reserved_bytes = planned_alone("120MB", memory="allocated")
    assert plan.memory is CountedMemory.ALLOCATED
    assert plan.measured_peak_bytes <= plan.budget_bytes < reserved_bytes == plan.reserved.total_bytes
    assert plan.graph.static_bytes + plan.reserved.pool_bytes == plan.measured_peak_bytes


@pytest.mark.slow
@pytest.mark.usefixtures("_stand_in")
def test_infeasible_reserved_budget_reports_memory_outside_the_pool() -> None:
    workload = on_device(make("tied"))
    with pytest.raises(InfeasibleError, match=r"no more than the .* reserved outside of the pool of CUDA graphs"):
        planner.compile(*workload, budget="20MB", cuda_graph=True, passes=1)
    with pytest.raises(InfeasibleError, match=r"Of the budget of 73\.45 MB, .* reserved beside the step"):
        planner.compile(*workload, budget="73.45MB", cuda_graph=True, passes=1)
    with pytest.raises(InfeasibleError, match=r"over the budget of 75\.60 MB.*raise the budget to 109\.06 MB"):
        planner.compile(*workload, budget="75.6MB", cuda_graph=True, passes=1)
    plan = planner.compile(*workload, budget="109.06MB", cuda_graph=True, passes=1).plan
    assert plan.reserved.total_bytes <= plan.budget_bytes
