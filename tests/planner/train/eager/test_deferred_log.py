"""Ops that are recorded only if memory runs out: what the recorder reads in the log is what it would have recorded itself."""

import contextlib
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.storages import LiveStorages
from graphs.errors import BudgetError
from planner.torch_private.core import TorchDispatchMode
from planner.train.eager import deferred_log
from planner.train.eager.deferred_log import DeferredLog, OpExchange
from planner.train.eager.log_reading import LogReader
from planner.train.eager.session import Rematerialization, rematerialize
from planner.train.eager.size_rules import iterate_tensors
from planner.train.eager.storages import RecordedOp
from tests.support.eager.chains import (
    RUNS,
    Failing,
    FailingWrites,
    Run,
    chain,
    checkpointed,
    is_open,
    penalized,
    train_on,
    with_buffers_that_change,
    with_choices,
    with_dropout,
    written_in_steps,
)
from tests.support.eager.models import LOOPS, Loop
from tests.support.eager.records import describe_records
from tests.support.eager.tensors import existing, other_bytes
from tests.support.native import NEEDS_LIBRARY

pytestmark = NEEDS_LIBRARY

aten = torch.ops.aten


_HELD = (checkpointed, with_choices)  # they need most of their peak


def opened(session: Rematerialization, run: Run, model: nn.Module, x: Tensor) -> None:
    """Run steps until the log is open."""
    for _ in range(2):
        run(model, x).backward()
        model.zero_grad()
    torch.ones(1).add(1)
    assert is_open(session)


def read(session: Rematerialization) -> None:
    """Have the recorder read the log at the next op."""
    session.debug.reader.log.shared.must_close = 1
    torch.ones(1)
    assert not is_open(session)


