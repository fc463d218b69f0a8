"""Ops that the C++ library receives and records: bits, budgets, peaks, errors and what is kept."""

import contextlib
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.storages import LiveStorages
from planner.graphs.errors import BudgetError, PlannerError
from planner.torch_private.core import TorchDispatchMode
from planner.train.eager import native_recording
from planner.train.eager.session import Rematerialization, rematerialize
from planner.train.eager.tensor_arguments import iterate_tensors
from tests.support.eager.chains import (
    RUNS,
    Failing,
    FailingWrites,
    Run,
    chain,
    checkpointed,
    train_on,
    with_choices,
    with_dropout,
    written_in_steps,
)
from tests.support.eager.learned_ops import watch_learned
from tests.support.eager.models import LOOPS, Loop
from tests.support.eager.tensors import existing, other_bytes
from tests.support.library_states import forget_library
from tests.support.logs import lines_of
from tests.support.marks import slow, slow_among
from tests.support.native import NEEDS_LIBRARY

pytestmark = NEEDS_LIBRARY

aten = torch.ops.aten


_HELD = (checkpointed, with_choices)  # they need most of their peak


def warm_up() -> None:
    """Run two steps."""
    model, x = chain(), torch.randn(32, 64)
    for _ in range(2):
        with_dropout(model, x).backward()
        model.zero_grad()


def test_signatures_are_kept_while_they_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library keeps those of two generations, of 2**13 signatures each."""
    x = torch.ones(2**14 + 2)
    with rematerialize("1GB") as session:
        learned = watch_learned(session.debug, monkeypatch)
        for rows in range(1, len(x)):
            x[:rows].exp()
            if rows % 2**12 == 0:
                x[:10].logcumsumexp(0)
    assert len(learned) == 1


@pytest.mark.parametrize("run", RUNS)
def test_a_step_that_does_not_fit_after_steps_that_do(run: Run) -> None:
    """The results are eager PyTorch's, and the budget is kept."""
    batches = 16, 16, 200
    others = other_bytes()
    with LiveStorages(existing()) as live:
        expected = train_on(run, batches)
    others_now = other_bytes()
    budget = others_now + int((0.75 if run not in _HELD else 0.9) * (live.peak_bytes - others))
    with LiveStorages(existing()) as live, rematerialize(budget, max_recomputation=100) as session:
        results = train_on(run, batches, session)
    assert session.evictions > 0
    assert live.peak_bytes <= budget and session.peak_bytes <= budget
    assert all(map(np.array_equal, results, expected))


def test_peaks_are_exact_and_ops_counted() -> None:
    model, x = chain(), torch.randn(256, 64)
    sessions = []
    for rows in (64, 256):
        with LiveStorages(existing()) as live, rematerialize("1GB") as session:
            for size in (32, rows):
                loss = written_in_steps(model, x[:size])
                loss.backward()
                model.zero_grad()
        assert session.peak_bytes == session.eager_peak_bytes == live.peak_bytes
        sessions.append(session)
    assert sessions[0].ops == sessions[1].ops > 100


def failing_chain(failing: Failing, run: Run, *, is_known: bool = True) -> Rematerialization:
    """Check that a kernel that fails is tried again, with the results of eager PyTorch; its sizes may be known by then."""
    model, x = chain(), torch.randn(256, 64)
    run(model, x).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with rematerialize("1GB") as session:
        if is_known:
            warm_up()
        with failing:
            run(model, x).backward()
        assert failing.calls > len(model)
    assert "out of memory    1 times" in str(session)
    assert all(torch.equal(wanted, p.grad) for wanted, p in zip(expected, model.parameters(), strict=True))
    return session


@pytest.mark.parametrize("is_known", [True, False])
def test_out_of_memory_evicts_and_tries_again(*, is_known: bool) -> None:
    assert failing_chain(Failing(torch.ops.aten.sin.default, 6), written_in_steps, is_known=is_known).evictions > 0


@pytest.mark.parametrize("is_known", [True, False])
def test_a_write_that_fails_is_undone(*, is_known: bool) -> None:
    failing = FailingWrites(torch.ops.aten.addmm_.default, 6)
    assert failing_chain(failing, written_in_steps, is_known=is_known).recomputed_ops > 0


