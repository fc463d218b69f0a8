"""Copies on CUDA's streams and steps on several devices: on a stand-in that works in orders chosen to hurt, and on a GPU."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from planner.capture.step import TrainingStep
from planner.capture.trace import capture
from planner.graphs.options.passes import order_by_passes
from planner.graphs.schedule import keep_everything
from planner.graphs.simulate import simulate
from planner.measure.pool_memory import measure_other_peaks, measure_peak
from planner.measure.tracing import profile_capture
from planner.runtime.executor import Executor
from planner.runtime.transfers.channels import HostChannels
from planner.runtime.transfers.cuda_channels import StreamChannel, StreamTransfer
from planner.runtime.transfers.transfers import DeviceMemory, Transfer
from planner.settings.plan import PlanSettings
from tests.support.budgets import assert_is_peak
from tests.support.cuda_device import Order, cuda_device, on_device
from tests.support.cuda_device.steps import assert_as_eager
from tests.support.graphs.random_choices import any_schedule
from tests.support.marks import slow
from tests.support.models.offloaded import offering, with_random_copies
from tests.support.models.outcomes import assert_same, train
from tests.support.models.placed import on_pools, placed_at_random
from tests.support.models.steps import make

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ORDERS = [*(Order.ALL_LATE, Order.RANDOM), *slow(Order.OTHERS_LATE, Order.OTHERS_FIRST)]

CUDA = torch.device("cuda:0")


def launched(transfer: Transfer) -> Any:
    """The event behind a copy on a stream."""
    assert isinstance(transfer, StreamTransfer)
    return transfer.launched.event


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["mutated", *slow("tied", "unet")])
def test_steps_that_copy_have_the_bits_of_eager_pytorch_in_any_order(name: str, order: Order) -> None:
    for seed in range(2):
        with cuda_device(order=order, seed=seed) as cuda:
            workload = on_device(make(name))
            captured = capture(*workload)
            offered = offering(captured)
            schedule = with_random_copies(offered.graph, keep_everything(captured.graph), seed)
            step = Executor(offered, schedule, workload.model, workload.loss_fn)
            assert_as_eager(workload, step)
            assert all(isinstance(channel, StreamChannel) for channel in step.devices.channels.values())
            memory = step.devices.host
            assert memory.used_bytes == 0 and memory.peak_bytes == simulate(offered.graph, schedule).pool_peaks_bytes[1]
            assert len(cuda.locked) == sum(map(len, memory._unused.values())) > 0
            del step, memory
            gc.collect()
            assert not cuda.locked


@pytest.mark.parametrize("order", ORDERS)
def test_copies_stay_within_their_budget(order: Order) -> None:
    with cuda_device(order=order):
        workload = on_device(make("mutated"))
        captured = profile_capture(capture(*workload), workload, PlanSettings(passes=1))
        offered = offering(captured)
        schedule = with_random_copies(offered.graph, keep_everything(captured.graph), 2)
        step = Executor(offered, schedule, workload.model, workload.loss_fn)
        measured = measure_peak(captured, step, TrainingStep(workload.model, workload.loss_fn), workload.batch)
        assert_is_peak(measured.peak_bytes, simulate(offered.graph, schedule).peak_bytes, offered.graph)


@pytest.mark.parametrize("order", ORDERS)
def test_a_loss_that_is_dropped_leaves_nothing_that_a_copy_uses(order: Order) -> None:
    with cuda_device(order=order, seed=1):
        workload = on_device(make("mutated"))
        captured = capture(*workload)
        offered = offering(captured)
        state = {name: value.clone() for name, value in workload.model.state_dict().items()}
        for seed in range(4):
            schedule = with_random_copies(offered.graph, keep_everything(captured.graph), seed)
            step = Executor(offered, schedule, workload.model, workload.loss_fn)
            step(*workload.batch)  # copies of its tensors may be under way, and their memory is taken by the next
            workload.model.load_state_dict(state)
            assert_as_eager(workload, step)


def test_memory_of_a_copy_is_held_until_the_copy_ends() -> None:
    with cuda_device() as cuda:
        copies = HostChannels(CUDA)
        tensor = torch.arange(5.0, device=CUDA)
        host, out = copies.offload(tensor)
        found, back = copies.reload(host)
        memory, gone = weakref.ref(tensor), weakref.ref(found)
        del tensor, found
        assert memory() is not None and gone() is not None and cuda.defaults[0].done == 0
        out.finish()
        assert memory() is None
        torch.cuda.current_stream().synchronize()
        assert torch.equal(host.bytes.values.view(torch.float32), torch.arange(5.0))
        event = launched(back)
        del back  # a step that was dropped: the computation waits before the memory can be taken again
        assert gone() is None and event.point.stream.done < event.point.place
        torch.cuda.current_stream().synchronize()
        assert event.point.stream.done >= event.point.place
        del host, copies
        gc.collect()


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("seed", range(5))
def test_copies_wait_for_those_before_them(order: Order, seed: int) -> None:
    with cuda_device(order=order, seed=seed):
        copies = HostChannels(CUDA)
        ones, twos = torch.ones(1000, device=CUDA), torch.full((1000,), 2.0, device=CUDA)
        host, out = copies.offload(ones)
        found, back = copies.reload(host)  # not before it is on the host
        place = host.bytes.room.data_ptr()
        del host
        second, out_again = copies.offload(twos)  # into a buffer that is still read
        assert second.bytes.room.data_ptr() == place
        found_again, back_again = copies.reload(second)
        third, out_at_last = copies.offload(found_again, back_again)  # not before it is on the device
        for copy in (out, out_again, out_at_last):
            copy.finish()
        found, found_again = back.wait_for_arrival(found), back_again.wait_for_arrival(found_again)
        assert torch.equal(found.cpu(), torch.ones(1000)) and torch.equal(found_again.cpu(), torch.full((1000,), 2.0))
        assert torch.equal(third.bytes.layout.view_in(third.bytes.values), torch.full((1000,), 2.0))
        del second, third, copies
        gc.collect()


def test_the_host_waits_for_a_copy_by_its_event() -> None:
    with cuda_device():
        copies = HostChannels(CUDA)
        host, out = copies.offload(torch.ones(1000, device=CUDA))
        place = launched(out).point
        assert place.stream.done < place.place
        (copy,) = host.bytes.copies
        copy.finish()
        assert place.stream.done >= place.place and host.bytes.values.any()
        del host, copies
        gc.collect()


def test_host_memory_is_not_unlocked_while_a_copy_uses_it() -> None:
    with cuda_device() as cuda:
        copies = HostChannels(CUDA)
        host, out = copies.offload(torch.ones(1000, device=CUDA))
        assert cuda.locked
        del host, out, copies
        gc.collect()
        assert not cuda.locked


class Doubling:
    """A call as a collective is one: it takes a buffer and the memory of its result, and fills them later."""

    def begin(self, given: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        buffer, result = torch.empty_like(given), torch.empty_like(given)

        def fill() -> None:
            buffer.copy_(given)
            torch.add(buffer, given, out=result)

        return result, fill


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("seed", range(3))
def test_calls_on_a_stream_start_behind_the_computation_and_are_waited_for(order: Order, seed: int) -> None:
    with cuda_device(order=order, seed=seed):
        channel = StreamChannel("collectives", CUDA, DeviceMemory(CUDA))
        value = torch.ones(1000, device=CUDA)
        for turn in range(5):
            call = channel.transfer()
            made = call.start(Doubling(), value + turn)  # what it reads is held until it is waited for
            torch.full((1000,), torch.nan, device=CUDA)  # not in its memory
            call.finish()
            torch.full((1000,), torch.nan, device=CUDA)  # in that of its buffer, which the call has read before
            assert torch.equal(made.cpu(), torch.full((1000,), 2.0 + 2 * turn))
            dropped = channel.transfer()
            dropped.start(Doubling(), made)
            del dropped  # a step that was dropped: the computation waits before the memory can be taken again
            value = torch.ones(1000, device=CUDA)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", ["gpt2_sdpa", "resnet18", "mutated"])
def test_offloaded_steps_on_a_gpu_are_exact(name: str) -> None:
    workload = make(name)
    workload.model.cuda()
    workload = type(workload)(workload.model, workload.loss_fn, tuple(value.cuda() for value in workload.batch))
    captured = profile_capture(capture(*workload), workload, PlanSettings(passes=1))
    offered = offering(captured)
    eager = train(workload, None)
    for seed in range(3):
        schedule = with_random_copies(offered.graph, keep_everything(captured.graph), seed)
        step = Executor(offered, schedule, workload.model, workload.loss_fn)
        predicted = simulate(offered.graph, schedule)
        measured = measure_peak(captured, step, TrainingStep(workload.model, workload.loss_fn), workload.batch).peak_bytes
        assert_is_peak(measured, predicted.peak_bytes, offered.graph)
        assert step.devices.host.peak_bytes == predicted.pool_peaks_bytes[1]
        assert_same(eager, train(workload, (offered, schedule)))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("names", [["cpu:1", "cuda:1"], *slow(["cuda:1"], ["cpu:1"])], ids=" ".join)
def test_ops_on_several_devices_have_the_bits_of_one(names: list[str], order: Order) -> None:
    with cuda_device(devices=2, order=order, seed=len(names)):
        workload = on_device(make("mutated"))
        captured = profile_capture(capture(*workload), workload, PlanSettings(passes=1))
        offered = on_pools(captured, names, main=CUDA)
        for seed in range(3):
            schedule = placed_at_random(offered.graph, seed)
            assert_as_eager(workload, Executor(offered, schedule, workload.model, workload.loss_fn))


@pytest.mark.parametrize("order", ORDERS)
def test_tensors_may_come_from_the_host_and_be_sent_on(order: Order) -> None:
    with cuda_device(devices=2, order=order, seed=4):
        workload = on_device(make("tied"))
        captured = profile_capture(capture(*workload), workload, PlanSettings(passes=1))
        offered = on_pools(captured, ("cuda:1",), "offload", main=CUDA)
        for seed in range(4):
            schedule = order_by_passes(offered.graph, any_schedule(offered.graph, seed))
            assert_as_eager(workload, Executor(offered, schedule, workload.model, workload.loss_fn))


@pytest.mark.parametrize("names", [("cuda:1",), ("cpu:1",)], ids=" ".join)
def test_each_memory_holds_the_predicted_bytes(names: tuple[str, ...]) -> None:
    with cuda_device(devices=2):
        workload = on_device(make("tied"))
        captured = profile_capture(capture(*workload), workload, PlanSettings(passes=1))
        offered = on_pools(captured, names, main=CUDA)
        schedule = placed_at_random(offered.graph, 2)
        step = Executor(offered, schedule, workload.model, workload.loss_fn)
        eager = TrainingStep(workload.model, workload.loss_fn)
        main, other = simulate(offered.graph, schedule).pool_peaks_bytes
        assert measure_other_peaks(captured, step, eager, workload.batch) == {names[0]: other}
        assert measure_peak(captured, step, eager, workload.batch).peak_bytes <= main
