"""Passes in C++ make the calls and the frees of those in Python: the same bits, peaks and errors."""

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import planner
from benchmarks.models.parts import FunctionModule
from planner.capture.lowering.lower import Capture
from planner.capture.program.draws import draw_once
from planner.capture.rewrites.layouts import copy_with_strides
from planner.capture.rewrites.reproducible_random import draw_dropout
from planner.capture.step import TrainingStep
from planner.capture.trace import capture
from planner.capture.workload.models import Workload
from planner.graphs.errors import PlannerError
from planner.graphs.schedule import keep_everything
from planner.measure.pool_memory import measure_peak
from planner.native.library import describe_library, find_library, is_being_compiled, library_path, wait_for_library
from planner.native.passes import NativePass, use_python_passes
from planner.runtime.executor import Executor
from tests.support.library_states import set_library
from tests.support.logs import lines_of
from tests.support.marks import slow
from tests.support.models.steps import STEPS, capture_of, classes, make, random_schedule
from tests.support.processes import run_apart

Outcome = tuple[torch.Tensor, list[torch.Tensor | None], list[torch.Tensor], torch.Tensor]


def executors(name: str, seed: int) -> Iterator[tuple[Executor, Workload]]:
    """The step in Python and in C++, by one random schedule."""
    captured = capture_of(name)
    schedule = random_schedule(captured.graph, seed)
    for native in (False, True):
        workload = make(name)
        executor = Executor(captured, schedule, workload.model, workload.loss_fn)
        if native:
            yield executor, workload
        else:
            with use_python_passes():
                yield executor, workload


def outcome(executor: Executor, workload: Workload) -> Outcome:
    torch.manual_seed(11)
    loss = executor(*workload.batch)
    loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward()
    gradients = [p.grad for p in workload.model.parameters()]
    return loss.detach(), gradients, [*workload.model.buffers()], torch.get_rng_state()


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, list | tuple):
        for each, same in zip(one, other, strict=True):
            assert_equal(each, same)
    else:
        assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("seeds", [[0], *slow([1, 2])])
@pytest.mark.parametrize("name", STEPS)
def test_bits_and_peaks_are_those_of_the_passes_in_python(name: str, seeds: list[int]) -> None:
    """And every operator of PyTorch is called without Python."""
    for seed in seeds:
        outcomes, peaks = [], []
        for executor, workload in executors(name, seed):
            step = TrainingStep(workload.model, workload.loss_fn)
            peaks.append(measure_peak(capture_of(name), executor, step, workload.batch).peak_bytes)
            outcomes.append([outcome(executor, workload) for _ in range(2)])
        assert_equal(*outcomes)
        assert peaks[0] == peaks[1]
        functions = {target for each in native_passes(executor) for target in each.called_in_python}
        assert not {target for target in functions if isinstance(target, torch._ops.OpOverload)}
        assert not {draw_once, draw_dropout, copy_with_strides} & functions


def divided() -> Workload:
    """A step with a number that an operator takes as a tensor."""
    model = nn.Linear(8, 1, bias=False)
    return Workload(model, lambda _, y: (model.weight * y / 3.0).sum(), (torch.randn(64, 8), torch.randn(64, 8)))


