"""Copies to the host and back in recorded steps: here with stand-ins that refuse what a capture refuses, on a GPU as they are."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import planner
from graphs.capture.step import TrainingStep
from graphs.capture.trace import capture
from graphs.errors import CopyError, PlannerError
from graphs.pools import HOST
from graphs.simulate import simulate
from graphs.zoo import Workload
from planner.runtime.cuda_channels import CudaChannels
from planner.runtime.cuda_graph import CudaGraphs
from planner.runtime.executor import Executor
from planner.runtime.graphed_step import record, recordable
from solvers.policies.store_all import store_all
from tests.support.copies import offering, with_random_copies
from tests.support.cuda_stand_in import Cuda, cuda_stand_in
from tests.support.recorded_steps import LOOPS, RunsAgain, assert_same, dropout_and_norm, on_cuda, tensors, train
from tests.support.steps import make

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

CPU = torch.device("cpu")


class Launches(TorchDispatchMode):
    """Notes every op, with the tensors that it reads and writes: as a CUDA graph it does the same to the same memory again."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not func.overloadpacket.__name__.startswith(("empty", "new_empty", "set_")):  # which launch nothing
            self.ops.append((func, args, kwargs or {}, made))
        return made

    def replay(self) -> None:
        for func, args, kwargs, made in self.ops:
            for there, again in zip(tensors(made), tensors(func(*args, **kwargs)), strict=True):
                if there.data_ptr() != again.data_ptr():
                    there.copy_(again)


class Captures:
    """Stands for ``CudaGraphs``."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda

    def warm_up(self, run: Callable[[], object]) -> None:
        for _ in range(3):
            run()

    def record(self, function: Callable[..., Any], *args: Any) -> tuple[Any, Callable[[], None]]:
        launches = Launches()
        with self.cuda.capturing(), launches:
            returned = function(*args)
        return returned, launches.replay

    def held_bytes(self) -> int:
        return 0


def captured_step(workload: Workload, cuda: Cuda, seed: int, host_bytes: int | None = None) -> tuple[Executor, CudaChannels]:
    """The recorded step of a schedule that copies at random."""
    captured = recordable(capture(*workload))
    offered = offering(captured)
    schedule = with_random_copies(offered.graph, store_all(captured.graph), seed)
    channels = CudaChannels(CPU, host_bytes)
    executor = Executor(offered, schedule, workload.model, workload.loss_fn, channels)
    record(captured, executor, TrainingStep(workload.model, workload.loss_fn), workload.batch, Captures(cuda))
    return executor, channels


@pytest.mark.parametrize("loop", LOOPS)
def test_a_recorded_step_that_copies_trains_as_eager_does(loop: str) -> None:
    workload, other = dropout_and_norm(), dropout_and_norm()
    eager = train(other, TrainingStep(other.model, other.loss_fn), **LOOPS[loop])
    with cuda_stand_in() as cuda:
        step, _ = captured_step(workload, cuda, seed=3)
        assert_same(eager, train(workload, step, **LOOPS[loop]))
        del step
        gc.collect()


@pytest.mark.parametrize("name", ["mutated", "tied"])
def test_copies_may_be_under_way_where_the_forward_pass_ends(name: str) -> None:
    between = 0
    for seed in range(2):
        workload, other = make(name), make(name)
        eager = train(other, TrainingStep(other.model, other.loss_fn), batches=2)
        with cuda_stand_in() as cuda:
            step, channels = captured_step(workload, cuda, seed)
            locked = dict(cuda.locked)
            assert_same(eager, train(workload, step, batches=2))
            assert cuda.locked == locked
            assert channels.memory.peak_bytes == simulate(step.graph, step.schedule).pool_peaks_bytes[1]
            between += "= channels" in step.launched.source.partition("def backward")[0]
            del step, channels
            gc.collect()
            assert not cuda.locked
    assert between


def test_recordings_that_follow_each_other_use_the_same_memory() -> None:
    workload = dropout_and_norm()
    with cuda_stand_in() as cuda:
        step, channels = captured_step(workload, cuda, seed=3)
        needed = channels.memory.allocated_bytes
        del step
        gc.collect()
        assert needed == channels.memory.allocated_bytes > 0 and cuda.locked
        channels.memory.let_stay()  # as another recording begins
        assert channels.memory.allocated_bytes == 0 and not cuda.locked


def test_a_host_without_room_for_copies_of_all_sizes_is_one_error() -> None:
    workload = dropout_and_norm()
    with cuda_stand_in() as cuda:
        step, channels = captured_step(workload, cuda, seed=3)
        needed = channels.memory.allocated_bytes
        del step, channels
        with pytest.raises(CopyError, match=r"a CUDA graph keeps a place for copies of each size; raise host_budget="):
            captured_step(workload, cuda, seed=3, host_bytes=needed - 1)
        captured_step(workload, cuda, seed=3, host_bytes=needed)
        gc.collect()


def test_copies_by_threads_are_not_recorded() -> None:
    workload = dropout_and_norm()
    captured = recordable(capture(*workload))
    offered = offering(captured)
    executor = Executor(offered, store_all(captured.graph), workload.model, workload.loss_fn)
    step = TrainingStep(workload.model, workload.loss_fn)
    with pytest.raises(PlannerError, match=r"only copies on streams of CUDA can be recorded: leave out options="):
        record(captured, executor, step, workload.batch, RunsAgain())


@pytest.mark.gpu
@pytest.mark.parametrize("loop", LOOPS)
def test_a_cuda_graph_holds_copies(loop: str) -> None:
    workload, other = on_cuda(), on_cuda()
    captured = recordable(capture(*workload))
    offered = offering(captured)
    schedule = with_random_copies(offered.graph, store_all(captured.graph), 3)
    executor = Executor(offered, schedule, workload.model, workload.loss_fn)
    recorder = CudaGraphs(torch.device("cuda", torch.cuda.current_device()))
    record(captured, executor, TrainingStep(workload.model, workload.loss_fn), workload.batch, recorder)
    launched = Executor(recordable(capture(*other)), store_all(captured.graph), other.model, other.loss_fn)
    assert_same(train(other, launched, **LOOPS[loop]), train(workload, executor, **LOOPS[loop]))


@pytest.mark.gpu
def test_one_call_plans_a_cuda_graph_with_copies() -> None:
    workload = on_cuda()
    step = planner.compile(
        *workload, budget="1GB", optimizer="adamw", cuda_graph=True, options=["offload"], link="25GB/s", host_budget="1GB"
    )
    assert step.plan.measured_peak_bytes is not None and step.plan.measured_peak_bytes <= 10**9
    assert step.plan.eager is not None and step.plan.eager.identical
    assert HOST in step.plan.pool_peaks_bytes
    step(*workload.batch).backward()