def test_an_error_that_the_program_catches_keeps_nothing_of_its_step() -> None:
    model, x = chain(), torch.randn(256, 64)

    def failing_step() -> weakref.ref[Tensor]:
        made = model(x)
        with contextlib.suppress(RuntimeError):
            made @ torch.randn(3, 3)
        return weakref.ref(made)

    gc.disable()
    try:
        with rematerialize("1GB"):
            warm_up()
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
            with rematerialize(budget):
                warm_up()
                made, name = ops.named(x)
                assert name == "one more" and torch.equal(ops.scaled(made, {"all": made}), x * 4.0)
                with_dropout(model, x).backward()
    finally:
        library._destroy()


def test_resized_outputs_are_counted() -> None:
    out, x = torch.empty(0), torch.randn(2**16)
    with rematerialize("1GB") as session:
        warm_up()
        torch.add(x, x, out=out)
        assert abs(session.debug.memory.live_bytes - other_bytes()) < 1000


def test_gradients_are_added_up_in_place_as_in_eager_pytorch() -> None:
    """Autograd does so only if nothing else refers to their memory."""

    def count_ops(block: contextlib.AbstractContextManager[object]) -> dict[str, int]:
        model, x = chain(3), torch.ones(8, 64)
        with block, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for layer in model:
                x = x + layer(x)
            x.sum().backward()
        return {event.key: event.count for event in profiler.key_averages() if event.key.startswith("aten::add")}

    expected = count_ops(contextlib.nullcontext())
    assert expected["aten::add_"] > 0
    assert count_ops(rematerialize("1GB")) == expected


def test_ops_between_steps_are_forgotten() -> None:
    with rematerialize("1GB") as session:
        warm_up()
        model = chain(2)
        for _ in range(2000):
            with torch.no_grad():
                torch.rand(4) + model(torch.ones(64)).sum()
        assert session.debug.memory.pending < 100


