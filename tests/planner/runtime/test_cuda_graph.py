"""Recorded steps: what replays them is exact and counted. CUDA graphs themselves need a GPU; a stand-in records here."""

import copy
import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import planner
from graphs.capture.step import TrainingStep
from graphs.capture.trace import capture
from graphs.cost.allocator import cpu_allocations
from graphs.errors import InfeasibleError, MismatchError, PlannerError, TraceError
from graphs.ir import Kind
from graphs.zoo import Workload
from planner.distributed.ranks import SingleProcess
from planner.distributed.wrappers import Unwrapped, unwrap
from planner.runtime.cuda_graph import CudaGraphs
from planner.runtime.executor import Executor
from planner.runtime.graphed_step import Recorder, record, recordable
from planner.runtime.measure import loss_of
from planner.solving import solve
from planner.training import per_batch
from planner.training.compile import _recorder
from planner.training.compiler import Compiler
from planner.training.per_batch import BatchPlans
from planner.training.step import PlannedStep
from tests.support.budgets import between
from tests.support.steps import make, random_schedule

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class RunsAgain:
    """Stands for CUDA graphs: a replay runs the function again, and writes what it returns where the first run's results are.

    What a pass is handed over in a list is gone behind it, as memory of a pool that others get: it is filled with NaN.
    """

    def __init__(self, held: int = 0) -> None:
        self.held = held
        self.functions: list[Callable[..., Any]] = []
        self.warm = 0

    def warm_up(self, run: Callable[[], object]) -> None:
        self.warm += 1
        run()

    def record(self, function: Callable[..., Any], *args: Any) -> tuple[Any, Callable[[], None]]:
        assert self.warm
        assert not torch.is_grad_enabled()
        kept = [list(arg) for arg in args]
        returned = function(*args)
        first = tensors(returned)

        def replay() -> None:
            again = tensors(function(*map(list, kept)))
            for tensor, value in zip(first, again, strict=True):
                tensor.copy_(value)
            for handed_over in tensors(kept[1:]):
                handed_over.fill_(float("nan") if handed_over.is_floating_point() else 1)

        self.functions.append(function)
        return returned, replay

    def held_bytes(self) -> int:
        return self.held


