"""The op log where the recorder measures the first executions of each signature, as on CUDA; here on the CPU."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.storages import LiveStorages
from graphs.errors import BudgetError
from planner.torch_private.core import storage_address
from planner.train.eager import deferred_log, device_costs
from planner.train.eager.deferred_log import OpExchange, UnreadOp
from planner.train.eager.log_reading import LogReader
from planner.train.eager.session import Rematerialization, rematerialize
from planner.train.eager.storages import RecordedOp
from tests.support.eager.chains import RUNS, Run, chain, is_open, train_on, with_dropout
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


def read_log(session: Rematerialization) -> None:
    """Close and read the log, from a thread whose ops it does not see."""

    def read() -> None:
        with recorder.lock:
            reader._read()

    recorder, reader = session.debug.recorder, session.debug.reader
    assert reader is not None
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()


@pytest.mark.parametrize("run", RUNS)
def test_a_step_that_does_not_fit_after_steps_that_do(run: Run, costs: Costs) -> None:
    batches = 16, 16, 16, 200
    others = other_bytes()
    with LiveStorages(existing()) as live:
        expected = train_on(run, batches)
    budget = other_bytes() + int(0.9 * (live.peak_bytes - others))
    with LiveStorages(existing()) as live, rematerialize(budget, max_recomputation=100) as session:
        results = train_on(run, batches, session)
        assert not is_open(session)
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
        assert is_open(session)
        assert measured[0] < measured[2] <= measured[3] == measured[4] == measured[5]
        ops_before, seconds_before = session.debug.recorder.ops, session.debug.recorder.memory.clock_s
        model(x).square().mean().backward()
        recorder = session.debug.recorder
        assert recorder.memory.clock_s - seconds_before >= recorder.ops - ops_before


@pytest.mark.parametrize("budget", ["far", "near"])
def test_sizes_that_are_new_in_each_step(budget: str, costs: Costs) -> None:
    """Far below the budget, only the first of each operator are measured, but for convolutions."""

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
        ops, seconds = session.ops, session.debug.recorder.memory.clock_s
        assert is_open(session)
    assert session.peak_bytes == peak_bytes
    assert 0.8 * ops < seconds < 1.2 * ops
    assert min(measured[:3]) > 10
    assert max(measured[-3:]) == 2 if budget == "far" else min(measured[-3:]) > 2


def test_log_reserves_room_for_workspaces(costs: Costs) -> None:
    model, x = chain(), torch.randn(64, 64)
    costs.taken_bytes = 2**20
    with rematerialize("1GB") as session:
        for _ in range(4):
            model(x).square().mean().backward()
            model.zero_grad()
        assert is_open(session) and session.peak_bytes > 2**20
        log = session.debug.reader.log
        live_bytes = session.peak_bytes - 2**20
        assert log.fits(10**9 - 2 * live_bytes) and not log.fits(10**9)


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


def test_ops_that_need_a_block_are_measured_in_each_size(costs: Costs) -> None:
    state, sizes = torch.zeros(4), range(1, 13)

    def convolution_update(x: Tensor, y: Tensor) -> None:
        x.add_(y.sum())

    library = torch.library.Library("planner_test_blocks", "DEF")
    library.define("convolution_update(Tensor(a!) x, Tensor y) -> ()")
    library.impl("convolution_update", convolution_update, "CPU")
    try:
        with rematerialize("1GB") as session:
            chain()(torch.randn(8, 64)).sum().backward()
            torch.ones(1).add(1)
            assert is_open(session)
            before = costs.measured
            for size in sizes:
                torch.ops.planner_test_blocks.convolution_update(state, torch.ones(size))
            assert is_open(session)
    finally:
        library._destroy()
    assert costs.measured >= before + len(sizes)
    assert state[0] == sum(sizes)


@pytest.mark.parametrize("taken_bytes", [2**20, 2**55])
def test_convolution_without_contiguous_memory_closes_the_log(taken_bytes: int, costs: Costs) -> None:
    costs.taken_bytes = taken_bytes
    model, x = convolutions(), torch.randn(8, 4, 32, 32)
    expected = [p.grad.clone() for p in train(model, x)]
    with rematerialize(2**60) as session:
        for _ in range(4):
            found = [p.grad.clone() for p in train(model, x)]
        assert costs.blocks and is_open(session)
        y = model[0](x)
        assert is_open(session) == (taken_bytes < 2**50)
    assert y.shape == x.shape
    assert all(map(torch.equal, expected, found))


def train(model: nn.Module, x: Tensor) -> list[nn.Parameter]:
    model.zero_grad()
    model(x).square().mean().backward()
    return list(model.parameters())


@pytest.mark.parametrize("in_this_thread", [False, True])
def test_an_op_that_went_on_without_memory_ends_the_block(costs: Costs, *, in_this_thread: bool) -> None:
    log_library = deferred_log._find_functions()
    fails: list[bool] = []
    kernel = torch.library.get_kernel(torch.ops.aten.tanh.default, "CPU")
    library = torch.library.Library("aten", "IMPL")

    def fail() -> None:
        device_costs.unserved[threading.get_ident(), 0] = 12345
        log_library.deferred_failed(-1)

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
        with rematerialize("1GB") as session:
            for _ in range(4):
                model(x).square().mean().backward()
            assert is_open(session)
            fails.append(True)
            if in_this_thread:
                with pytest.raises(BudgetError, match=r"tanh.* had no memory for a workspace of 12\.3"):
                    model(x)
            else:
                model(x)
                assert is_open(session)
    finally:
        library._destroy()


def test_the_log_closes_between_ops_of_another_thread() -> None:
    """As autograd's threads for the CPU and for a device do, one closes the log while the other executes ops."""

    def steps() -> list[np.ndarray]:
        torch.manual_seed(1)
        model, results = chain(), []
        for rows in range(1, 33):
            loss = with_dropout(model, torch.randn(rows, 64))
            loss.backward()
            results += [t.detach().numpy().copy() for t in (loss, *(p.grad for p in model.parameters()))]
        return results

    def close() -> None:
        while not done.wait(0.0005):
            if is_open(session):
                with session.debug.recorder.lock:
                    if is_open(session):
                        session.debug.reader._read()
                        closed.append(1)

    with rematerialize("1GB") as alone:
        expected = steps()
    done, closed = threading.Event(), []
    with rematerialize("1GB") as session:
        other = threading.Thread(target=close)
        other.start()
        try:
            found = steps()
        finally:
            done.set()
            other.join()
    assert len(closed) > 10
    assert (session.ops, session.kept_ops) == (alone.ops, alone.kept_ops)
    assert all(map(np.array_equal, found, expected))