class Shrinking(TorchDispatchMode):
    """While entered, counts ops; before one of them the budget becomes smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0
        self.last = -1
        self.session: Rematerialization | None = None
        self.budget_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if self.ops == self.last:
            self.session.debug.memory.budget_bytes = self.budget_bytes
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


@pytest.mark.parametrize("at", [0.35, *slow(0.15, 0.7)])
@pytest.mark.parametrize("name", slow_among(LOOPS, "tree_lstm"))
def test_evicting_from_any_op_on_gives_the_bits_of_eager(name: str, at: float) -> None:
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


def test_a_write_to_a_saved_tensor_raises() -> None:
    weight = torch.randn(64, 64, requires_grad=True)
    with rematerialize("1GB"):
        warm_up()
        made = (weight @ torch.randn(64, 64)).exp()  # which is saved
        leaf = torch.randn(64, 64)
        products = [(weight * leaf).sum(), made.sum()]
        made.mul_(2)
        leaf.add_(1)
        for product in products:
            with pytest.raises(RuntimeError, match="is at version 1; expected version 0 instead"):
                product.backward()


def test_saved_tensors_are_freed_with_their_graph() -> None:
    """An output that is saved does not keep itself, nor an input its storage."""
    with rematerialize("1GB") as session:
        warm_up()
        memory, sources = session.debug.memory, session.debug.sources
        packs = memory.packs
        gc.collect()
        gc.disable()
        try:
            leaf = torch.randn(64, requires_grad=True)
            made = leaf.exp()
            freed = [weakref.ref(tensor.untyped_storage()) for tensor in (leaf, made)]
            product = made * made
            assert memory.packs - packs == 3 and sources.saved == 1
            del leaf, made
            assert all(ref() is not None for ref in freed)
            del product
            assert sources.saved == 0
            assert all(ref() is None for ref in freed)
        finally:
            gc.enable()


def test_compiled_functions_run_eagerly_and_are_seen() -> None:
    function = torch.compile(lambda x: (x.sin() * 2).cos().sum(), backend="eager")
    x = torch.randn(8, requires_grad=True)
    function(x).backward()
    x.grad = None
    with rematerialize("1GB") as session:
        warm_up()
        before = session.ops
        function(x).backward()
        assert session.ops > before + 8


def test_memory_of_sparse_results_counts() -> None:
    with rematerialize("1GB") as session:
        warm_up()
        before = session.peak_bytes
        held = [torch.ones(1000, 10_000).to_sparse() for _ in range(2)]
    assert session.peak_bytes - before > sum(part.nbytes for part in (held[0]._indices(), held[1]._indices()))


def test_sizes_that_are_new_in_each_step_are_in_the_peak() -> None:
    def step(rows: int) -> None:
        x = torch.arange(rows * 64).view(rows, 64) / 10**6
        for layer in model:
            x = torch.tanh(layer(x) * 2.0)
        chosen = (x.detach().mean(1) > 0.0).nonzero().flatten()
        x = torch.cat((x[chosen], x.index_select(0, chosen), x.new_zeros(rows, 64), table(chosen)))
        torch.bmm(x.view(-1, 8, 8), x.view(-1, 8, 8)).square().sum().backward()
        model.zero_grad()

    model, table = chain(layers=3), nn.Embedding(3002, 64)
    with rematerialize("1GB") as session:
        step(3000)
        step(3001)
    with LiveStorages(existing()) as live:
        step(3001)
    assert session.peak_bytes >= live.peak_bytes


NUMBERS: list[Callable[[Tensor, int], Tensor]] = [
    lambda x, i: x * (i + 2),
    lambda x, i: x * (0.5 + i),
    lambda x, i: x * bool(i % 2),
    lambda x, i: (x[:2048] * (0.5 + 1j * i)).real.repeat(2),
    lambda x, i: nn.functional.leaky_relu(x, 0.1 * (i + 1)),
    lambda x, i: torch.add(x, x, alpha=i + 1),
    lambda x, i: x.roll(i + 1, 0),
    lambda x, i: torch.cat([x, x[: i + 1]])[i + 1 :],
    lambda x, i: x.clamp(-0.5, None if i % 2 else 0.5),
    lambda x, i: x.to(torch.float64 if i % 2 else torch.float32),
    lambda x, i: x * torch.rand(x.shape, generator=torch.Generator().manual_seed(i)),
]


@pytest.mark.parametrize("change", NUMBERS)
def test_each_op_is_recomputed_with_its_own_numbers(change: Callable[[Tensor, int], Tensor]) -> None:
    """Ops that differ only in a number have records of their own."""

    def run_steps() -> list[np.ndarray]:
        found = []
        for step in range(12):
            x = torch.linspace(-1, 1, 4096).requires_grad_()
            y = x
            for i in range(6):
                y = change(y.sin().exp(), (step + i) % 3).to(torch.float32)
            y.square().sum().backward()
            found.append(x.grad.numpy().copy())
        return found

    expected = run_steps()
    with rematerialize(other_bytes() + 11 * 2**14 + 100, heuristic="lru", max_recomputation=100) as session:
        found = run_steps()
    assert session.recomputed_ops > 0
    assert all(map(np.array_equal, found, expected))


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


def check_refused(call: Callable[[], object], made_bytes: int, before: Callable[[], object] = lambda: None) -> None:
    """An op that is one byte too large is not executed, which its size or bound would allow if it were too low."""
    budget = other_bytes() + 10**8
    with rematerialize(budget):
        warm_up()
        before()
        ballast = torch.empty(budget - other_bytes() - made_bytes + 1, dtype=torch.uint8)
        with pytest.raises(BudgetError):
            call()
        del ballast


@pytest.mark.parametrize("number", range(len(bounded())))
def test_size_bounds_are_not_below_output_sizes(number: int) -> None:
    function, args = bounded()[number]
    check_refused(lambda: function(*args), sum(t.nbytes for t in iterate_tensors(function(*args))))


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


@pytest.mark.parametrize("number", range(len(of_more())))
def test_an_op_is_not_taken_for_one_that_makes_less(number: int) -> None:
    one, other = of_more()[number]
    check_refused(other, sum(t.untyped_storage().nbytes() for t in iterate_tensors(other())), before=one)


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
    budget = other_bytes() + 10**8
    with rematerialize(budget) as session:
        warm_up()
        of_sizes(torch.tensor([10]))
        saved = torch.ones(1_000_000, requires_grad=True).exp().sum()
        ballast = torch.empty(budget - session.debug.memory.live_bytes - 1000, dtype=torch.uint8)
        held = of_sizes(torch.tensor([1_000_000]))
        assert session.peak_bytes > budget >= other_bytes() and session.evictions > 0
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


def test_without_a_compiler_one_error_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "/nowhere/g++")
    forget_library(monkeypatch)
    with pytest.raises(PlannerError, match=r"needs a C\+\+ compiler: .*/nowhere/g\+\+.*install.*planner\.compile"):
        rematerialize("1GB")


def test_waiting_for_the_compiler_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_recording, "is_being_compiled", lambda: True)
    with lines_of("planner") as logged:
        rematerialize("1GB")
    assert logged[0] == "compile: compiling the C++ library, once on this machine"
