"""Recorded steps: bytes that were counted, copies to the host, what records them; on a stand-in, or a GPU (``-m gpu``)."""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import planner
from planner.capture.step import TrainingStep
from planner.capture.trace import capture
from planner.capture.workload.models import Workload, build
from planner.graphs.errors import CopyError, InfeasibleError, PlannerError, TraceError
from planner.graphs.ir import Kind
from planner.graphs.pools import HOST
from planner.graphs.schedule import keep_everything
from planner.graphs.simulate import simulate
from planner.graphs.units import format_bytes
from planner.measure.tracing import profile_capture
from planner.plans.document import plan_to_dict
from planner.plans.plan import Plan, plan_from_dict
from planner.runtime.cuda.cuda_graph import CudaGraphs
from planner.runtime.cuda.graph_pool import compute_pool_bytes
from planner.runtime.cuda.graphed_step import prepare_for_recording, record
from planner.runtime.executor import Executor
from planner.runtime.libraries import get_workspaces, warm_up_libraries
from planner.runtime.transfers.channels import HostChannels
from planner.settings.budget import read_budget
from planner.settings.counted_memory import CountedMemory
from planner.settings.plan import PlanSettings
from planner.solvers.tolerance import Tolerance
from planner.train.compile.compiler import Compiler
from planner.train.compile.step import PlannedStep
from planner.train.distributed.ranks import SingleProcess
from planner.train.distributed.wrappers import Unwrapped
from tests.support.cuda_device import Order, cuda_device, on_device
from tests.support.cuda_device.memory import WORKSPACE_BYTES
from tests.support.cuda_device.steps import LOOPS, dropout_and_norm, recorded, train
from tests.support.marks import slow, slow_except
from tests.support.models.offloaded import offering, with_random_copies
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


ORDERS = [*(Order.ALL_LATE, Order.RANDOM), *slow(Order.OTHERS_LATE, Order.OTHERS_FIRST)]

CUDA = torch.device("cuda:0")


def recorded_step(workload: Workload, seed: int, host_bytes: int | None = None) -> tuple[Executor, HostChannels]:
    """The recorded step of a schedule that copies at random."""
    captured = prepare_for_recording(capture(*workload))
    offered = offering(captured)
    schedule = with_random_copies(offered.graph, keep_everything(captured.graph), seed)
    channels = HostChannels(CUDA, host_bytes)
    executor = Executor(offered, schedule, workload.model, workload.loss_fn, channels)
    record(captured, executor, TrainingStep(workload.model, workload.loss_fn), workload.batch, CudaGraphs(CUDA))
    return executor, channels


@pytest.mark.parametrize("loop", slow_except(LOOPS, "accumulated, clipped"))
@pytest.mark.usefixtures("_cuda")
def test_a_recorded_step_that_copies_trains_as_the_step_does_op_by_op(loop: str) -> None:
    workload, other = dropout_and_norm(), dropout_and_norm()
    captured = prepare_for_recording(capture(*other))
    launched = Executor(captured, keep_everything(captured.graph), other.model, other.loss_fn)
    wanted = train(other, launched, **LOOPS[loop])
    step, _ = recorded_step(workload, seed=3)
    assert_same(wanted, train(workload, step, **LOOPS[loop]))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["mutated", *slow("tied")])
def test_copies_may_be_under_way_where_the_forward_pass_ends(name: str, order: Order) -> None:
    between = 0
    for seed in range(2):
        with cuda_device(order=order, seed=seed) as cuda:
            workload, other = on_device(make(name)), on_device(make(name))
            eager = train(other, TrainingStep(other.model, other.loss_fn), batches=2)
            step, channels = recorded_step(workload, seed)
            locked = dict(cuda.locked)
            assert_same(eager, train(workload, step, batches=2))
            assert cuda.locked == locked
            assert channels.memory.peak_bytes == simulate(step.graph, step.schedule).pool_peaks_bytes[1]
            between += ".take(" in step.launched.source.partition("def backward")[0]
            del step, channels
            gc.collect()
            assert not cuda.locked
    assert between


def test_recordings_that_follow_each_other_use_the_same_memory() -> None:
    with cuda_device() as cuda:
        step, channels = recorded_step(dropout_and_norm(), seed=3)
        needed = channels.memory.allocated_bytes
        del step
        gc.collect()
        assert needed == channels.memory.allocated_bytes > 0 and cuda.locked
        channels.memory.let_stay()  # as another recording begins
        assert channels.memory.allocated_bytes == 0 and not cuda.locked


