"""Copies on CUDA's streams: here with a stand-in that does them as late as it may, on a GPU as it is."""

import gc
import weakref

import pytest
import torch

from graphs.capture.step import TrainingStep
from graphs.capture.trace import capture
from graphs.simulate import simulate
from planner.runtime.cuda_channels import CudaChannels
from planner.runtime.executor import Executor
from planner.runtime.measure import loss_of
from planner.runtime.pool_memory import measured_peak
from planner.tracing import profiled
from solvers.policies.store_all import store_all
from tests.support.adamw import assert_same, train
from tests.support.copies import offering, with_random_copies
from tests.support.cuda_stand_in import cuda_stand_in
from tests.support.steps import capture_of, make

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("name", ["tied", "mutated", "unet"])
def test_what_is_computed_waits_for_copies_and_copies_for_each_other(name: str) -> None:
    workload = make(name)
    captured = capture_of(name)
    offered = offering(captured)
    eager = [p.grad for p in trained(workload.model, workload).parameters()]
    for seed in range(4):
        with cuda_stand_in() as cuda:
            schedule = with_random_copies(offered.graph, store_all(captured.graph), seed)
            other = make(name)
            copies = CudaChannels(torch.device("cpu"))
            step = Executor(offered, schedule, other.model, other.loss_fn, copies)
            torch.manual_seed(2)
            loss_of(step(*workload.batch)).backward()
            assert copies.memory.used_bytes == 0
            assert copies.memory.peak_bytes == simulate(offered.graph, schedule).pool_peaks_bytes[1]
            assert len(cuda.locked) == sum(map(len, copies.memory._unused.values()))
            del step, copies
            gc.collect()
            assert not cuda.locked
        for expected, p in zip(eager, other.model.parameters(), strict=True):
            assert (expected is None and p.grad is None) or torch.equal(expected, p.grad)


def trained(model, workload):
    torch.manual_seed(2)
    loss_of(TrainingStep(model, workload.loss_fn)(*workload.batch)).backward()
    return model


def test_memory_that_a_copy_uses_is_held_until_it_has_ended() -> None:
    with cuda_stand_in() as cuda:
        copies = CudaChannels(torch.device("cpu"))
        tensor = torch.arange(5.0)
        host, out = copies.out(tensor)
        found, back = copies.back(host)
        memory, gone = weakref.ref(tensor), weakref.ref(found)
        del tensor, found
        assert memory() is not None and gone() is not None and cuda.present.done == 0
        copies.wait(out)
        assert memory() is None and torch.equal(host.values.view(torch.float32), torch.arange(5.0))
        assert not torch.equal(gone(), torch.arange(5.0))  # type: ignore[arg-type]
        event = back.event
        del back  # a step that was dropped: the computation waits before the memory can be taken again
        assert gone() is None and event.stream.done >= event.place
        del host, copies
        gc.collect()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt2_sdpa", "resnet18", "mutated"])
def test_on_a_gpu(name: str) -> None:
    workload = make(name)
    workload.model.cuda()
    workload = type(workload)(workload.model, workload.loss_fn, tuple(value.cuda() for value in workload.batch))
    captured = profiled(capture(*workload), *workload, passes=1)
    offered = offering(captured)
    eager = train(workload, None)
    for seed in range(3):
        schedule = with_random_copies(offered.graph, store_all(captured.graph), seed)
        step = Executor(offered, schedule, workload.model, workload.loss_fn)
        predicted = simulate(offered.graph, schedule)
        measured = measured_peak(captured, step, TrainingStep(workload.model, workload.loss_fn), workload.batch).peak_bytes
        assert abs(measured - predicted.peak_bytes) <= 0.01 * predicted.peak_bytes
        assert step.channels is not None and step.channels.memory.peak_bytes == predicted.pool_peaks_bytes[1]
        assert_same(eager, train(workload, (offered, schedule)))
