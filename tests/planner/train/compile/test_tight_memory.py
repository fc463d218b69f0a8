"""Where memory is tight on a CPU, a step runs in an arena by itself: eager PyTorch's bits, within the budget, with a way out."""

import copy
import math
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner.capture.step import TrainingStep
from planner.graphs.errors import InfeasibleError, LimitError
from planner.graphs.ir import Graph
from planner.measure.observation import PeakWatch
from planner.plans import keep_everything, search
from planner.plans.background import BackgroundSolve, Ended
from planner.plans.plan import Plan
from planner.plans.search import StepSearch
from planner.progress.stages import StageReport
from planner.runtime import arena_allocator, tight_memory
from planner.settings.budget import Budget
from planner.train.compile import compiler, improvement
from tests.support.budgets import between
from tests.support.models.outcomes import assert_same, train_by

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the allocator is compiled with g++")

Batch = tuple[torch.Tensor, torch.Tensor]
# Of what keeping everything takes beside static memory: eager PyTorch does not fit, fits in a heap without gaps, or in any heap.
NONE_FITS, TIGHT, AMPLE = 0.5, 1.9, 20.0


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A function that sets the free memory, as a multiple of what keeping everything takes."""
    arena_allocator.install()  # compiled
    needed = keep_everything.count_keep_everything_bytes
    for change in ("return_large_blocks", "use_large_pages"):  # would concern all tests of this process
        monkeypatch.setattr(tight_memory, change, lambda: None)
    monkeypatch.setattr(improvement, "_LOST_AT_ONCE_S", math.inf)  # no better plan is looked for
    monkeypatch.setattr(improvement, "solve_here", lambda job, most_s: Ended(failure="there was no time"))

    def set_share(share: float) -> None:
        seen: list[int] = []

        def note(graph: Graph) -> int:
            seen.append(needed(graph))
            return seen[-1]

        monkeypatch.setattr(keep_everything, "count_keep_everything_bytes", note)
        monkeypatch.setattr(keep_everything, "free_bytes", lambda device: int(share * seen[-1]))

    return set_share


def model_and_batch() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (nn.Linear(32, 64), nn.GELU(), nn.BatchNorm1d(64), nn.Linear(64, 32))]
    return nn.Sequential(*layers), (torch.randn(256, 32), torch.randn(256, 32))


def planned(model: nn.Module, batch: Batch, **options: object) -> planner.PlannedStep:
    budget = between(planner.trace(model, F.mse_loss, batch, passes=1, on_progress=False))
    return planner.compile(model, F.mse_loss, batch, budget=budget, passes=1, wait=0.5, on_progress=False, **options)


def planned_in_tight_memory(free: Callable[[float], None]) -> tuple[nn.Module, Batch, planner.PlannedStep]:
    """Plan a step where eager PyTorch does not fit."""
    free(NONE_FITS)
    model, batch = model_and_batch()
    return model, batch, planned(model, batch)


def assert_trains_as_eager(model: nn.Module, batch: Batch, step: Callable[..., torch.Tensor], steps: int = 4) -> None:
    """Train, and evaluate before each step."""
    twin = copy.deepcopy(model)

    def evaluate(module: nn.Module) -> Batch:
        with torch.no_grad():
            module(batch[0])
        return batch

    runs: tuple[tuple[Callable[..., Any], nn.Module], ...] = (step, model), (TrainingStep(twin, F.mse_loss), twin)
    assert_same(*(train_by(run, module, (evaluate(module) for _ in range(steps))) for run, module in runs))


@pytest.mark.parametrize("share", [NONE_FITS, TIGHT])
def test_steps_run_in_an_arena_where_memory_is_tight(share: float, free: Callable[[float], None]) -> None:
    free(share)
    model, batch = model_and_batch()
    step = planned(model, batch)
    assert step.plan.arena
    assert step.plan.measured_peak_bytes is None or share == TIGHT  # nothing is run before where eager PyTorch does not fit
    first_bytes = step.plan.arena_bytes
    assert_trains_as_eager(model, batch, step)
    plan = step.plan
    assert plan.arena_bytes == first_bytes  # at the addresses that were found with the plan
    assert plan.measured_peak_bytes == plan.graph.static_bytes + plan.arena_bytes + plan.outside_arena_bytes
    assert plan.measured_peak_bytes <= plan.budget_bytes


def test_sizes_that_are_known_once_measured_count(free: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "is_memory_tight", lambda graph, device: graph.provenance.get("times") == "measured")
    model, batch, step = planned_in_tight_memory(free)
    assert step.plan.arena
    assert_trains_as_eager(model, batch, step)


def test_steps_run_in_no_arena_where_there_is_room_or_it_is_not_wanted(free: Callable[[float], None]) -> None:
    model, batch = model_and_batch()
    free(AMPLE)
    ample = planned(model, batch).plan
    assert not ample.arena
    free(NONE_FITS)
    unwanted = planned(model, batch, arena=False).plan
    assert not unwanted.arena
    assert ample.no_arena == unwanted.no_arena == ""


def test_a_plan_that_finds_no_memory_warns(free: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    free(NONE_FITS)
    model, batch = model_and_batch()
    monkeypatch.setattr(tight_memory, "free_bytes", lambda device: 1000)
    with pytest.warns(UserWarning, match="and there is room for .*: the first step is likely to find no memory"):
        planned(model, batch)


def test_max_overhead_is_planned_without_an_arena(free: Callable[[float], None]) -> None:
    free(NONE_FITS)
    model, batch = model_and_batch()
    step = planner.compile(model, F.mse_loss, batch, max_overhead=0.2, passes=1, wait=0.5, on_progress=False)
    assert not step.plan.arena
    assert "no arena: max_overhead= plans no addresses" in str(step.plan)


def test_without_its_library_steps_run_in_no_arena(free: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_allocator, "find_library", lambda: None)
    model, batch, step = planned_in_tight_memory(free)
    assert not step.plan.arena
    assert_trains_as_eager(model, batch, step, steps=2)
    assert not step.plan.arena
    assert "its C++ library is not compiled" in str(step.plan)
    assert step.plan.measured_peak_bytes <= step.plan.budget_bytes


def test_steps_move_to_an_arena_once_its_library_is_compiled(
    free: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    free(NONE_FITS)
    model, batch = model_and_batch()
    with monkeypatch.context() as before:
        before.setattr(arena_allocator, "find_library", lambda: None)
        before.setattr(improvement, "is_being_compiled", lambda: True)
        step = planned(model, batch)
        assert_trains_as_eager(model, batch, step, steps=5)
        assert not step.plan.arena
    assert_trains_as_eager(model, batch, step)
    assert step.plan.arena
    assert "in an arena" in step.history[-1].reason
    assert step.plan.measured_peak_bytes <= step.plan.budget_bytes


def refuse_arenas(monkeypatch: pytest.MonkeyPatch, error: Exception, first: int) -> None:
    """Let searches for a plan in an arena fail from number `first` on."""
    find, made = StepSearch.find_first_plan, [0]

    def find_first_plan(search: StepSearch, graph: Graph, budget: Budget, stage: StageReport | None = None) -> Plan:
        made[0] += 1
        if search.settings.arena and made[0] >= first:
            raise error
        return find(search, graph, budget, stage)

    monkeypatch.setattr(StepSearch, "find_first_plan", find_first_plan)


def test_if_no_plan_in_an_arena_is_found_steps_run_in_none(
    free: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_arenas(monkeypatch, LimitError("no schedule was found"), first=1)
    model, batch, step = planned_in_tight_memory(free)
    assert not step.plan.arena
    assert "no arena: no schedule was found" in str(step.plan)
    assert_trains_as_eager(model, batch, step, steps=1)


def test_an_arena_that_is_found_later_is_swapped_in(free: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_arenas(monkeypatch, LimitError("no schedule was found"), first=1)
    model, batch, step = planned_in_tight_memory(free)
    assert_trains_as_eager(model, batch, step, steps=1)  # a plan is swapped in once the peak of the one before is known
    step.wait()
    assert_trains_as_eager(model, batch, step)
    plan = step.plan
    assert "in an arena" in step.history[-1].reason
    assert plan.arena
    assert plan.measured_peak_bytes <= plan.budget_bytes


@pytest.mark.parametrize("ends", ["nothing is found", "steps are slower in one"])
def test_steps_stay_in_no_arena_if_they_are_slower_in_one_or_none_is_found(
    ends: str, free: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_arenas(monkeypatch, LimitError("no schedule was found"), first=1)
    model, batch, step = planned_in_tight_memory(free)
    if ends == "nothing is found":
        monkeypatch.setattr(improvement.BackgroundSolve, "receive", end_without_plan)
    else:
        monkeypatch.setattr(improvement.OpTimer, "compute_times_s", lambda timer: {})
        assert_trains_as_eager(model, batch, step, steps=6)
    step.wait()
    assert_trains_as_eager(model, batch, step)
    assert not step.plan.arena


def end_without_plan(solve: BackgroundSolve, most_s: float = 0.0) -> None:
    del most_s
    solve.ended = Ended(failure="no schedule was found")


def test_if_the_arena_exceeds_the_budget_and_no_other_is_found_steps_run_in_none(
    free: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_arenas(monkeypatch, InfeasibleError("none needs less"), first=2)
    model, batch, step = planned_in_tight_memory(free)
    budget_bytes, peak_of = step.plan.budget_bytes, PeakWatch._compute_peak

    def compute_peak(watch: PeakWatch, *rises: object) -> int:
        return budget_bytes + 1 if watch._executor.arena is not None else peak_of(watch, *rises)

    monkeypatch.setattr(PeakWatch, "_compute_peak", compute_peak)
    assert step.plan.arena
    assert_trains_as_eager(model, batch, step)
    plan = step.plan
    assert not plan.arena
    assert "no arena: in one the measured peak is" in str(plan)
    assert plan.measured_peak_bytes <= budget_bytes


def test_patience_ends_where_no_schedule_has_addresses(free: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    from planner.solvers.arena.solve import _Joint

    free(NONE_FITS)
    monkeypatch.setattr(search, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(_Joint, "_take", lambda *_, **__: False)
    model, batch = model_and_batch()
    assert not planned(model, batch).plan.arena


@pytest.mark.filterwarnings("ignore:planned again")
def test_a_buffer_written_between_the_passes_of_the_first_step_is_right_in_an_arena(free: Callable[[float], None]) -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(128))
            self.scales = nn.ParameterList(torch.full((128,), 1.0 / k) for k in range(1, 7))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(scale * torch.sin((x - self.mean) * k) for k, scale in enumerate(self.scales, start=1))

    free(NONE_FITS)
    torch.manual_seed(0)
    model, batch = Centred(), (torch.randn(64, 128), torch.randn(64, 128))
    twin = copy.deepcopy(model)
    step = planned(model, batch)
    assert step.plan.arena
    for module, run in ((model, step), (twin, lambda x, y: F.mse_loss(twin(x), y))):
        for _ in range(3):
            module.zero_grad()
            loss = run(*batch)
            with torch.no_grad():
                module.mean.lerp_(batch[0].mean(0), 0.1)
            loss.backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