def tensors(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def recorded(workload: Workload, *, seed: int | None = 1, recorder: Recorder | None = None) -> Executor:
    """The recorded step of a schedule that computes again whatever it may."""
    captured = recordable(capture(*workload))
    schedule = random_schedule(captured.graph, seed) if seed else solve(captured.graph, "100%").schedule
    executor = Executor(captured, schedule, workload.model, workload.loss_fn)
    step = TrainingStep(workload.model, workload.loss_fn)
    record(captured, executor, step, workload.batch, recorder or RunsAgain())
    return executor


class Pool(nn.Module):
    """Dropout, batch norm with all its buffers, and an input that is counted in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(24, 48), nn.BatchNorm1d(48), nn.Linear(48, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.dropout(torch.relu(self.norm(self.first(x))), 0.3))


def dropout_and_norm() -> Workload:
    torch.manual_seed(7)
    return Workload(Pool(), F.cross_entropy, (torch.randn(32, 24), torch.randint(5, (32,))))


MODELS: dict[str, Callable[[], Workload]] = {
    name: partial(make, name) for name in ("vit", "mutated", "tied", "frozen", "shared_gradient")
}


def train(
    workload: Workload, run: Callable[..., Any], *, batches: int = 1, set_to_none: bool = True, clip: float | None = None
) -> dict[str, torch.Tensor]:
    """All that four steps of AdamW leave behind, on batches that differ, and what hooks see."""
    parameters = [p for p in workload.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    left: dict[str, torch.Tensor] = {}
    seen: dict[int, list[torch.Tensor]] = {k: [] for k in range(len(parameters))}
    handles = [p.register_hook(seen[k].append) for k, p in enumerate(parameters)]
    torch.manual_seed(11)
    for i in range(4):
        for j in range(batches):
            batch = [value.roll(i + 3 * j, 0) for value in workload.batch]
            loss = loss_of(run(*batch))
            (loss / batches).backward()
            left[f"loss {i} {j}"] = loss.detach()  # no copy: nobody may write to it
        if clip is not None:
            left[f"norm {i}"] = nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        left |= {f"gradient {i} {k}": p.grad.clone() for k, p in enumerate(parameters) if p.grad is not None}
        optimizer.zero_grad(set_to_none=set_to_none)
    for handle in handles:
        handle.remove()
    if clip is None:  # which is in place, on what hooks have seen
        left |= {f"seen {k} {i}": gradient for k in seen for i, gradient in enumerate(seen[k]) if gradient is not None}
    left |= {name: value.detach() for name, value in workload.model.state_dict().items()}
    left["random state"] = (torch.cuda if parameters[0].is_cuda else torch).get_rng_state()
    return left


LOOPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"batches": 3},
    "accumulated, clipped": {"batches": 2, "clip": 0.1},
    "zeroed": {"set_to_none": False},
    "accumulated, zeroed": {"batches": 2, "set_to_none": False},
}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.parametrize("loop", LOOPS)
def test_a_recorded_step_trains_as_eager_does(loop: str) -> None:
    workload, other = dropout_and_norm(), dropout_and_norm()
    step = TrainingStep(other.model, other.loss_fn)
    assert_same(train(other, step, **LOOPS[loop]), train(workload, recorded(workload), **LOOPS[loop]))


@pytest.mark.parametrize("name", MODELS)
def test_every_model_trains_as_eager_does(name: str) -> None:
    workload, other = MODELS[name](), MODELS[name]()
    step = TrainingStep(other.model, other.loss_fn)
    assert_same(train(other, step, batches=2), train(workload, recorded(workload, seed=2), batches=2))


def test_all_that_is_kept_from_a_step_stays_as_it_was() -> None:
    workload = dropout_and_norm()
    step = recorded(workload)
    parameters = list(workload.model.parameters())
    loss = step(*workload.batch)
    gradients = torch.autograd.grad(loss, parameters)
    before = [value.clone() for value in (loss.detach(), *gradients)]
    step(*(value.roll(1, 0) for value in workload.batch)).backward()
    assert all(torch.equal(value, then) for value, then in zip((loss.detach(), *gradients), before, strict=True))
    assert not any(torch.equal(p.grad, then) for p, then in zip(parameters[:1], before[1:], strict=False))


def test_gradients_of_inputs_and_other_results_are_copies_too() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    x = torch.randn(4, 6, requires_grad=True)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.mse_loss(output, target), output.argmax(1)

    target = torch.randn(4, 3)
    step = recorded(Workload(model, loss_fn, (x, target)), seed=None)
    loss, classes = step(x, target)
    assert classes.dtype == torch.int64 and not classes.requires_grad
    wanted = model(x).argmax(1)
    loss.backward()
    (gradient,) = torch.autograd.grad(F.mse_loss(model(x), target), x)
    step((-x).detach().requires_grad_(), target)
    assert torch.equal(classes, wanted)
    assert torch.equal(x.grad, gradient)


class Counts(nn.Module):
    """Writes to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return (self.inner(x) * count).sum()


def test_what_the_step_writes_to_its_inputs_comes_back() -> None:
    workload = Workload(Counts(), None, (torch.randn(4, 6), torch.zeros(3)))
    step = recorded(workload, seed=None)
    assert torch.equal(workload.batch[1], torch.zeros(3))  # recording left it alone
    count = torch.tensor([1.0, 2.0, 3.0])
    step(workload.batch[0], count).backward()
    assert torch.equal(count, torch.tensor([2.0, 3.0, 4.0]))
    gradient = workload.model.inner.bias.grad
    assert torch.equal(gradient, 4 * count)


def test_recording_leaves_model_gradients_and_random_state_alone() -> None:
    workload = dropout_and_norm()
    for parameter in workload.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: value.clone() for name, value in workload.model.state_dict().items()}
    state = torch.get_rng_state()
    recorded(workload)
    assert all(torch.equal(value, before[name]) for name, value in workload.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in workload.model.parameters())


def test_random_ops_are_not_computed_again_and_no_state_is_read() -> None:
    captured = recordable(capture(*make("gpt2_written")))
    random = {op.id for op in captured.graph.ops if op.random}
    assert random
    assert not any(captured.graph.ops[op].recomputable for op in random)
    again = [op for op in range(len(captured.graph.ops)) if random_schedule(captured.graph, 2).computed.count(op) > 1]
    assert again and random.isdisjoint(again)
    executor = Executor(captured, random_schedule(captured.graph, 2), *make("gpt2_written")[:2])
    assert "generator" not in executor.code.source