def forward(run: Run, *, deferred: bool, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what is recorded of a forward pass after two steps."""
    torch.manual_seed(0)
    model, x = chain(), torch.randn(64, 64)
    with monkeypatch.context() as patch:
        if not deferred:
            patch.setattr(DeferredLog, "is_available", lambda: False)
        with rematerialize("1GB") as session:
            opened(session, run, model, x) if deferred else [run(model, x).backward() for _ in range(2)]
            model.zero_grad()
            torch.manual_seed(1)
            loss = run(model, x)
            if deferred:
                assert is_open(session) or run is with_buffers_that_change or run is penalized
                read(session) if is_open(session) else None
            session.debug.recorder.memory.settle()
            state = describe_records(session.debug.recorder)
            del loss
    return state


@pytest.mark.parametrize("run", RUNS)
def test_deferred_log_equals_direct_recording(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert forward(run, deferred=True, monkeypatch=monkeypatch) == forward(run, deferred=False, monkeypatch=monkeypatch)


@pytest.mark.parametrize("run", RUNS)
def test_a_step_that_does_not_fit_after_steps_that_do(run: Run) -> None:
    """The log is read in the middle of the step: the results are eager PyTorch's, and the budget is kept."""
    batches = 16, 16, 200
    others = other_bytes()
    with LiveStorages(existing()) as live:
        expected = train_on(run, batches)
    others_now = other_bytes()
    budget = others_now + int((0.75 if run not in _HELD else 0.9) * (live.peak_bytes - others))
    with LiveStorages(existing()) as live, rematerialize(budget, max_recomputation=100) as session:
        results = train_on(run, batches, session)
        assert not is_open(session)
    assert session.evictions > 0
    assert live.peak_bytes <= budget and session.peak_bytes <= budget
    assert all(map(np.array_equal, results, expected))


def test_a_budget_just_above_the_peak_of_eager_pytorch_leaves_the_log_open() -> None:
    model, x = chain(), torch.randn(256, 64)

    def train(session: Rematerialization) -> None:
        for _ in range(4):
            with_dropout(model, x).backward()
            model.zero_grad()
        torch.ones(1).add(1)
        assert is_open(session)

    with rematerialize("1GB") as session:
        train(session)
    with rematerialize(int(1.02 * session.peak_bytes)) as session:
        train(session)
    assert session.evictions == 0
    assert session.peak_bytes > 0.95 * session.budget_bytes


def test_a_log_that_was_read_near_the_budget_is_not_opened_again() -> None:
    """Reading it in each step would take longer than recording."""
    model, x = chain(), torch.randn(256, 64)
    with rematerialize(other_bytes() + 10**6) as session:
        opened(session, with_dropout, model, x[:16])
        ballast = torch.empty(session.budget_bytes - other_bytes() - 50_000, dtype=torch.uint8)
        assert is_open(session)
        read(session)
        del ballast
        opened_again = False
        for _ in range(3):
            with_dropout(model, x[:16]).backward()
            model.zero_grad()
            opened_again |= is_open(session)
    assert session.evictions == 0
    assert not opened_again


def test_log_counts_peaks_without_being_read() -> None:
    """Peaks are exact, though storages that are freed are not reported."""
    model, x = chain(), torch.randn(256, 64)
    sessions = []
    for rows in (64, 256):  # the log sees the largest step
        with LiveStorages(existing()) as live, rematerialize("1GB") as session:
            for size in (32, rows):
                loss = written_in_steps(model, x[:size])
                loss.backward()
                model.zero_grad()
                torch.ones(1).add(1)
            assert is_open(session)
        assert session.peak_bytes == session.eager_peak_bytes == live.peak_bytes
        sessions.append(session)
    assert sessions[0].ops == sessions[1].ops > 100


def failing_chain(failing: Failing, run: Run) -> Rematerialization:
    """Check that a kernel that fails in an open log is tried again, with the results of eager PyTorch."""
    model, x = chain(), torch.randn(256, 64)
    run(model, x).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with rematerialize("1GB") as session:
        opened(session, run, model, x)
        with failing:
            run(model, x).backward()
        assert failing.calls > len(model)
    assert "out of memory    1 times" in str(session)
    assert all(torch.equal(wanted, p.grad) for wanted, p in zip(expected, model.parameters(), strict=True))
    return session


def test_out_of_memory_in_an_open_log_evicts_and_tries_again() -> None:
    assert failing_chain(Failing(torch.ops.aten.sin.default, 6), written_in_steps).evictions > 0


def test_a_write_that_fails_in_an_open_log_is_undone() -> None:
    assert failing_chain(FailingWrites(torch.ops.aten.addmm_.default, 6), written_in_steps).recomputed_ops > 0


def test_errors_of_the_program_are_raised_and_the_block_goes_on() -> None:
    model, x = chain(), torch.randn(32, 64)
    with rematerialize("1GB") as session:
        opened(session, with_dropout, model, x)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            x @ x
        with_dropout(model, x).backward()
        torch.ones(1).add(1)
        assert is_open(session)


def test_an_error_that_the_program_catches_keeps_nothing_of_its_step() -> None:
    model, x = chain(), torch.randn(256, 64)

    def failing_step() -> weakref.ref[Tensor]:
        made = model(x)
        with contextlib.suppress(RuntimeError):
            made @ torch.randn(3, 3)
        return weakref.ref(made)

    gc.disable()
    try:
        with rematerialize("1GB") as session:
            opened(session, with_dropout, model, x)
            assert failing_step()() is None
    finally:
        gc.enable()


def test_operators_that_return_or_take_other_objects() -> None:
    library = torch.library.Library("planner_test_objects", "DEF")
    library.define("named(Tensor x) -> (Tensor, str)")
    library.define("scaled(Tensor x, Dict(str, Tensor) by) -> Tensor")
    library.impl("named", lambda x: (x + 1.0, "one more"), "CPU")
    library.impl("scaled", lambda x, by: x * by["all"], "CPU")
    ops = torch.ops.planner_test_objects
    try:
        for budget in (10**9, other_bytes() + 1_000_000):
            model, x = chain(), torch.ones(8, 64)
            with rematerialize(budget) as session:
                if budget == 10**9:
                    opened(session, with_dropout, model, x)
                made, name = ops.named(x)
                assert name == "one more" and torch.equal(ops.scaled(made, {"all": made}), x * 4.0)
                read(session)
                with_dropout(model, x).backward()
    finally:
        library._destroy()


def test_resized_outputs_of_logged_ops_are_counted() -> None:
    out, x = torch.empty(0), torch.randn(2**16)
    with rematerialize("1GB") as session:
        opened(session, with_dropout, chain(), torch.randn(32, 64))
        torch.add(x, x, out=out)
        read(session)
        assert abs(session.debug.recorder.memory.live_bytes - other_bytes()) < 1000


def test_a_step_without_end_closes_the_log() -> None:
    x = torch.ones(2, requires_grad=True)
    with rematerialize("1GB") as session:
        opened(session, with_dropout, chain(), torch.randn(32, 64))
        held = x.sin()
        for _ in range(2**15 + 2):
            x.detach() * 2.0
        assert not is_open(session)
        held.sum().backward()
        torch.ones(1).add(1)
        assert is_open(session)


def test_ops_logged_between_steps_are_forgotten() -> None:
    with rematerialize("1GB") as session:
        opened(session, with_dropout, chain(), torch.randn(32, 64))
        reader = session.debug.reader
        model = chain(2)
        for _ in range(2000):
            with torch.no_grad():
                torch.rand(4) + model(torch.ones(64)).sum()
        assert reader.log.length < 100
        assert len(reader._draws) < 4000


class Shrinking(TorchDispatchMode):
    """While entered, counts ops; before one of them the budget becomes smaller, and the recorder reads the log."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0
        self.last = -1
        self.session: Rematerialization | None = None
        self.budget_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if self.ops == self.last:
            assert is_open(self.session)
            self.session.debug.reader.log.shared.must_close = 1
            self.session.debug.recorder.memory.budget_bytes = self.budget_bytes
        self.ops += 1
        return function(*args, **(kwargs or {}))


def train(build: Callable[[], Loop], session: Rematerialization | None, shrinking: Shrinking) -> list[np.ndarray]:
    """Return the results of three steps, and leave the number of ops before the last one in `shrinking`."""
    torch.manual_seed(0)
    loop = build()
    results = []
    with shrinking, session or nullcontext():
        for index in range(3):
            before = shrinking.ops
            results += loop.step(index)
    shrinking.last = before
    return [*results, *loop.state()]


@pytest.mark.parametrize("at", [pytest.param(0.15, marks=pytest.mark.slow), 0.35, pytest.param(0.7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name == "tree_lstm" else name for name in LOOPS])
def test_reading_at_any_op_gives_the_bits_of_eager(name: str, at: float) -> None:
    others = other_bytes()
    with LiveStorages(existing()) as live:
        expected = train(LOOPS[name], None, counted := Shrinking())
    shrinking = Shrinking()
    shrinking.last = counted.last + int(at * (counted.ops - counted.last))
    shrinking.budget_bytes = other_bytes() + int(0.7 * (live.peak_bytes - others))
    shrinking.session = session = rematerialize("4GB", max_recomputation=100)
    results = train(LOOPS[name], session, shrinking)
    assert at > 0.2 or session.evictions > 0
    assert len(results) == len(expected)
    assert all(np.array_equal(result, wanted, equal_nan=True) for result, wanted in zip(results, expected, strict=True))


@pytest.mark.parametrize("is_read", [False, True])
def test_a_write_to_a_tensor_saved_in_an_open_log_raises(is_read: bool) -> None:
    weight = torch.randn(64, 64, requires_grad=True)
    with rematerialize("1GB") as session:
        opened(session, with_dropout, chain(), torch.randn(32, 64))
        made = (weight @ torch.randn(64, 64)).exp()  # which is saved
        leaf = torch.randn(64, 64)
        products = [(weight * leaf).sum(), made.sum()]
        made.mul_(2)
        leaf.add_(1)
        assert is_open(session)
        if is_read:
            read(session)
        for product in products:
            with pytest.raises(RuntimeError, match="is at version 1; expected version 0 instead"):
                product.backward()


def test_saved_tensors_are_freed_with_their_graph() -> None:
    """An output that is saved does not keep itself, nor an input its storage."""
    with rematerialize("1GB") as session:
        opened(session, with_dropout, chain(), torch.randn(32, 64))
        log = session.debug.reader.log
        gc.collect()
        gc.disable()
        try:
            leaf = torch.randn(64, requires_grad=True)
            made = leaf.exp()
            freed = [weakref.ref(tensor.untyped_storage()) for tensor in (leaf, made)]
            product = made * made
            assert log.shared.saved == 3 and log.shared.in_step
            del leaf, made
            assert all(ref() is not None for ref in freed)
            del product
            assert log.shared.saved == 0 and not log.shared.in_step
            assert all(ref() is None for ref in freed)
        finally:
            gc.enable()


def test_compiled_functions_run_eagerly_and_are_seen() -> None:
    function = torch.compile(lambda x: (x.sin() * 2).cos().sum(), backend="eager")
    x = torch.randn(8, requires_grad=True)
    function(x).backward()
    x.grad = None
    with rematerialize("1GB") as session:
        opened(session, with_dropout, chain(), torch.randn(32, 64))
        before = session.ops
        function(x).backward()
        assert session.ops > before + 8


def test_memory_of_sparse_results_counts() -> None:
    with rematerialize("1GB") as session:
        opened(session, with_dropout, chain(), torch.randn(32, 64))
        before = session.peak_bytes
        held = [torch.ones(1000, 10_000).to_sparse() for _ in range(2)]
        assert is_open(session)
    assert session.peak_bytes - before > sum(part.nbytes for part in (held[0]._indices(), held[1]._indices()))


def test_new_sizes_need_no_python_far_below_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound of the outputs from the shapes of the inputs does; peaks count what the ops have made."""
    in_python: list[str] = []
    run = LogReader._run

    def noting(self: LogReader, op: RecordedOp, call: OpExchange) -> Any:
        in_python.append(op.operator.name)
        return run(self, op, call)

    def step(rows: int) -> None:
        x = torch.arange(rows * 64).view(rows, 64) / 10**6
        for layer in model:
            x = torch.tanh(layer(x) * 2.0)
        chosen = (x.detach().mean(1) > 0.0).nonzero().flatten()
        x = torch.cat((x[chosen], x.index_select(0, chosen), x.new_zeros(rows, 64), table(chosen)))
        torch.bmm(x.view(-1, 8, 8), x.view(-1, 8, 8)).square().sum().backward()
        model.zero_grad()

    def names(budget: int) -> set[str]:
        with rematerialize(budget) as session:
            step(3000)
            step(3000)
            in_python.clear()
            step(3001)
            assert is_open(session)
        peaks.append(session.peak_bytes)
        return set(in_python)

    model, table, peaks = chain(layers=3), nn.Embedding(3002, 64), list[int]()
    monkeypatch.setattr(LogReader, "_run", noting)
    far = names(10**9)
    near = names(int(1.12 * peaks[0]))
    with monkeypatch.context() as patch:
        patch.setattr(deferred_log, "bound_of", lambda _: 0)
        without = names(10**9)
    from_other_sizes = ("cat", "embedding", "index", "index_select", "new_zeros", "nonzero")
    bounded = {f"aten::{name}" for name in ("addmm", "mm", "bmm", "tanh", "tanh_backward", "sum", "mul", *from_other_sizes)}
    assert bounded <= without and not bounded & far and bounded & near
    assert "aten::arange" in far
    assert peaks[0] == peaks[1] == peaks[2]


def bounded() -> list[tuple[Any, tuple[Any, ...]]]:
    """Ops with arguments, made in each test: tensors from before would not count, because the collector does not see them."""
    numbers, positions, mask = torch.ones(6, 8, 10), torch.tensor([0, 2, 2]), torch.tensor([True] * 5 + [False])
    return [
        (aten._ctc_loss.default, (torch.zeros(100, 2, 3), torch.ones(2, 90, dtype=torch.int64), [100, 100], [90, 1])),
        (aten._log_softmax.default, (numbers.double(), 1, False)),
        (aten._pack_padded_sequence.default, (torch.ones(100, 2, 50), torch.tensor([100, 100]), False)),
        (aten.add.Tensor, (numbers[0], torch.ones(1000, 1, 1).double())),
        (aten.bincount.default, (torch.tensor([10_000]),)),
        (aten.bincount.default, (positions, None, 10_000)),
        (aten.cat.default, ([numbers, numbers, numbers[:2]],)),
        (aten.embedding.default, (numbers[0], torch.zeros(1000, dtype=torch.int64))),
        (aten.gather.default, (numbers, 0, torch.zeros(6, 8, 1, dtype=torch.int64))),
        (aten.index.Tensor, (numbers, [None, positions[:, None], positions])),
        (aten.index.Tensor, (numbers, [mask, torch.zeros(5, dtype=torch.int64)])),
        (aten.index.Tensor, (numbers, [numbers[..., 0] > 0])),
        (aten.index.Tensor, (torch.ones(6), [torch.zeros(1000, 10, dtype=torch.int64)])),
        (aten.index_select.default, (numbers, -2, torch.zeros(1000, dtype=torch.int64))),
        (aten.linalg_lstsq.default, (torch.eye(2, 3), torch.ones(2, 5000), None)),
        (aten.masked_select.default, (numbers[0], numbers > 0)),
        (aten.mm.default, (torch.ones(1000, 2), torch.ones(2, 100))),
        (aten.native_layer_norm.default, (numbers, [10], None, None, 1e-5)),
        (aten.new_zeros.default, (numbers, [100, 100])),
        (aten.nonzero.default, (numbers,)),
        (aten.nonzero.default, (torch.ones(100, 100),)),
        (aten.randn.default, ([100, 100],)),
        (aten.repeat_interleave.Tensor, (torch.tensor([5000, 4000]),)),
        (aten.sort.default, (positions.repeat(1000),)),
        (aten.sum.dim_IntList, (torch.ones(0, 1000), [0])),
        (aten.topk.default, (numbers, 4)),
        (aten._unique2.default, (torch.arange(1000), True, False, False)),
        (aten.unique_dim.default, (torch.arange(1000), 0, True, True, True)),
        (aten.unique_consecutive.default, (torch.arange(1000), True)),
    ]


@pytest.mark.parametrize("number", range(len(bounded())))
def test_size_bounds_are_not_below_output_sizes(number: int) -> None:
    """An op that is one byte too large is not executed by the log, which its bound would allow if it were too low."""
    function, args = bounded()[number]
    made_bytes = sum(t.nbytes for t in iterate_tensors(function(*args)))
    model, budget = chain(), other_bytes() + 10**8
    with rematerialize(budget) as session:
        opened(session, with_dropout, model, torch.randn(8, 64))
        ballast = torch.empty(budget - other_bytes() - made_bytes + 1, dtype=torch.uint8)
        assert is_open(session)
        with pytest.raises(BudgetError):
            function(*args)
        del ballast


def by_default_in_double(make: Callable[[], Tensor]) -> Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        return make()
    finally:
        torch.set_default_dtype(torch.float32)


def of_more() -> list[tuple[Callable[[], object], Callable[[], object]]]:
    """Pairs of calls with tensors of the same shapes, of which the second makes more."""
    many, column, row = torch.ones(10_000, dtype=torch.int32), torch.ones(100, 1), torch.ones(1, 100)
    double, wide = torch.tensor(2.5, dtype=torch.float64), torch.ones(1, 9901)[:, ::100]
    return [
        (lambda: torch.arange(0.0, 10.0), lambda: torch.arange(0.0, 1e4)),
        (lambda: many * 2.5, lambda: many * double),
        (lambda: torch.zeros(10_000), lambda: by_default_in_double(lambda: torch.zeros(10_000))),
        (lambda: many * 2.5, lambda: by_default_in_double(lambda: many * 2.5)),
        (lambda: torch.repeat_interleave(torch.tensor([1])), lambda: torch.repeat_interleave(torch.tensor([10_000]))),
        (lambda: torch.mul(column, row, out=torch.empty(100, 100)), lambda: torch.mul(column, row, out=torch.empty(0))),
        (lambda: torch.mm(column, row, out=torch.empty(100, 100)), lambda: torch.mm(column, row, out=torch.empty(0))),
        (lambda: torch.mm(column, row, out=torch.empty(10_000)[:0]), lambda: torch.mm(column, row, out=torch.empty(0))),
        (lambda: torch.nonzero(row, out=torch.empty(100, 2).long()), lambda: torch.nonzero(row, out=torch.empty(0).long())),
        (lambda: torch.cat([row, row], out=torch.empty(2, 100)), lambda: torch.cat([row, row], out=torch.empty(0))),
        (lambda: torch.arange(0.0, 10.0, out=torch.empty(0)), lambda: torch.arange(0.0, 1e4, out=torch.empty(0))),
        (lambda: of_length(row, 10.0), lambda: of_length(row, 1e4)),
        (lambda: torch.select_scatter(row, row[:, 0], 1, 0), lambda: torch.select_scatter(wide, row[:, 0], 1, 0)),
    ]


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("number", range(len(of_more())))
def test_an_op_is_not_taken_for_one_that_makes_less(number: int, *, deferred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = of_more()[number]
    made_bytes = sum(t.untyped_storage().nbytes() for t in iterate_tensors(other()))
    model, budget = chain(), other_bytes() + 10**8
    if not deferred:
        monkeypatch.setattr(DeferredLog, "is_available", lambda: False)
    with rematerialize(budget) as session:
        if deferred:
            opened(session, with_dropout, model, torch.randn(8, 64))
        one()
        assert not deferred or is_open(session)
        ballast = torch.empty(budget - other_bytes() - made_bytes + 1, dtype=torch.uint8)
        with pytest.raises(BudgetError):
            other()
        del ballast


@torch.library.custom_op("tests::of_length", mutates_args=())
def of_length(x: Tensor, length: float) -> Tensor:
    return x.new_ones(int(length))


@of_length.register_fake
def _(x: Tensor, length: float) -> Tensor:
    return x.new_empty(int(length))


@torch.library.custom_op("tests::of_sizes", mutates_args=())
def of_sizes(sizes: Tensor) -> Tensor:
    return torch.ones(int(sizes.sum()))


def test_unforeseen_output_sizes_count_and_trigger_eviction() -> None:
    model, budget = chain(), other_bytes() + 10**8
    with rematerialize(budget) as session:
        opened(session, with_dropout, model, torch.randn(8, 64))
        of_sizes(torch.tensor([10]))
        saved = torch.ones(1_000_000, requires_grad=True).exp().sum()
        ballast = torch.empty(budget - other_bytes() - 1000, dtype=torch.uint8)
        assert is_open(session)
        held = of_sizes(torch.tensor([1_000_000]))
        assert session.peak_bytes >= other_bytes() > budget and session.evictions == 0
        torch.ones(1).add(1.0)
        assert session.evictions > 0
        del held, ballast, saved


def test_a_tensor_for_results_that_grows_is_recomputed_with_them() -> None:
    model, x = chain(), torch.randn(256, 64)

    def step() -> Tensor:
        with torch.no_grad():
            products = torch.mul(x, x, out=torch.empty(0)).add_(1.0)
        w = torch.ones(256, 64, requires_grad=True)
        loss = (products * w).sum()
        del products
        (model(x).square().sum() + loss).backward()
        assert w.grad is not None
        return w.grad

    expected = step()
    with rematerialize(other_bytes() + 600_000) as session:
        for _ in range(3):
            assert torch.equal(step(), expected)
            model.zero_grad()
    assert session.evictions > 0
