"""Training by plans in an arena: the bits of eager PyTorch, within the budget, and with all that the plan says."""

import copy
import shutil
import weakref
from bisect import bisect_left
from pathlib import Path

import pytest
import torch
from torch import nn

import planner
from planner.capture.signature import Batch
from planner.capture.workload.models import Workload, build
from planner.measure.run_plan import run
from planner.memory.arena_rules import LEAST_BYTES
from planner.plans.plan import read_plan
from planner.runtime import arena, arena_allocator
from planner.runtime.arena import SharedSlab
from planner.runtime.arena_allocator import Missed, Slab
from planner.runtime.executor import Executor
from planner.runtime.slab_addresses import RecordedStep, SlabAddresses, plan_slab_addresses
from planner.train.compile.dynamic import DynamicStep
from planner.train.compile.step import PlannedStep
from tests.support.logs import lines_of
from tests.support.marks import slow
from tests.support.models.outcomes import assert_exact, assert_same, peak_bytes, train, train_by
from tests.support.models.steps import make

TANGENT_BYTES = 4  # the gradient of the loss, which autograd makes

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the allocator is compiled with g++")


def compiled(name: str, budget: str = "70%", **how: object) -> tuple[PlannedStep, Workload]:
    workload = make(name)
    step = planner.compile(*workload, budget=budget, passes=1, arena=True, wait="5%", **how)
    return step, workload