def test_a_host_without_room_for_copies_of_all_sizes_is_one_error() -> None:
    with cuda_device():
        workload = dropout_and_norm()
        step, channels = recorded_step(workload, seed=3)
        needed = channels.memory.allocated_bytes
        del step, channels
        with pytest.raises(CopyError, match=r"a CUDA graph keeps memory for copies of each size; raise host_budget="):
            recorded_step(workload, seed=3, host_bytes=needed - 1)
        recorded_step(workload, seed=3, host_bytes=needed)
        gc.collect()


@pytest.mark.usefixtures("_stand_in")
def test_copies_by_threads_are_not_recorded() -> None:
    workload = dropout_and_norm()
    captured = prepare_for_recording(capture(*workload))
    offered = offering(captured)
    threads = HostChannels(torch.device("cpu"))
    executor = Executor(offered, keep_everything(captured.graph), workload.model, workload.loss_fn, threads)
    step = TrainingStep(workload.model, workload.loss_fn)
    with pytest.raises(PlannerError, match=r"only copies on streams of CUDA can be recorded: leave out options="):
        record(captured, executor, step, workload.batch, CudaGraphs(CUDA))


@pytest.mark.usefixtures("_cuda")
def test_one_call_plans_a_cuda_graph_with_copies() -> None:
    workload = dropout_and_norm()
    step = planner.compile(
        *workload, budget="1GB", optimizer="adamw", cuda_graph=True, options=["offload"], link="25GB/s", host_budget="1GB"
    )
    assert step.plan.measured_peak_bytes <= 10**9
    assert step.plan.eager.identical
    assert HOST in step.plan.pool_peaks_bytes
    step(*workload.batch).backward()


@pytest.mark.parametrize("order", Order)
def test_replay_runs_after_previously_launched_work(order: Order) -> None:
    with cuda_device(order=order):
        x = torch.ones(1000, device=CUDA)
        recorder = CudaGraphs(CUDA)
        recorder.warm_up(lambda: x * 3)
        made, replay = recorder.record(lambda values: values * 3 + 1, x)
        for value in (2.0, 5.0):
            x.fill_(value)
            replay()
            assert made.tolist() == [3 * value + 1] * 1000


@pytest.mark.parametrize("order", Order)
def test_function_is_warmed_up_after_previously_launched_work(order: Order) -> None:
    with cuda_device(order=order):
        x = torch.ones(1000, device=CUDA)
        CudaGraphs(CUDA).warm_up(lambda: x.mul_(2))
        assert x.tolist() == [8.0] * 1000


def test_the_pool_holds_a_segment_and_the_workspace() -> None:
    with cuda_device() as cuda:
        x = torch.ones(16, 16, device=CUDA)
        recorder = CudaGraphs(CUDA)
        recorder.warm_up(lambda: x @ x)
        made, _ = recorder.record(lambda: x @ x)
        assert recorder.count_held_bytes() == 2 * MIB + WORKSPACE_BYTES
        again, _ = recorder.record(lambda: made @ x)
        assert recorder.count_held_bytes() == 2 * MIB + WORKSPACE_BYTES
        assert not cuda.memories[0].workspaces
        assert made.data_ptr() != again.data_ptr()


def waits(x: torch.Tensor) -> float:
    return x.sum().item()


def leaves_a_stream(x: torch.Tensor) -> torch.Tensor:
    side = torch.cuda.Stream(CUDA)
    side.wait_stream(torch.cuda.current_stream(CUDA))
    with torch.cuda.stream(side):
        return x + 1


@pytest.mark.parametrize(("function", "said"), [(waits, "operation not permitted"), (leaves_a_stream, "unjoined work")])
def test_failed_capture_raises_with_its_cause(function: Callable[..., Any], said: str) -> None:
    with cuda_device() as cuda:
        x = torch.ones(10, device=CUDA)
        with pytest.raises(TraceError, match=rf"cannot be captured as a CUDA graph: .*{said}.*; leave out cuda_graph=True"):
            CudaGraphs(CUDA).record(function, x)
        assert torch.cuda.current_stream(CUDA) is cuda.defaults[0] and not cuda.memories[0].workspaces
        assert (x + 1).tolist() == [2.0] * 10


@pytest.mark.parametrize("loop", slow_except(LOOPS, "accumulated, clipped"))
@pytest.mark.usefixtures("_cuda")
def test_a_cuda_graph_trains_as_the_planned_step_does(loop: str) -> None:
    workload, other = dropout_and_norm(), dropout_and_norm()
    captured = prepare_for_recording(capture(*other))
    launched = Executor(captured, random_schedule(captured.graph, 1), other.model, other.loss_fn)
    wanted, found = train(other, launched, **LOOPS[loop]), train(workload, recorded(workload), **LOOPS[loop])
    assert_same(wanted, found)
