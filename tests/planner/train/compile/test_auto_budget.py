"""``budget="auto"`` and ``max_overhead=`` where a model is at hand."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import planner
from planner.graphs.errors import BudgetError, PlannerError
from planner.memory import auto_budget
from planner.memory.auto_budget import compute_auto_budget_bytes
from planner.settings.budget import Auto, Bytes
from planner.train.compile.per_batch import BatchPlans
from planner.train.distributed.wrappers import unwrap

CPU = torch.device("cpu")
MB = 10**6
WIDTH, ROWS = 256, 2048


def workload() -> tuple[nn.Module, Any, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers), F.mse_loss, (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))


def compiled(**given: Any) -> planner.PlannedStep:
    return planner.compile(*workload(), passes=1, compare_eager=False, **given)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Says how much the CPU has free, with nothing left in reserve."""

    def is_free(size_bytes: int) -> None:
        monkeypatch.setattr(auto_budget, "free_bytes", lambda device: size_bytes)
        monkeypatch.setattr(auto_budget, "_RESERVE", {"cpu": (0, 0.0)})

    return is_free


def test_auto_budget_is_free_memory_plus_static_memory(free: Callable[[int], None]) -> None:
    model, loss_fn, batch = workload()
    free(20 * MB)
    static = sum(t.nbytes for t in (*model.parameters(), *batch))
    step = planner.compile(model, loss_fn, batch, budget="auto", passes=1, compare_eager=False)
    assert 0.99 * (20 * MB + static) <= step.plan.budget_bytes <= 20 * MB + static
    assert step.plan.peak_bytes <= step.plan.budget_bytes < step.plan.graph.keep_everything_peak_bytes
    assert step.plan.recomputed


def test_optimizer_state_that_is_not_allocated_is_left_room_for(free: Callable[[int], None]) -> None:
    free(24 * MB)
    without, with_state = compiled(budget="auto"), compiled(budget="auto", optimizer="adamw")
    assert without.plan.budget_bytes == with_state.plan.budget_bytes
    room = [step.plan.budget_bytes - step.plan.graph.static_bytes for step in (without, with_state)]
    parameters = sum(p.nbytes for p in workload()[0].parameters())
    assert 2 * parameters <= room[0] - room[1] < 2.1 * parameters


def test_trainers_count_optimizer_state_that_is_allocated(free: Callable[[int], None]) -> None:
    free(24 * MB)
    model, loss_fn, batch = workload()
    budgets = []
    for steps in (0, 1):
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            loss_fn(model(batch[0]), batch[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
        plans = BatchPlans(unwrap(model), Auto(), {"passes": 1, "compare_eager": False})
        budgets.append(plans.step(loss_fn, batch, optimizer=optimizer, accumulate=False).plan.budget_bytes)
    parameters = sum(p.nbytes for p in model.parameters())
    assert budgets[1] - budgets[0] == pytest.approx(2 * parameters, rel=0.15)


def test_auto_budget_counts_shared_storages_once_and_slices_by_size(free: Callable[[int], None]) -> None:
    free(MB)
    data = torch.zeros(1000, 1000)
    assert compute_auto_budget_bytes(CPU, (), [data[:10], data[10:20]]) == pytest.approx(MB + 40_000, rel=0.01)
    assert compute_auto_budget_bytes(CPU, [data, data[3]]) == pytest.approx(5 * MB, rel=0.01)
    assert compute_auto_budget_bytes(CPU, [torch.zeros(9, device="meta")]) == pytest.approx(MB, rel=0.01)


def test_nearly_the_same_free_memory_gives_the_same_budget(free: Callable[[int], None]) -> None:
    found = set()
    for size in range(1000 * MB, 1003 * MB, MB // 2):
        free(size)
        found.add(compute_auto_budget_bytes(CPU, ()))
        assert size - 8 * MB < compute_auto_budget_bytes(CPU, ()) <= size
    assert len(found) <= 2


def test_a_reserve_is_left_and_the_budget_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_budget, "free_bytes", lambda device: 10_000 * MB)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger(auto_budget.__name__)
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        budget = compute_auto_budget_bytes(CPU, (), other_static_bytes=500 * MB)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert 8700 * MB < budget < 10_000 * MB * 0.95 - 500 * MB
    assert messages and messages[0].startswith(f"budget auto is {budget / 10**9:.2f} GB: 10.00 GB free on cpu")


def test_auto_where_nothing_is_left_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_budget, "free_bytes", lambda device: MB)
    with pytest.raises(BudgetError, match=r"budget 'auto' leaves nothing: 1.00 MB free on cpu .*; free some memory"):
        compute_auto_budget_bytes(CPU, ())


@pytest.mark.usefixtures("fresh_compiler")
def test_the_backend_leaves_room_for_the_state_of_adamw(free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    free(60 * MB)
    found: list[int] = []
    in_bytes = Bytes.resolve
    monkeypatch.setattr(Bytes, "resolve", lambda *given: found.append(in_bytes(*given)) or found[-1])
    model, loss_fn, batch = workload()
    step = torch.compile(model, backend="planner", dynamic=False, options={"budget": "auto", "roofline": "cpu"})
    loss_fn(step(batch[0]), batch[1]).backward()
    parameters = sum(p.nbytes for p in model.parameters())
    assert set(found) == {found[0]}
    assert found[0] == pytest.approx(60 * MB + batch[0].nbytes + parameters - 2 * parameters, rel=0.02)


def test_max_overhead_finds_the_budget_of_a_step() -> None:
    step = compiled(max_overhead="25%", tolerance=0.05)
    assert 0 < step.plan.overhead <= 0.25
    assert step.plan.budget_bytes < step.plan.graph.keep_everything_peak_bytes
    assert step.plan.measured_peak_bytes <= step.plan.budget_bytes


@pytest.mark.slow
def test_a_kept_plan_of_an_overhead_is_used_again(tmp_path: Any, recwarn: pytest.WarningsRecorder) -> None:
    first, again = (compiled(max_overhead=0.25, cache=tmp_path) for _ in range(2))
    assert again.plan.schedule == first.plan.schedule and again.plan.budget_bytes == first.plan.budget_bytes
    assert len(list(tmp_path.iterdir())) == 1
    assert not [w for w in recwarn if "cannot be used" in str(w.message)]


def test_an_overhead_does_not_go_with_kernels_of_inductor() -> None:
    with pytest.raises(PlannerError, match="max_overhead= does not go with kernels='inductor'"):
        compiled(max_overhead=0.1, kernels="inductor")
