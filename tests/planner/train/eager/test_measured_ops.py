"""Ops whose first executions of each signature are measured by waiting for a device, as on CUDA; here on the CPU."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.storages import LiveStorages
from planner.graphs.errors import BudgetError
from planner.train.eager import device_costs
from planner.train.eager.session import rematerialize
from tests.support.eager.chains import RUNS, Run, chain, train_on, with_dropout
from tests.support.eager.device_costs import Costs, measure_by
from tests.support.eager.tensors import existing, other_bytes
from tests.support.native import NEEDS_LIBRARY

pytestmark = NEEDS_LIBRARY


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Costs]:
    yield measure_by(Costs(), monkeypatch)
    device_costs.unserved.clear()


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("run", RUNS)
def test_a_step_that_does_not_fit_after_steps_that_do(run: Run, costs: Costs) -> None:
    batches = 16, 16, 16, 200
    others = other_bytes()
    with LiveStorages(existing()) as live:
        expected = train_on(run, batches)
    budget = other_bytes() + int(0.9 * (live.peak_bytes - others))
    with LiveStorages(existing()) as live, rematerialize(budget, max_recomputation=100) as session:
        results = train_on(run, batches, session)
    assert session.evictions > 0 and live.peak_bytes <= budget
    assert all(map(np.array_equal, results, expected))


def test_each_signature_is_measured_twice_and_then_counts_as_long(costs: Costs) -> None:
    model, x = chain(), torch.randn(64, 64)
    with rematerialize("1GB") as session:
        measured = []
        for _ in range(6):
            model(x).square().mean().backward()
            model.zero_grad()
            measured.append(costs.measured)
        assert measured[0] < measured[1] == measured[2] == measured[5]
        ops_before, seconds_before = session.debug.memory.ops, session.debug.memory.clock_s
        model(x).square().mean().backward()
        recorder = session.debug
        assert recorder.memory.clock_s - seconds_before >= recorder.memory.ops - ops_before


@pytest.mark.parametrize("budget", ["far", "near"])
def test_sizes_that_are_new_in_each_step(budget: str, costs: Costs) -> None:
    """Only the first of each operator are measured, but for convolutions."""

    def step(rows: int) -> int:
        before = costs.measured
        x = torch.randn(rows, 4, 8, 8)
        with_dropout(model, convolution(x).view(-1, 64)).backward()
        model.zero_grad()
        return costs.measured - before

    model, convolution = chain(layers=2), nn.Conv2d(4, 4, 3, padding=1)
    with rematerialize("1GB") as session:
        peak_bytes = max(step(rows) and session.peak_bytes for rows in range(50, 70))
    with rematerialize(10**9 if budget == "far" else int(1.12 * peak_bytes)) as session:
        measured = [step(rows) for rows in range(50, 70)]
        ops, seconds = session.ops, session.debug.memory.clock_s
    assert session.peak_bytes == peak_bytes
    assert 0.8 * ops < seconds < 1.2 * ops
    assert min(measured[:3]) > 10
    assert max(measured[-3:]) == 2


def test_estimated_workspaces_count_in_the_peak(costs: Costs) -> None:
    costs.taken_bytes = 4 * 2**20

    def peak_bytes(sizes: list[int]) -> int:
        model, before = chain(3), other_bytes()
        with rematerialize(before + 10**9) as session:
            for rows in sizes:
                model(torch.randn(rows, 64)).square().sum().backward()
                model.zero_grad()
        return session.peak_bytes - before

    measured, estimated = peak_bytes([100] * 10 + [4000] * 3), peak_bytes([*range(100, 110), 4000])
    assert measured <= estimated <= measured + costs.taken_bytes


def test_convolutions_ask_for_a_block_of_their_size(costs: Costs) -> None:
    costs.taken_bytes = 2**20
    model, x = convolutions(), torch.randn(8, 4, 32, 32)
    expected = [p.grad.clone() for p in train(model, x)]
    with rematerialize(2**60):
        for _ in range(4):
            found = [p.grad.clone() for p in train(model, x)]
    assert set(costs.blocks[-4:]) == {2**20}
    assert all(map(torch.equal, expected, found))


def train(model: nn.Module, x: Tensor) -> list[nn.Parameter]:
    model.zero_grad()
    model(x).square().mean().backward()
    return list(model.parameters())


@pytest.mark.parametrize("in_this_thread", [False, True])
def test_an_op_that_went_on_without_memory_ends_the_block(costs: Costs, *, in_this_thread: bool) -> None:
    fails: list[bool] = []
    kernel = torch.library.get_kernel(torch.ops.aten.tanh.default, "CPU")
    library = torch.library.Library("aten", "IMPL")

    def fail() -> None:
        device_costs.unserved[threading.get_ident(), 0] = 12345

    def tanh(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
        if fails and in_this_thread:
            fail()
        elif fails:
            other = threading.Thread(target=fail)
            other.start()
            other.join()
        return kernel.call_boxed(keys, *args)

    library.impl("tanh", tanh, "CPU", with_keyset=True)
    model, x = chain(), torch.randn(64, 64)
    try:
        with rematerialize("1GB"):
            for _ in range(4):
                model(x).square().mean().backward()
            fails.append(True)
            if in_this_thread:
                with pytest.raises(BudgetError, match=r"tanh.* had no memory for a workspace of 12\.3"):
                    model(x)
            else:
                model(x)
    finally:
        library._destroy()


def test_ops_that_data_sizes_count_as_long_as_they_were_measured(costs: Costs) -> None:
    model, x = chain(), torch.ones(8, 64)
    with rematerialize("1GB") as session:
        model(x).sum().backward()
        before, measured = session.debug.memory.clock_s, costs.measured
        for _ in range(4):
            x.nonzero()
        assert session.debug.memory.clock_s >= before + 4
        assert costs.measured == measured + 4


def test_errors_of_python_kernels_are_raised_once() -> None:
    errors: list[BaseException] = []
    library = torch.library.Library("planner_test_error", "DEF")
    library.define("fails(Tensor x) -> Tensor")
    library.define("takes(Tensor[] xs, Tensor? y) -> ()")

    def fails(x: Tensor) -> Tensor:
        if errors:
            raise errors.pop()
        return torch.ones_like(x)

    library.impl("fails", fails, "CPU")
    library.impl("takes", lambda xs, y: None, "CompositeExplicitAutograd")
    fail, take = torch.ops.planner_test_error.fails, torch.ops.planner_test_error.takes
    model, x = chain(), torch.ones(8, 64)
    try:
        with rematerialize("1GB"):
            model(x).sum().backward()
            for _ in range(3):
                fail(x)
            for error in (ValueError("mine"), KeyboardInterrupt()):
                errors.append(error)
                with pytest.raises(type(error)):
                    fail(x)
            assert torch.equal(fail(x), x)
            take([x], None)
            take([], x)
    finally:
        library._destroy()