@pytest.mark.parametrize(
    "kernels", ["eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.filterwarnings("ignore")])]
)
def test_trains_as_without_an_arena(kernels: str) -> None:
    step, workload = compiled("gpt2_sdpa", kernels=kernels)
    other = copy.deepcopy(workload)
    if kernels == "eager":
        wanted = train(other, None)
    else:
        plain = planner.compile(*other, budget="100%", passes=1, wait="5%", kernels=kernels, compare_eager=False)
        wanted = train_by(plain, other.model, [workload.batch] * 3)
    assert_same(wanted, train_by(step, workload.model, [workload.batch] * 3))
    plan = step.plan
    assert plan.eager.identical
    assert plan.measured_peak_bytes == plan.graph.static_bytes + plan.arena_bytes + plan.outside_arena_bytes
    assert plan.measured_peak_bytes <= plan.budget_bytes
    assert taken_bytes(step, workload, workload.batch) <= plan.outside_arena_bytes + TANGENT_BYTES
    assert "outside" in str(plan)


@pytest.mark.parametrize("name", ["vit", "unet", *slow("llama")])
def test_a_plan_predicts_what_its_step_asks_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []

    def note(step: RecordedStep, *given: object, **how: object) -> SlabAddresses:
        planned.append(step)
        return plan_slab_addresses(step, *given, **how)

    monkeypatch.setattr(arena, "plan_slab_addresses", note)
    step, workload = compiled(name, "75%", compare_eager=False)
    executor = step.debug
    assert isinstance(executor, Executor) and isinstance(executor.arena, arena.Arena)
    assert executor.arena.slab is not None and executor.arena.missed == Missed()  # the first step, which measured its peak
    executor.use_arena(SharedSlab())  # no addresses are known, so that a step is recorded
    step(*workload.batch).backward()
    assert executor.arena.size_bytes is not None
    predicted, recorded = map(large_requests, planned)
    assert predicted == recorded


def large_requests(step: RecordedStep) -> list[tuple[int, int | None]]:
    """The sizes of those that are served from a slab, and how many of them come before each is freed."""
    large = [i for i, request in enumerate(step.requests) if request.size_bytes >= LEAST_BYTES]
    return [
        (request.size_bytes, None if request.end is None else bisect_left(large, request.end))
        for request in (step.requests[i] for i in large)
    ]


def taken_bytes(step: PlannedStep, workload: Workload, batch: Batch) -> int:
    """The most bytes that PyTorch's own allocator gives a step at once, by PyTorch's profiler."""
    workload.model.zero_grad()
    return peak_bytes(lambda: step(*batch).backward())


def tokens(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(length)
    return torch.randint(61, (rows, length)), torch.randint(61, (rows, length))


def test_arena_and_optimizer_take_no_more_memory_than_eager() -> None:
    torch.manual_seed(0)
    workload = build("mlp", batch=8, layers=3, width=64, classes=10)
    other = copy.deepcopy(workload)
    step = planner.compile(*workload, budget="102%", optimizer="adamw", passes=1, arena=True, wait="5%")
    optimizers = [torch.optim.AdamW(each.parameters(), foreach=True) for each in (workload.model, other.model)]

    def train(step: object, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        step(*workload.batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    with lines_of("planner.runtime.arena") as lines:
        for _ in range(2):
            train(step, workload.model, optimizers[0])
    for _ in range(2):
        train(lambda x, y: other.loss_fn(other.model(x), y), other.model, optimizers[1])
    outside = peak_bytes(lambda: train(step, workload.model, optimizers[0]))
    usual = peak_bytes(lambda: train(lambda x, y: other.loss_fn(other.model(x), y), other.model, optimizers[1]))
    assert step.debug.arena.slab.size_bytes + outside <= 1.01 * usual
    assert step.plan.arena_bytes < 0.6 * step.debug.arena.slab.size_bytes
    (line,) = lines
    assert line.endswith("more than the budget while it steps, with the gradients: with fused=True it takes less")


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"dynamic": True}, {"replan": True}])
@pytest.mark.filterwarnings("ignore:planned again")
def test_plans_for_several_sizes_share_a_slab(how: dict[str, bool]) -> None:
    torch.manual_seed(0)
    workload = build("gpt2", layers=1, width=32, heads=2, vocab=61, seq=64, batch=4)
    options = {"passes": 1, "arena": True, "wait": "5%", **how}
    step = planner.compile(*workload[:2], tokens(4, 48), budget="90%", **options)
    slabs: list[weakref.ref[Slab]] = []
    for length in (48, 33, 52, 48, 33, 52):
        batch = tokens(4, length)
        workload.model.zero_grad()
        assert_exact(step, workload.model, batch, workload.loss_fn)
        plan = step.plan
        assert taken_bytes(step, workload, batch) <= plan.outside_arena_bytes + TANGENT_BYTES
        last = step._shown if isinstance(step, DynamicStep) else step._kept[0]
        slabs.append(weakref.ref(last.debug.arena.slab))
        assert plan.measured_peak_bytes <= plan.budget_bytes
        workload.model.zero_grad()
        assert sum(found is not None for found in {found() for found in slabs}) == 1
    assert slabs[-4]() is slabs[-1]()  # the largest is kept from then on


@pytest.mark.slow
def test_a_kept_plan_runs_in_an_arena(tmp_path: Path) -> None:
    plans = [compiled("unet", "80%", cache=tmp_path, compare_eager=False)[0].plan for _ in range(2)]
    assert len(list(tmp_path.glob("*.json"))) == 1
    assert plans[0].arena_bytes == plans[1].arena_bytes
    (path,) = tmp_path.glob("*.json")
    assert read_plan(path).arena_bytes == plans[0].arena_bytes
    without = planner.compile(*make("unet"), budget="80%", passes=1, wait="5%", cache=tmp_path, compare_eager=False)
    assert without.plan.arena_bytes is None


@pytest.mark.slow
def test_a_plan_is_run_in_an_arena() -> None:
    workload = make("unet")
    plan = planner.solve(planner.trace(*workload, passes=1), "90%", tolerance=0.05)
    report = run(plan, *workload, repeats=1, arena=True)
    assert report.is_exact
    assert report.arena_bytes is not None
    assert report.measured_peak_bytes <= 1.001 * plan.peak_bytes + 10_000  # small requests beside the largest
    assert run(plan, *workload, repeats=1).arena_bytes is None


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise planner.PlannerError("the C++ library cannot be compiled: no g++")

    monkeypatch.setattr(arena_allocator, "wait_for_library", fail)
    arena_allocator._load_library.cache_clear()
    with pytest.raises(
        planner.PlannerError,
        match="arena=True needs a C\\+\\+ compiler: the C\\+\\+ library cannot be compiled: no g\\+\\+, or leave",
    ):
        arena_allocator.install()
    monkeypatch.undo()
    arena_allocator.install()