def test_an_interrupt_behind_an_op_does_not_keep_the_log_open(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = chain(), torch.randn(8, 64)
    run = LogReader._run

    def interrupted(self: LogReader, op: RecordedOp, call: OpExchange) -> Any:
        run(self, op, call)
        raise KeyboardInterrupt

    with rematerialize("1GB") as session:
        for _ in range(2):
            model(x).square().mean().backward()
        assert is_open(session)
        with monkeypatch.context() as patch:
            patch.setattr(LogReader, "_run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                torch.rand(3)
        read_log(session)  # waited forever
        assert not is_open(session)


def test_a_step_ends_while_another_thread_executes_an_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log drops ended steps, and numbers storages anew, when no op is under way."""
    inside, dropped = threading.Event(), threading.Event()
    read: list[tuple[int, int]] = []
    record = LogReader._record

    def noting(self: LogReader, op: RecordedOp, unread: UnreadOp) -> Any:
        if op.operator.name == "planner_test_log::slow":
            assert unread.outputs[0] is not None
            read.append((storage_address(op.args[0]), storage_address(unread.outputs[0])))
        return record(self, op, unread)

    monkeypatch.setattr(LogReader, "_record", noting)
    library = torch.library.Library("planner_test_log", "DEF")
    library.define("slow(Tensor x) -> Tensor")
    library.define("wait(Tensor x) -> Tensor")  # TorchScript leaves out ops without results
    library.define("go_on(Tensor x) -> Tensor")
    waits: list[bool] = []

    def slow(x: Tensor) -> Tensor:
        if waits:
            inside.set()
            assert dropped.wait(20)
        return torch.ones_like(x)

    def wait(x: Tensor) -> Tensor:
        assert inside.wait(20)
        return x + 1.0

    def go_on(x: Tensor) -> Tensor:
        dropped.set()
        return x + 1.0

    for function in (slow, wait, go_on):
        library.impl(function.__name__, function, "CPU")
    script = torch.jit.CompilationUnit("""
        def in_thread(x: Tensor):
            return torch.ops.planner_test_log.slow(x)

        def both(x: Tensor):
            slow = torch.jit._fork(in_thread, x)
            x = torch.ops.planner_test_log.wait(x)
            for i in range(100):
                x = x + 1.0
            x = torch.ops.planner_test_log.go_on(x)
            return torch.jit._wait(slow), x
    """)
    try:
        with rematerialize("1GB") as session:
            model = nn.Linear(8, 8)
            for _ in range(3):
                model(torch.ones(2, 8)).sum().backward()
            for _ in range(66):
                torch.ones(3).sin()
            held = [torch.ones(50).sin() for _ in range(20)]
            x = torch.ones(100)
            torch.ops.planner_test_log.slow(x)
            del held  # from here on, the log may give `x` a lower number
            waits.append(True)
            made, _ = script.both(x)
            assert is_open(session)
            read_log(session)
        assert read[-1] == (storage_address(x), storage_address(made))
    finally:
        library._destroy()


def test_ops_that_data_sizes_count_as_long_as_they_were_measured(costs: Costs) -> None:
    model, x = chain(), torch.ones(8, 64)
    with rematerialize("1GB") as session:
        model(x).sum().backward()
        torch.ones(1).sin()
        assert is_open(session)
        before, measured = session.debug.recorder.memory.clock_s, costs.measured
        for _ in range(4):
            x.nonzero()
        assert session.debug.recorder.memory.clock_s >= before + 4
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
        with rematerialize("1GB") as session:
            model(x).sum().backward()
            for _ in range(3):
                fail(x)
            assert is_open(session)
            for error in (ValueError("mine"), KeyboardInterrupt()):
                errors.append(error)
                with pytest.raises(type(error)):
                    fail(x)
            assert torch.equal(fail(x), x) and is_open(session)
            take([x], None)
            take([], x)
    finally:
        library._destroy()
