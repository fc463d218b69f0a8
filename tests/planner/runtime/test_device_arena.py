"""Steps in an arena on CUDA, on a stand-in whose memory is handed out by the rules of PyTorch's allocator."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import planner
from planner.capture.trace import capture
from planner.capture.workload.models import Workload
from planner.graphs.allocators.caching import DEFAULT_POOL
from planner.graphs.allocators.steering import is_placed, steer
from planner.graphs.allocators.training import compute_outside_pool_bytes, compute_reserved_in_arena_bytes
from planner.graphs.schedule import keep_everything
from planner.measure.optimizers import measure_optimizer
from planner.measure.steps import get_loss
from planner.measure.tracing import profile_capture
from planner.memory.reserved import build_training
from planner.runtime.device_arena import DeviceArena, SharedPool
from planner.runtime.executor import Executor
from planner.settings.plan import PlanSettings
from tests.support.cuda_device import cuda_device, on_device
from tests.support.cuda_device.machine import Machine
from tests.support.cuda_device.steps import assert_as_eager
from tests.support.logs import lines_of
from tests.support.marks import slow
from tests.support.models.steps import random_schedule

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ROWS = 8192


class Branches(nn.Module):
    """Layers of different widths side by side, with tensors of 1.5 to 6 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, width) for width in (48, 100, 192))
        self.back = nn.ModuleList(nn.Linear(width, 16) for width in (48, 100, 192))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, back in zip(self.layers, self.back, strict=True):
            x = x + nn.functional.dropout(back(torch.tanh(layer(x)).sin()), 0.1)
        return x


def workload() -> Workload:
    torch.manual_seed(0)
    return Workload(Branches(), nn.MSELoss(), (torch.randn(ROWS, 16), torch.randn(ROWS, 16)))


def in_arena(workload: Workload, seed: int, shared: SharedPool | None = None) -> tuple[Executor, DeviceArena]:
    """A step by a random schedule."""
    captured = profile_capture(capture(*workload), workload, PlanSettings(passes=1))
    executor = Executor(captured, random_schedule(captured.graph, seed), workload.model, workload.loss_fn)
    executor.use_arena(SharedPool(executor.device) if shared is None else shared)
    return executor, executor.arena


def large_segments(cuda: Machine, arena: DeviceArena) -> list[int]:
    """Sizes of the large segments of the pool."""
    pool = arena.shared.pool
    assert pool is not None
    return [segment.size_bytes for segment in cuda.memories[0].allocator if segment.pool == pool.id and not segment.small]


@pytest.mark.parametrize("seed", [0, *slow(1)])
def test_a_step_takes_its_large_memory_from_the_slab_alone(seed: int) -> None:
    with cuda_device() as cuda:
        step = on_device(workload())
        executor, arena = in_arena(step, seed)
        assert_as_eager(step, executor, 3)
        assert large_segments(cuda, arena) == [arena.size_bytes] == [arena.steering.slab_bytes]
        assert arena.step_bytes == arena.steering.pool_bytes
        assert arena.missed == 0 and not cuda.memories[0].raw


def test_a_step_on_another_device_than_the_current_one_is_in_its_arena() -> None:
    with cuda_device(devices=2) as cuda:
        step = on_device(workload(), "cuda:1")
        executor, arena = in_arena(step, 0)
        assert torch.cuda.current_device() == 0
        get_loss(executor(*step.batch)).backward()
        pool = arena.shared.pool
        assert pool is not None and torch.cuda.current_device() == 0
        large = [segment for segment in cuda.memories[1].allocator if segment.pool == pool.id and not segment.small]
        assert [segment.size_bytes for segment in large] == [arena.size_bytes]


@pytest.mark.slow
def test_a_step_beside_tensors_of_another_one_takes_the_usual_pool() -> None:
    with cuda_device() as cuda, lines_of("planner.runtime.device_arena") as lines:
        step = on_device(workload())
        executor, arena = in_arena(step, 0)
        first, second = (get_loss(executor(*step.batch)) for _ in range(2))
        second.backward()
        first.backward()
        assert arena.missed == 1 and ["outside of its arena" in line for line in lines] == [True]
        for parameter in step.model.parameters():
            parameter.grad = None
        get_loss(executor(*step.batch)).backward()
        assert arena.missed == 1
        assert large_segments(cuda, arena) == [arena.size_bytes]


