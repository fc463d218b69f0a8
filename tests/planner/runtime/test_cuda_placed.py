"""Steps on several devices with CUDA among them, on a stand-in: the bits of eager PyTorch, within the bytes of each memory."""

import pytest
import torch

from graphs.options.passes import order_by_passes
from graphs.simulate import simulate
from planner.capture.step import TrainingStep
from planner.capture.trace import capture
from planner.measure.pool_memory import measure_other_peaks, measure_peak
from planner.measure.tracing import profile_capture
from planner.runtime.executor import Executor
from planner.settings.plan import PlanSettings
from tests.support.cuda_device import Order, cuda_device, on_device
from tests.support.cuda_device.steps import assert_as_eager
from tests.support.graphs.random_choices import any_schedule
from tests.support.marks import slow
from tests.support.models.placed import on_pools, placed_at_random
from tests.support.models.steps import make

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ORDERS = [*(Order.ALL_LATE, Order.RANDOM), *slow(Order.OTHERS_LATE, Order.OTHERS_FIRST)]

CUDA = torch.device("cuda:0")


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
