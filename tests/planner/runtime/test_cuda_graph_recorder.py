"""What records CUDA graphs, on a stand-in of ``torch.cuda`` and on a GPU."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphs.capture.trace import capture
from graphs.errors import TraceError
from planner.runtime.cuda_graph import CudaGraphs
from planner.runtime.executor import Executor
from planner.runtime.graphed_step import recordable
from tests.support.recorded_steps import LOOPS, assert_same, on_cuda, recorded, train
from tests.support.steps import random_schedule

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class FakeCuda:
    """As much of ``torch.cuda`` as a recorder asks for, without a device; leaving a capture that failed fails as well."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.stream = SimpleNamespace(device=torch.device("cpu"), wait_stream=lambda other: self.log.append("wait"))
        arguments = inspect.signature(torch.cuda.graph)

        @contextmanager
        def graph(*args: Any, **options: Any) -> Iterator[None]:
            assert arguments.bind(*args, **options).arguments["pool"] == (0, 7)
            self.log.append("begin")
            try:
                yield
            except RuntimeError:
                raise RuntimeError("operation failed due to a previous error during capture") from None
            finally:
                self.log.append("end")

        segments = [{"segment_pool_id": (0, pool), "total_size": 2**pool} for pool in (0, 7, 8, 7)]
        fakes = {
            "graph_pool_handle": lambda: (0, 7),
            "Stream": lambda device: self.stream,
            "current_stream": lambda device: self.stream,
            "stream": nullcontext,
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: self.log.append("replay")),
            "graph": graph,
            "memory_snapshot": lambda: segments,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        clear = "_cuda_clearCublasWorkspaces"
        monkeypatch.setattr(torch._C, clear, lambda: self.log.append("clear"), raising=False)


def test_cuda_graphs_warm_up_capture_and_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(monkeypatch)
    recorder = CudaGraphs(torch.device("cpu"))
    recorder.warm_up(lambda: fake.log.append("run"))
    assert fake.log == ["wait", "run", "run", "run", "wait"]
    fake.log.clear()
    returned, replay = recorder.record(lambda a, b: a + b, 1, 2)
    replay()
    assert returned == 3
    assert fake.log == ["clear", "begin", "end", "clear", "replay"]
    assert recorder.held_bytes() == 2 * 2**7


def test_a_capture_that_fails_says_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(monkeypatch)

    def waits() -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    said = "cannot be captured as a CUDA graph: operation not permitted when stream is capturing; leave out cuda_graph=True"
    with pytest.raises(TraceError, match=said):
        CudaGraphs(torch.device("cpu")).record(waits)
    assert fake.log[-1] == "clear"


@pytest.mark.gpu
@pytest.mark.parametrize("loop", LOOPS)
def test_a_cuda_graph_trains_as_the_planned_step_does(loop: str) -> None:
    workload, other = on_cuda(), on_cuda()
    captured = recordable(capture(*other))
    launched = Executor(captured, random_schedule(captured.graph, 1), other.model, other.loss_fn)
    replayed = recorded(workload, recorder=CudaGraphs(torch.device("cuda", torch.cuda.current_device())))
    wanted, found = train(other, launched, **LOOPS[loop]), train(workload, replayed, **LOOPS[loop])
    assert_same(wanted, found)