def test_a_loss_whose_tensors_are_overwritten_has_no_backward_pass() -> None:
    workload = dropout_and_norm()
    step = recorded(workload)
    first, second = step(*workload.batch), step(*workload.batch)
    with pytest.raises(PlannerError, match=r"after another call of the step.*compile without cuda_graph"):
        first.backward()
    second.backward()
    with torch.no_grad():
        step(*workload.batch)
    step(*workload.batch).backward()  # losses that are dropped do no harm


@pytest.mark.parametrize("how", ["assign", "replace", "buffer"])
def test_a_tensor_that_was_put_elsewhere_is_refused(how: str) -> None:
    workload = dropout_and_norm()
    step = recorded(workload)
    values = copy.deepcopy(workload.model.state_dict())
    workload.model.load_state_dict(values)  # in place
    step(*workload.batch).backward()
    if how == "assign":
        workload.model.load_state_dict(values, assign=True)
    elif how == "replace":
        workload.model.last.bias.data = workload.model.last.bias.data.clone()
    else:
        workload.model.norm.running_mean = workload.model.norm.running_mean.clone()
    name = {"assign": "first.weight", "replace": "last.bias", "buffer": "norm.running_mean"}[how]
    with pytest.raises(MismatchError, match=rf"{name} is not where it was in memory.*make another plan"):
        step(*workload.batch)


