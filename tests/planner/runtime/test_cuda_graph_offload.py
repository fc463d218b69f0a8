"""Copies to the host and back in recorded steps; on a stand-in for CUDA, and on a GPU with ``-m gpu``."""

import gc

import pytest
import torch

import planner
from graphs.errors import CopyError, PlannerError
from graphs.pools import HOST
from graphs.schedule import keep_everything
from graphs.simulate import simulate
from planner.capture.step import TrainingStep
from planner.capture.trace import capture
from planner.capture.workload.models import Workload
from planner.runtime.cuda.cuda_graph import CudaGraphs
from planner.runtime.cuda.graphed_step import prepare_for_recording, record
from planner.runtime.executor import Executor
from planner.runtime.transfers.channels import HostChannels
from tests.support.cuda_device import Order, cuda_device, on_device
from tests.support.cuda_device.steps import LOOPS, dropout_and_norm, train
from tests.support.marks import slow, slow_except
from tests.support.models.offloaded import offering, with_random_copies
from tests.support.models.outcomes import assert_same
from tests.support.models.steps import make

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

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