def rows_copied() -> Workload:
    """A step whose kernel of batch norm lays rows out otherwise than PyTorch says, so that both readers copy them."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        rows = m.norm(x.transpose(1, 2)).transpose(1, 2)
        return m.first(rows) * m.second(rows)

    def loss(found: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        products = found.detach().unsqueeze(2) * y.unsqueeze(3)  # at the peak
        return (found * y).sum() + products.sum()

    model = FunctionModule(forward, norm=nn.BatchNorm1d(8), first=nn.Linear(8, 8), second=nn.Linear(8, 8))
    return Workload(model, loss, (torch.randn(32, 16, 8), torch.randn(32, 16, 8)))


@pytest.mark.parametrize("make", [divided, rows_copied])
def test_passes_take_the_memory_that_they_take_in_python(make: Callable[[], Workload]) -> None:
    workload = make()
    captured = capture(*workload)
    executor = Executor(captured, keep_everything(captured.graph), workload.model, workload.loss_fn)
    peaks = []
    for native in (False, True):
        with nullcontext() if native else use_python_passes():
            step = TrainingStep(workload.model, workload.loss_fn)
            peaks.append(measure_peak(captured, executor, step, workload.batch).peak_bytes)
    assert isinstance(native_passes(executor)[0], NativePass)
    assert peaks[0] == peaks[1]


def native_passes(executor: Executor) -> list[NativePass]:
    """The passes of a step that ran in C++."""
    return [each._run for each in (executor.launched.forward, executor.launched.backward)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("p", [0.1, 1 / 3])
def test_dropout_of_the_library_is_that_of_python(dtype: torch.dtype, p: float) -> None:
    wait_for_library()
    for x in (torch.randn(4, 6, 8), torch.randn(4, 6, 8).transpose(0, 2), torch.randn(3, 1).expand(3, 5), torch.randn(())):
        own = [torch.Generator().manual_seed(3) for _ in range(2)]
        ways = (draw_dropout, torch.ops.remat_planner.draw_dropout)
        one, other = (way(x.to(dtype), p, True, generator=generator) for way, generator in zip(ways, own, strict=True))
        assert_equal([*one, own[0].get_state()], [*other, own[1].get_state()])
        assert [(t.stride(), t.dtype) for t in one] == [(t.stride(), t.dtype) for t in other]


@pytest.mark.parametrize("strides", [(32, 8, 1), (1, 5, 40), (16, 0, 1), (0, 0, 1), (0, 0, 0), (100, 20, 2)])
def test_copies_with_strides_of_the_library_are_those_of_python(strides: tuple[int, ...]) -> None:
    wait_for_library()
    whole = torch.randn(5, 4, 8)
    for dim, stride in enumerate(strides):
        whole = whole if stride else whole.narrow(dim, 0, 1).expand(whole.shape)
    one, other = copy_with_strides(whole, strides), torch.ops.remat_planner.copy_with_strides(whole, strides)
    assert torch.equal(one, other) and torch.equal(one, whole)
    assert one.stride() == other.stride() == strides
    assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
    assert other.data_ptr() != whole.data_ptr()


def test_views_follow_the_layout_of_what_they_are_of() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        heads = x.reshape(4, 2, 3).transpose(0, 1)
        return m.linear((heads * 2).transpose(0, 1).reshape(4, 6)) + x.view(2, 2, 6)[1].sum() * x.split(3)[1]

    captured = None
    batches = [torch.randn(4, 6), torch.randn(4, 8)[:, :6], torch.randn(8, 6)[::2], torch.randn(6, 6)[2:]]
    outcomes: list[list[Outcome]] = []
    for native in (False, True):
        torch.manual_seed(0)
        workload = Workload(FunctionModule(forward, linear=nn.Linear(6, 6)), lambda y, x: (y * x).sum(), (batches[0], batches[0]))
        captured = captured or capture(*workload)
        with nullcontext() if native else use_python_passes():
            executor = Executor(captured, keep_everything(captured.graph), workload.model, workload.loss_fn)
            outcomes.append([outcome(executor, workload._replace(batch=(x, x))) for x in (*batches, *batches)])
        assert isinstance(native_passes(executor)[0], NativePass) is native
    assert_equal(*outcomes)


def test_views_of_a_tensor_that_may_be_copied_are_made_once() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        rows = m.linear(x).reshape(8, 3).unbind()
        for row, other in pairwise((*rows, *m.linear(x).unsafe_chunk(2, 1))):
            x = x + (row * other[:, :3] if other.dim() > 1 else row * other).tanh().sum()
        return x

    model = FunctionModule(forward, linear=nn.Linear(6, 6))
    workload = Workload(model, lambda y, x: (y * x).sum(), (torch.randn(4, 6),) * 2)
    captured = capture(*workload)
    executor = Executor(captured, keep_everything(captured.graph), model, workload.loss_fn)
    views = {"aten::unbind", "aten::unsafe_split"}
    for calls in (dict.fromkeys(views, 2), {}):  # one in each pass of the first step
        with torch.autograd.profiler.profile() as profiled:
            executor(*workload.batch).backward()
        assert {event.key: event.count for event in profiled.key_averages() if event.key in views} == calls


def test_a_pass_that_mostly_calls_python_stays_there() -> None:
    doubled = torch.library.custom_op("planner_tests::doubled", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
    doubled.register_fake(torch.empty_like)
    doubled.register_autograd(lambda ctx, gradient: doubled(gradient))

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = x * m.weight
        for _ in range(20):
            x = doubled(x)
        return x

    model = FunctionModule(forward, weight=nn.Parameter(torch.ones(8)))
    workload = Workload(model, lambda x, y: (x * y).sum(), (torch.ones(4, 8), torch.ones(4, 8)))
    captured = capture(*workload)
    executor = Executor(captured, keep_everything(captured.graph), workload.model, workload.loss_fn)
    outcome(executor, workload)
    assert torch.equal(workload.model.get_parameter("weight").grad, torch.full((8,), 4 * 2.0**20))
    assert not any(isinstance(each, NativePass) for each in native_passes(executor))


def failing() -> tuple[Executor, Capture, Workload]:
    """A step that raises in the kernel of an op, if its input is larger than what it was captured for says."""
    torch.manual_seed(0)
    parts: dict[str, Any] = {"linear": nn.Linear(8, 8), "embedding": nn.Embedding(4, 8)}
    workload = classes(FunctionModule(lambda m, index: torch.sin(m.linear(m.embedding(index))), **parts), torch.randint(4, (24,)))
    captured = capture(*workload)
    return Executor(captured, keep_everything(captured.graph), workload.model, workload.loss_fn), captured, workload


def test_an_error_has_the_line_of_the_op_and_holds_no_tensor() -> None:
    executor, _, workload = failing()
    outcome(executor, workload)
    wrong = (torch.full((24,), 7), *workload.batch[1:])
    with pytest.raises(IndexError, match="index out of range") as raised:
        executor(*wrong)
    assert "m.linear(m.embedding(index))" in str(raised.traceback[-1].statement)
    (note,) = raised.value.__notes__
    assert note == "raised in the forward pass of a planned step, by op 'embedding' (aten.embedding.default) in model.embedding"
    kept = weakref.ref(wrong[0])
    del wrong, raised
    gc.collect()
    assert kept() is None
    outcome(executor, workload)


def test_an_error_of_python_comes_through_as_it_is() -> None:
    def refuse(x: torch.Tensor) -> torch.Tensor:
        if x.abs().max() > 1e6:
            raise KeyError("too large")
        return x * 2

    op = torch.library.custom_op("planner_tests::refuse", refuse, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_fake(torch.empty_like)
    op.register_autograd(lambda ctx, gradient: gradient * 2)

    workload = classes(FunctionModule(lambda m, x: op(m.linear(x)), linear=nn.Linear(8, 8)), torch.randn(24, 8))
    captured = capture(*workload)
    executor = Executor(captured, keep_everything(captured.graph), workload.model, workload.loss_fn)
    outcome(executor, workload)
    with pytest.raises(KeyError, match="too large"):
        executor(torch.full((24, 8), 1e9), *workload.batch[1:])
    outcome(executor, workload)


def test_the_first_calls_run_in_python_until_the_library_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = wait_for_library()
    set_library(monkeypatch, None)
    executor, _, workload = failing()
    before = outcome(executor, workload)
    assert not isinstance(native_passes(executor)[0], NativePass)
    set_library(monkeypatch, loaded)
    workload.model.zero_grad()
    assert_equal(before[:2], outcome(executor, workload)[:2])
    assert all(isinstance(each, NativePass) for each in native_passes(executor))


def train_without_compiler(folder: str) -> None:
    os.environ.update(PATH="/nowhere", CXX="/nowhere/g++", XDG_CACHE_HOME=folder)
    model, batch = nn.Linear(4, 4), (torch.ones(2, 4), torch.ones(2, 4))
    with lines_of("planner") as lines:
        step = planner.compile(model, lambda y, target: (y * target).sum(), batch, budget="100%")
        step(*batch).backward()
        with pytest.raises(PlannerError, match=r"the C\+\+ library cannot be compiled: .*; install a compiler"):
            wait_for_library()
        model.zero_grad()
        step(*batch).backward()
    assert torch.equal(model.bias.grad, torch.full((4,), 2.0))
    assert find_library() is None and not is_being_compiled()
    assert any("run their passes in Python" in line for line in lines)


def test_without_a_compiler_steps_run_in_python(tmp_path: Path) -> None:
    run_apart(train_without_compiler, str(tmp_path))


def test_lists_that_a_pass_returns_are_new() -> None:
    executor, _, workload = failing()
    static = executor.check(*workload.batch)
    with torch.no_grad():
        (_, _, saved), (_, _, again) = (executor.launched.forward(static) for _ in range(2))
    assert type(saved) is type(again) is list
    assert saved is not again


def test_doctor_says_where_the_library_is() -> None:
    wait_for_library()
    assert str(library_path()) in describe_library()


class SeenOperators(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["gpt2_written", "vit"])  # which draws again for dropout
def test_a_mode_sees_the_operators_that_it_sees_of_passes_in_python(name: str) -> None:
    seen = []
    for executor, workload in executors(name, 0):
        outcome(executor, workload)
        with SeenOperators() as mode:
            outcome(executor, workload)
        seen.append({name for name in mode.names if "view" not in name and "transpose" not in name})
    assert len(seen[0]) > 20
    assert seen[0] == seen[1]