@pytest.mark.slow
def test_a_retained_graph_and_a_graph_that_is_dropped_leave_nothing_held() -> None:
    with cuda_device() as cuda:
        step = on_device(workload())
        executor, arena = in_arena(step, 1)
        loss = get_loss(executor(*step.batch))
        loss.backward(retain_graph=True)
        loss.backward()
        del loss
        get_loss(executor(*step.batch))
        assert not cuda.memories[0].raw
        for parameter in step.model.parameters():
            parameter.grad = None
        assert_as_eager(step, executor)
        assert arena.missed == 0


def test_plans_share_the_slab_of_the_largest() -> None:
    with cuda_device() as cuda:
        step = on_device(workload())
        shared = SharedPool(torch.device("cuda:0"))
        steps = [in_arena(step, seed, shared) for seed in (4, 5, 6)]
        sizes = [arena.size_bytes for _, arena in steps]
        assert len(set(sizes)) > 1
        for executor, arena in steps:
            assert_as_eager(step, executor, 1)
            assert large_segments(cuda, arena) == [max(sizes)]
            assert arena.missed == 0 and not cuda.memories[0].raw


@pytest.mark.parametrize("more", [2, *slow(4, 6)])
def test_plan_leaves_memory_beyond_its_own_slab_unused(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with cuda_device() as cuda:
        step = on_device(workload())
        executor, arena = in_arena(step, 0)
        larger = replace(arena.steering, slab_bytes=arena.size_bytes + more * 2**20)
        larger_arena = DeviceArena(arena.shared, larger)
        memory, make, ends = cuda.memories[0], DeviceArena.make_holes, []

        def noting(self: DeviceArena, number: int) -> None:
            used = [held.block for address, held in memory.held.items() if address not in memory.raw]
            pool = arena.shared.pool
            assert pool is not None
            ends.extend(b.offset + b.size_bytes for b in used if b.segment.pool == pool.id and not b.segment.small)
            make(self, number)

        monkeypatch.setattr(DeviceArena, "make_holes", noting)
        executor.use_arena(arena.shared)
        get_loss(executor(*step.batch)).backward()
        assert large_segments(cuda, larger_arena) == [larger.slab_bytes]
        assert max(ends) <= arena.size_bytes


def test_a_step_that_fails_leaves_nothing_held(monkeypatch: pytest.MonkeyPatch) -> None:
    with cuda_device() as cuda:
        step = on_device(workload())
        executor, arena = in_arena(step, 2)
        make = DeviceArena.make_holes
        calls = []

        def failing(self: DeviceArena, number: int) -> None:
            calls.append(number)
            if len(calls) == 5:
                raise RuntimeError("failed")
            make(self, number)

        monkeypatch.setattr(DeviceArena, "make_holes", failing)
        executor.use_arena(arena.shared)
        with pytest.raises(RuntimeError, match="failed"):
            get_loss(executor(*step.batch)).backward()
        assert not cuda.memories[0].raw
        monkeypatch.undo()
        assert_as_eager(step, executor)


def asking_once(executor: Executor, arena: DeviceArena, patch: pytest.MonkeyPatch) -> tuple[DeviceArena, list[torch.Tensor]]:
    """Have the first op of `executor` in the slab ask for memory that takes the place of what it is to get."""
    make, unexpected = DeviceArena.make_holes, list[torch.Tensor]()

    def asking(self: DeviceArena, number: int) -> None:
        make(self, number)
        if not patched:
            patched.append(True)
            unexpected.append(torch.empty(2**20 + 1, dtype=torch.uint8, device="cuda"))

    patched: list[bool] = []
    patch.setattr(DeviceArena, "make_holes", asking)
    executor.use_arena(arena.shared)
    return executor.arena, unexpected


@pytest.mark.slow
def test_a_step_whose_op_asks_for_other_memory_leaves_its_addresses_and_the_next_one_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with cuda_device() as cuda, lines_of("planner.runtime.device_arena") as lines:
        step = on_device(workload())
        executor, arena = in_arena(step, 0)
        arena, unexpected = asking_once(executor, arena, monkeypatch)
        assert_as_eager(step, executor)
        assert arena.lost == 1 and ["other memory than when it was measured" in line for line in lines] == [True]
        assert arena.outside_bytes >= arena.steering.outside_bytes and not cuda.memories[0].raw
        unexpected.clear()
        for parameter in step.model.parameters():
            parameter.grad = None
        assert_as_eager(step, executor, 2)
        assert arena.lost == 1 and large_segments(cuda, arena) == [arena.size_bytes]
        assert arena.outside_bytes == arena.steering.outside_bytes


@pytest.mark.slow
@pytest.mark.parametrize("retained", [False, True])
def test_a_step_that_has_left_its_addresses_gives_its_pool_back_without_an_ordinary_backward_pass(
    monkeypatch: pytest.MonkeyPatch, *, retained: bool
) -> None:
    with cuda_device() as cuda:
        step = on_device(workload())
        executor, arena = in_arena(step, 0)
        arena, unexpected = asking_once(executor, arena, monkeypatch)
        loss = get_loss(executor(*step.batch))
        unexpected.clear()
        if retained:
            loss.backward(retain_graph=True)
            loss.backward()
        del loss
        for parameter in step.model.parameters():
            parameter.grad = None
        torch.cuda.empty_cache()
        assert_as_eager(step, executor, 2)
        assert arena.lost == arena.missed == 0 and large_segments(cuda, arena) == [arena.size_bytes]


@pytest.mark.slow
def test_a_step_that_takes_further_large_segments_has_a_new_pool() -> None:
    with cuda_device() as cuda:
        step = on_device(workload())
        executor, arena = in_arena(step, 0)
        steering = steer(build_training(executor.graph, executor.schedule), {}, 0)  # without holes, in the smallest slab
        assert steering.grows and not arena.steering.grows
        monkeypatch = pytest.MonkeyPatch()
        monkeypatch.setattr("planner.memory.reserved.plan_device_arena", lambda _: steering)
        executor.use_arena(arena.shared)
        monkeypatch.undo()
        arena = executor.arena
        assert_as_eager(step, executor, 3)
        assert arena.lost == arena.missed == 0 and arena.outside_bytes == steering.outside_bytes
        for parameter in step.model.parameters():
            parameter.grad = None
        torch.cuda.empty_cache()
        assert not [s for s in cuda.memories[0].allocator if s.pool != DEFAULT_POOL and not s.small]


@pytest.mark.parametrize(("budget", "arena"), [("85%", True), ("90%", None)])
def test_compiled_step_reserves_at_most_the_planned_bytes(budget: str, arena: bool | None) -> None:
    with cuda_device():
        step = on_device(workload())
        planned = planner.compile(*step, budget=budget, arena=arena, compare_eager=False, passes=1, wait="0.5 work", swap="never")
        plan = planned.plan
        assert plan.reserved_bytes <= plan.budget_bytes
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            planned(*step.batch).backward()
            step.model.zero_grad()
        assert torch.cuda.max_memory_reserved() <= plan.reserved_bytes
        assert plan.arena_bytes is not None and "arena: " in str(plan)
        assert_as_eager(step, planned)


class Wide(nn.Module):
    """Two weights of 12 MiB by which inputs are scaled, in little time; the second is used only once `deep` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(1024, 3072)) for _ in range(2))
        self.deep = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first * x).sin().cos().sin().cos()
        return (self.second * x).cos() if self.deep else x


def wide() -> Workload:
    torch.manual_seed(0)
    return on_device(Workload(Wide(), nn.MSELoss(), (torch.randn(1024, 3072), torch.randn(1024, 3072))))


class Renewing(torch.optim.Optimizer):
    """Makes its state anew in each step."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: None = None) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                state["mean"] = parameter.grad + state.get("mean", 0.0)
                parameter.sub_(self.param_groups[0]["lr"] * state["mean"])


def train(step: Workload, optimizer: torch.optim.Optimizer, loss: Callable[..., torch.Tensor], steps: int) -> None:
    for _ in range(steps):
        loss(*step.batch).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", [partial(torch.optim.AdamW, foreach=True), Renewing])
def test_an_optimizer_has_its_temporaries_in_the_slab(kind: Callable[..., torch.optim.Optimizer]) -> None:
    with cuda_device(), lines_of("planner.runtime.device_arena") as lines:
        step = wide()
        optimizer = kind(step.model.parameters(), lr=0.01)
        planned = planner.compile(
            *step, budget="90%", arena=True, optimizer=optimizer, compare_eager=False, wait="1 work", passes=1
        )
        plan, graph = planned.plan, planned.measured
        training = build_training(graph, keep_everything(graph))
        pool_bytes = plan.arena_bytes + plan.outside_arena_bytes
        served_bytes = compute_reserved_in_arena_bytes(training, pool_bytes, serves_optimizer=True)
        assert plan.reserved_bytes == served_bytes < compute_outside_pool_bytes(training) + pool_bytes
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        train(step, optimizer, planned, 4)
        if kind is Renewing:
            assert ["makes new state in each step" in line for line in lines] == [True]
        else:
            assert torch.cuda.max_memory_reserved() == plan.reserved_bytes and not lines
        eager = wide()
        train(eager, kind(eager.model.parameters(), lr=0.01), lambda x, y: eager.loss_fn(eager.model(x), y), 4)
        assert all(map(torch.equal, step.model.parameters(), eager.model.parameters()))


def test_state_of_parameters_that_get_a_gradient_later_is_outside_of_the_slab() -> None:
    with cuda_device() as cuda:
        step = wide()
        optimizer = torch.optim.AdamW(step.model.parameters(), foreach=True)
        shared, executors = SharedPool(torch.device("cuda:0")), list[Executor]()
        for deep in (False, True):
            step.model.deep = deep
            captured = profile_capture(
                capture(*step, optimizer=measure_optimizer(optimizer, step.model.parameters())), step, PlanSettings(passes=1)
            )
            executor = Executor(captured, random_schedule(captured.graph, 0), step.model, step.loss_fn)
            executor.use_arena(shared)
            assert isinstance(executor.arena, DeviceArena) and executor.arena.steering.serves_optimizer
            executors.append(executor)  # plans of other sizes stay
            train(step, optimizer, lambda *batch: get_loss(executor(*batch)), 3)  # noqa: B023
            assert executor.arena.missed == executor.arena.lost == 0 and not shared.has_state_of(optimizer)
            pools = [segment.pool for segment in cuda.memories[0].allocator if segment.pool != DEFAULT_POOL]
            assert set(pools) == {shared.pool.id}  # that of the smaller slab is gone
        assert len(optimizer.state) == 2


def test_work_between_steps_may_use_the_slab_on_a_full_device() -> None:
    with cuda_device() as cuda:
        step = on_device(workload())
        executor, arena = in_arena(step, 0)
        assert_as_eager(step, executor, 1)
        torch.cuda.set_per_process_memory_fraction(cuda.memories[0].allocator.reserved.bytes / cuda.memories[0].capacity_bytes)
        between = torch.empty(arena.size_bytes // 2, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(arena.size_bytes, dtype=torch.uint8, device="cuda")
        del between
        assert_as_eager(step, executor, 1)
        assert large_segments(cuda, arena) == [arena.size_bytes] and arena.missed == arena.lost == 0


def test_the_slab_is_given_back_for_a_plan_without_an_arena() -> None:
    with cuda_device() as cuda:
        step = on_device(workload())
        planned = planner.compile(*step, budget="100%", compare_eager=False, wait="1s", passes=1)
        assert planned.measured is not None
        improvement = planned._improving.improvement
        plans = [planner.solve(planned.measured, "90%", arena=arena, work_limit=0.5) for arena in (None, False)]
        assert [plan.arena_bytes is not None for plan in plans] == [True, False]
        for plan in plans:
            executor = improvement.adopt(plan).executor
            get_loss(executor(*step.batch)).backward()
            step.model.zero_grad()
            in_pools = [segment for segment in cuda.memories[0].allocator if segment.pool != DEFAULT_POOL]
            assert bool(in_pools) == (plan.arena_bytes is not None)
        improvement.stop()


@pytest.mark.gpu
def test_a_step_on_a_gpu_takes_its_large_memory_from_the_slab_alone() -> None:
    step = workload()
    step = Workload(step.model.cuda(), step.loss_fn, tuple(tensor.cuda() for tensor in step.batch))
    executor, arena = in_arena(step, 0)
    assert_as_eager(step, executor, 3)
    pool = arena.shared.pool
    assert arena.missed == 0
    segments = torch.cuda.memory_snapshot(pool.id)
    assert [segment["total_size"] for segment in segments if segment["segment_type"] == "large"] == [arena.size_bytes]
    assert arena.step_bytes == arena.steering.pool_bytes


def test_small_requests_are_not_placed() -> None:
    assert not is_placed(2**20) and is_placed(2**20 + 1)
