"""What records CUDA graphs; on a stand-in for CUDA, and on a GPU with ``-m gpu``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphs.errors import TraceError
from planner.capture.trace import capture
from planner.runtime.cuda.cuda_graph import CudaGraphs
from planner.runtime.cuda.graphed_step import prepare_for_recording
from planner.runtime.executor import Executor
from tests.support.cuda_device import Order, cuda_device
from tests.support.cuda_device.memory import WORKSPACE_BYTES
from tests.support.cuda_device.steps import LOOPS, dropout_and_norm, recorded, train
from tests.support.marks import slow_except
from tests.support.models.outcomes import assert_same
from tests.support.models.steps import random_schedule

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

CUDA = torch.device("cuda:0")
MIB = 2**20


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
