"""The log of ops where the recorder measures the first executions of each signature, as on CUDA: here on the CPU."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphs.errors import BudgetError
from planner.eager import device_costs
from planner.eager.deferred_log import DeferredLog
from planner.eager.session import rematerialize
from tests.planner.eager.test_deferred_log import is_open
from tests.planner.eager.test_session import chain
from tests.support.eager.device_costs import Costs, measure_by

pytestmark = pytest.mark.skipif(not DeferredLog.available(), reason="there is no C++ compiler")


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Costs]:
    yield measure_by(Costs(), monkeypatch)
    device_costs._unserved.clear()


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*layers)


def test_each_signature_is_measured_twice_and_then_counts_as_long(costs: Costs) -> None:
    model, x = chain(), torch.randn(64, 64)
    with rematerialize("1GB") as session:
        measured = []
        for _ in range(6):
            model(x).square().mean().backward()
            model.zero_grad()
            measured.append(costs.measured)
        assert is_open(session)
        assert measured[0] < measured[2] <= measured[3] == measured[4] == measured[5]
        ops_before, seconds_before = session._entered.ops, session._entered.memory.clock_s
        model(x).square().mean().backward()
        recorder = session._entered
        assert recorder.memory.clock_s - seconds_before >= recorder.ops - ops_before


def test_what_an_op_takes_besides_its_outputs_has_room(costs: Costs) -> None:
    model, x = chain(), torch.randn(64, 64)
    costs.taken_bytes = 2**20
    with rematerialize("1GB") as session:
        for _ in range(4):
            model(x).square().mean().backward()
            model.zero_grad()
        assert is_open(session) and session.peak_bytes > 2**20
        log = session._reader.log
        live_bytes = session.peak_bytes - 2**20
        assert log.fits(10**9 - 2 * live_bytes) and not log.fits(10**9)


def test_a_convolution_has_memory_in_one_piece(costs: Costs) -> None:
    asked: Counter[int] = Counter()
    empty = torch.library.get_kernel(torch.ops.aten.empty.memory_format, "CPU")
    library = torch.library.Library("aten", "IMPL")

    def note(keys: torch._C.DispatchKeySet, sizes: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("dtype") is torch.uint8:
            asked[int(sizes[0])] += 1
        return empty.call_boxed(keys, sizes, **kwargs)

    costs.taken_bytes = 5 * 2**20
    model, x = convolutions(), torch.randn(8, 4, 32, 32)
    expected = [p.grad.clone() for p in train(model, x)]
    library.impl("empty.memory_format", note, "CPU", with_keyset=True)
    try:
        with rematerialize("1GB") as session:
            for _ in range(4):
                found = [p.grad.clone() for p in train(model, x)]
            asked.clear()
            train(model, x)
            assert is_open(session)
    finally:
        library._destroy()
    assert costs.blocks and [size for size in asked if size > costs.taken_bytes // 2]
    assert all(map(torch.equal, expected, found))


def train(model: nn.Module, x: Tensor) -> list[nn.Parameter]:
    model.zero_grad()
    model(x).square().mean().backward()
    return list(model.parameters())


def test_an_op_that_went_on_without_memory_ends_the_block(costs: Costs) -> None:
    fails: list[bool] = []
    kernel = torch.library.get_kernel(torch.ops.aten.tanh.default, "CPU")
    library = torch.library.Library("aten", "IMPL")

    def tanh(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
        if fails:
            device_costs._unserved[0] = 12345
            device_costs.FAILURES.value += 1
        return kernel.call_boxed(keys, *args)

    library.impl("tanh", tanh, "CPU", with_keyset=True)
    model, x = chain(), torch.randn(64, 64)
    try:
        with rematerialize("1GB") as session:
            for _ in range(4):
                model(x).square().mean().backward()
            assert is_open(session)
            fails.append(True)
            with pytest.raises(BudgetError, match=r"tanh.* had no memory for a workspace of 12\.3"):
                model(x)
    finally:
        library._destroy()
