"""Times that are measured on CUDA, on a stand-in whose streams have clocks: those of the device that computes."""

import pytest
import torch

from graphs.schedule import keep_everything
from planner.capture.replay import collect_static
from planner.capture.step import TrainingStep
from planner.capture.trace import capture
from planner.measure.device_profile import profile_other_devices
from planner.measure.observation import OpTimer
from planner.measure.steps import get_loss
from planner.measure.tracing import profile_capture
from planner.runtime.executor import Executor
from planner.settings.plan import PlanSettings
from tests.support.cuda_device import cuda_device, on_device
from tests.support.marks import slow
from tests.support.models.steps import make

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("current", [1, *slow(0)])
@pytest.mark.parametrize("place", ["cuda:0", "cuda:1"])
def test_ops_are_timed_on_the_device_of_the_model(place: str, current: int) -> None:
    with cuda_device(devices=2), torch.cuda.device(current):
        workload = on_device(make("tied"), place)
        captured = profile_capture(capture(*workload), workload, PlanSettings(passes=1))
        assert all(op.time_s > 1e-6 for op in captured.graph.ops if op.outputs)
        step = Executor(captured, keep_everything(captured.graph), workload.model, workload.loss_fn)
        timer = OpTimer(step, steps=1)
        for done in (False, True):  # the second one for the host
            get_loss(step(*workload.batch)).backward()
            assert timer.done is done
        assert timer.compute_times_s() == pytest.approx({op.id: op.time_s for op in captured.graph.ops})


def test_allocation_rounding_does_not_exclude_ops_from_other_devices() -> None:
    with cuda_device():
        workload = make("tied")
        captured = profile_capture(capture(*workload), workload, PlanSettings(passes=1))
        static = collect_static(captured, TrainingStep(workload.model, workload.loss_fn), workload.batch)
        (other,) = profile_other_devices(captured, static, ["cuda:0"], passes=1)
        small = [op for op in captured.graph.program if any(captured.graph.tensors[t].size_bytes % 512 for t in op.outputs)]
        assert small and any(other.times_s[op.id] is not None for op in small)


@pytest.mark.parametrize("current", [1, *slow(0)])
def test_other_device_is_timed_on_that_device(current: int) -> None:
    with cuda_device(devices=2), torch.cuda.device(current):
        workload = on_device(make("tied"), "cuda:0")
        captured = profile_capture(capture(*workload), workload, PlanSettings(passes=1))
        static = collect_static(captured, TrainingStep(workload.model, workload.loss_fn), workload.batch)
        (other,) = profile_other_devices(captured, static, ["cuda:1"], passes=1)
        able = {op.id: op.time_s for op, time_s in zip(captured.graph.program, other.times_s, strict=True) if time_s is not None}
        assert len(able) > len(captured.graph.ops) // 2
        assert {op: other.times_s[op] for op in able} == pytest.approx(able)
        assert other.exact == tuple(able) and other.differs == ""