class Elsewhere(nn.Module):
    """Reads a tensor of another device."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = torch.zeros(4, device="meta")
        return self.inner(x).sum() + torch.zeros_like(shape, device="cpu").sum()


class Masked(nn.Module):
    """Writes where a mask says."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        y[x > 0] = torch.zeros((), device=x.device)
        return y.sum()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Elsewhere, r"op 'zeros' \(aten.zeros.default\) in model has a tensor on meta, not on cpu"),
        (Masked, r"op 'index_put.*waits for the device"),
    ],
)
def test_an_op_that_cannot_be_captured_is_named(model: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(TraceError, match=rf"{said}.*leave out cuda_graph=True"):
        recordable(capture(model(), None, (torch.randn(3, 4),)))


def test_what_goes_in_and_out_is_counted_twice() -> None:
    workload = dropout_and_norm()
    plain = capture(*workload)
    captured = recordable(plain)
    inputs = sum(value.nbytes for value in workload.batch)
    trained = sum(p.nbytes for p in workload.model.parameters())
    loss = 4
    added = captured.graph.static_bytes - plain.graph.static_bytes
    assert added == inputs + loss + loss + trained  # inputs, the loss's gradient, the loss, gradients
    by_kind = captured.graph.static_bytes_by_kind
    assert by_kind[Kind.GRADIENT] == trained and by_kind[Kind.OUTPUT] == loss


class OnlyRecords(RunsAgain):
    """Its replays do nothing, so that what is allocated is the copies."""

    def record(self, function: Callable[..., Any], *args: Any) -> tuple[Any, Callable[[], None]]:
        return super().record(function, *args)[0], lambda: None


def test_a_replayed_step_allocates_what_was_counted() -> None:
    workload = dropout_and_norm()
    captured = recordable(capture(*workload))
    step = recorded(workload, recorder=OnlyRecords())

    def run() -> None:
        loss = step(*workload.batch)
        loss.backward()

    run()
    for parameter in workload.model.parameters():
        parameter.grad = None
    by_kind = captured.graph.static_bytes_by_kind
    assert peak_of(run) == by_kind[Kind.GRADIENT] + by_kind[Kind.OUTPUT] + 4  # and the gradient of the loss, by autograd


class Measures(RunsAgain):
    """Holds what both passes have in memory at most, and what it loses."""

    def __init__(self, lost: int) -> None:
        super().__init__(lost)

    def warm_up(self, run: Callable[[], object]) -> None:
        super().warm_up(run)
        self.held += peak_of(run)


def peak_of(run: Callable[[], object]) -> int:
    """What `run` allocates at most, at once."""
    sizes = [event.size_bytes or 0 for event in cpu_allocations(lambda _: run())]
    return max(accumulate(sizes))


def solved(workload: Workload, budget: str | None, recorder: Callable[[], Recorder]) -> PlannedStep:
    """The step within `budget`, or half way from the least to the peak."""
    solver = partial(solve, tolerance=0.05, time_limit_s=60.0)
    making = Compiler(Unwrapped(workload.model, SingleProcess()), workload.loss_fn, "adamw", False, 1, solver, recorder)
    profiled = making.profile(making.capture(workload.batch), workload.batch)
    return making.solve(profiled, workload.batch, budget or between(profiled.graph))


def test_the_budget_holds_for_what_the_recordings_keep() -> None:
    workload, other = make("gpt2_written"), make("gpt2_written")
    made: list[weakref.ref[RunsAgain]] = []
    lost = iter([100_000, 0, 0])

    def recorder() -> RunsAgain:
        assert all(before() is None for before in made)  # two recordings are never held
        new = Measures(next(lost))
        made.append(weakref.ref(new))
        return new

    gc.collect()
    gc.disable()
    try:
        step = solved(workload, None, recorder)
    finally:
        gc.enable()
    assert len(made) == 2
    assert step.plan.measured_peak_bytes is not None
    assert 0.97 * step.plan.peak_bytes <= step.plan.measured_peak_bytes <= step.plan.budget_bytes
    assert len(step.plan.schedule.computed) > step.plan.graph.ops
    assert_same(train(other, TrainingStep(other.model, other.loss_fn)), train(workload, step))


def test_a_pool_that_never_fits_is_one_error() -> None:
    with pytest.raises(
        InfeasibleError,
        match=r"the measured peak is .*, over the budget of .*a CUDA graph's pool has lost some.*raise the budget",
    ):
        solved(dropout_and_norm(), "100%", partial(RunsAgain, 10**9))


def test_what_cannot_be_recorded_is_refused() -> None:
    class Wrapped(Unwrapped):
        pass

    workload = dropout_and_norm()
    with pytest.raises(PlannerError, match="models on a CUDA device, and this one is on cpu: leave it out"):
        planner.compile(*workload, budget="8GB", cuda_graph=True)
    with pytest.raises(PlannerError, match="one for each size: leave out cuda_graph=True, or dynamic=True"):
        planner.compile(*workload, budget="8GB", cuda_graph=True, dynamic=True)
    with pytest.raises(PlannerError, match="several processes: leave out cuda_graph=True"):
        _recorder(Wrapped(workload.model, SingleProcess()), dynamic=False)


def test_in_a_trainers_loop_a_second_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = planner.compile
    monkeypatch.setattr(per_batch, "compile", lambda *args, cuda_graph, **options: compiled(*args, **options))
    model, loss_fn, (x, y) = dropout_and_norm()
    plans = BatchPlans(unwrap(model), "8GB", {"cuda_graph": True, "passes": 1})
    optimizer = torch.optim.AdamW(model.parameters())
    plans.step(loss_fn, (x, y), optimizer=optimizer, accumulate=False)
    plans.step(loss_fn, (x + 1, y), optimizer=optimizer, accumulate=False)
    with pytest.raises(PlannerError, match=r"a batch of \[4, 24\], \[4\] needs a plan of its own, and CUDA graphs hold"):
        plans.step(loss_fn, (x[:4], y[:4]), optimizer=optimizer, accumulate=False)


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


def on_cuda() -> Workload:
    model, loss_fn, batch = dropout_and_norm()
    return Workload(model.cuda(), loss_fn, tuple(value.cuda() for value in batch))


@pytest.mark.gpu
@pytest.mark.parametrize("loop", LOOPS)
def test_a_cuda_graph_trains_as_the_planned_step_does(loop: str) -> None:
    workload, other = on_cuda(), on_cuda()
    captured = recordable(capture(*other))
    launched = Executor(captured, random_schedule(captured.graph, 1), other.model, other.loss_fn)
    replayed = recorded(workload, recorder=CudaGraphs(torch.device("cuda", torch.cuda.current_device())))
    wanted, found = train(other, launched, **LOOPS[loop]), train(workload, replayed, **LOOPS[loop])
    assert_same(wanted, found)


@pytest.mark.gpu
def test_the_pool_of_cuda_graphs_is_within_the_budget() -> None:
    workload = on_cuda()
    step = planner.compile(*workload, budget="1GB", optimizer="adamw", cuda_graph=True)
    assert step.plan.measured_peak_bytes is not None
    assert step.plan.peak_bytes <= step.plan.measured_peak_bytes <= 10**9
    step(*workload.batch).backward()
