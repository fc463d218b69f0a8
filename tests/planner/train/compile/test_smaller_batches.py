"""A smaller last batch runs by a plan of its own, with eager PyTorch's bits and within the budget; larger ones are refused."""

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import planner
from planner.capture.step import TrainingStep
from planner.graphs.errors import BudgetError, MismatchError
from planner.measure.steps import measure_memory
from planner.train.backend.shared_budget import SharedBudget
from planner.train.compile.compiler import Compiler
from planner.train.compile.dynamic import DynamicStep
from tests.support.budgets import HALF_WAY
from tests.support.marks import slow
from tests.support.models.outcomes import assert_equal_steps, assert_exact, assert_exact_within_budget, assert_same, train_by
from tests.support.raised_warnings import raise_warnings

pytestmark = pytest.mark.usefixtures("half_way")

QUICK: dict[str, Any] = {"passes": 1, "time_limit_s": 5.0, "compare_eager": False}


@pytest.fixture
def plans_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a size that comes a second time one that comes often."""
    monkeypatch.setattr("planner.train.compile.step._EAGER_RUNS", 1)


def net() -> nn.Module:
    torch.manual_seed(0)
    blocks = [m for _ in range(4) for m in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*blocks, nn.BatchNorm1d(32), nn.Linear(32, 3))


def rows(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 32), torch.randint(3, (n,))


@pytest.mark.usefixtures("plans_soon")
def test_the_default_loader_trains_for_two_epochs_as_eager() -> None:
    data = TensorDataset(*rows(70))

    def train(model: nn.Module, step: Callable[..., Any]) -> dict[str, torch.Tensor]:
        batches = (batch for _ in range(2) for batch in DataLoader(data, batch_size=32))  # of 32, 32 and 6 rows
        return train_by(step, model, batches)

    model, plain = net(), net()
    step = planner.compile(model, F.cross_entropy, rows(32), budget=HALF_WAY, optimizer="adamw", **QUICK)
    with raise_warnings():
        found = train(model, step)
    assert_same(found, train(plain, TrainingStep(plain, F.cross_entropy)))
    assert not isinstance(step, DynamicStep)
    assert [plan.graph.provenance["inputs"][0] for plan in step.plans] == ["float32[32, 32]", "float32[6, 32]"]
    assert step.plan is step.plans[0]  # that of the size it was planned for


@pytest.mark.usefixtures("plans_soon")
def test_smaller_batches_keep_the_budget_and_larger_ones_are_refused() -> None:
    model = net()
    step = planner.compile(model, F.cross_entropy, rows(64), budget=HALF_WAY, max_plans=2, **QUICK)
    for n in (60, 2, 33, 60):
        model.zero_grad()
        step(*rows(n))  # by eager PyTorch when it first comes, if that fits
        assert_exact_within_budget(step, model, rows(n), F.cross_entropy)
    assert len(step.plans) == 3  # two of smaller sizes
    for batch in (rows(65), (torch.randn(64, 16), rows(64)[1]), (torch.randn(60, 32).double(), rows(60)[1])):
        with pytest.raises(MismatchError):
            step(*batch)
    assert len(step.plans) == 3


@pytest.mark.usefixtures("plans_soon")
def test_a_smaller_batch_need_not_wait_for_a_good_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, passes = [], []
    search, profile = planner.plans.search.StepSearch.find_first_plan, Compiler.profile

    def first_plan(self: Any, *args: Any) -> Any:
        waits.append(self.settings.wait.seconds)
        return search(self, *args)

    def profiled(self: Any, *args: Any) -> Any:
        passes.append(self.settings.passes)
        return profile(self, *args)

    monkeypatch.setattr("planner.plans.search.StepSearch.find_first_plan", first_plan)
    monkeypatch.setattr(Compiler, "profile", profiled)
    for options in ({}, {"wait": "1%"}, {"swap": "never"}):
        step = planner.compile(net(), F.cross_entropy, rows(64), budget=HALF_WAY, **{**QUICK, "passes": 3}, **options)
        step(*rows(7)), step(*rows(7))
        assert step.plans[1].gap is not None
    assert waits == [3.0, 0.0, None, None, 3.0, 3.0]
    assert passes == [3, 1, 3, 3, 3, 3]


def test_a_smaller_batch_runs_by_eager_pytorch_until_it_comes_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.train.compile.step._EAGER_RUNS", 3)
    checks = []
    check = planner.train.compile.step.fits_eager
    monkeypatch.setattr("planner.train.compile.step.fits_eager", lambda *given: (checks.append(1), check(*given))[1])
    model, plain = net(), net()
    step = planner.compile(model, F.cross_entropy, rows(64), budget=HALF_WAY, **QUICK)
    # 60 rows do not fit with everything kept.
    for n, plans in ((7, 1), (7, 1), (64, 1), (7, 1), (7, 2), (7, 2), (64, 2), (60, 3), (60, 3)):
        assert_equal_steps(step, model, plain, *rows(n), loss_fn=F.cross_entropy)
        assert len(step.plans) == plans
    assert len(checks) == 2
    memory = measure_memory(step, rows(9), static_bytes=step.plan.graph.static_bytes - 4, device=torch.device("cpu"))
    assert memory.peak_bytes <= step.plan.budget_bytes and len(step.plans) == 3


def test_gradients_of_earlier_steps_are_left_to_a_plan() -> None:
    step = planner.compile(net(), F.cross_entropy, rows(64), budget="100%", **QUICK)
    step(*rows(64)).backward()
    with suppress(BudgetError):
        step(*rows(7))
    assert len(step.plans) == 2


class Masked(nn.Module):
    """Takes tensors with and without the dimension of the batch, and a number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(17, 16), nn.Linear(16, 17)

    def forward(
        self, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, extra: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.embed(tokens) + positions) * mask[..., None]
        losses = F.cross_entropy(self.head(hidden).flatten(0, 1), extra["labels"].flatten(), reduction="none")
        return losses.sum() / (extra["items"] * tokens.shape[0]) * extra["scale"], losses


def masked(n: int) -> dict[str, Any]:
    extra = {"labels": torch.randint(17, (n, 9)), "items": 9 * n, "scale": torch.tensor(1.0 / n)}
    return {"tokens": torch.randint(17, (n, 9)), "mask": torch.rand(n, 9) > 0.2, "positions": torch.randn(9, 16), "extra": extra}


@pytest.mark.parametrize("dynamic", [True, *slow(False)])
def test_masks_dicts_and_numbers_that_depend_on_the_rows(*, dynamic: bool) -> None:
    torch.manual_seed(0)
    model = Masked()
    step = planner.compile(model, None, masked(12), budget=HALF_WAY, dynamic=dynamic, **QUICK)
    for n in (12, 5, 1, 5):
        batch = masked(n)
        assert_exact(step, model, batch)
    batch = masked(12)
    batch["extra"]["items"] = 7
    with pytest.warns(UserWarning, match=r"captured again: input 'extra'\['items'\] is 7, but the step was planned for 108"):
        assert_exact(step, model, batch)


def test_gradients_accumulate_over_whole_and_smaller_batches() -> None:
    model = net()
    plain = copy.deepcopy(model)
    step = planner.compile(model, F.cross_entropy, rows(32), budget=HALF_WAY, accumulate=True, **QUICK)
    torch.manual_seed(1)
    batches = [rows(32), rows(9), rows(32)]
    for run in (step, lambda x, y: F.cross_entropy(plain(x), y)):
        torch.manual_seed(2)
        for batch in batches:
            run(*batch).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("through", ["backend", *slow("checkpoint")])
def test_checkpoint_and_backend_run_a_smaller_batch(through: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    planned = []
    add = SharedBudget.add
    monkeypatch.setattr(SharedBudget, "add", lambda *given, **named: (planned.append(1), add(*given, **named))[1])
    model, plain = net(), net()
    options = {"budget": "80%", "time_limit_s": 5.0, "wait": 0}
    if through == "checkpoint":
        called = planner.checkpoint(model, **options)
    else:
        called = torch.compile(model, backend="planner", options=options)
    # 6 rows fit with everything kept, 31 do not.
    for n, plans in ((32, 1), (6, 1), (32, 1), (6, 1), (31, 2), (6, 2), (31, 2)):
        assert_equal_steps(called, model, plain, rows(n)[0])
        assert len(planned) == plans
    peaks = [
        measure_memory(lambda x, y, run=run: F.cross_entropy(run(x), y), rows(n), static_bytes=0, device=torch.device("cpu"))
        for run, n in ((called, 6), (called, 32), (plain, 32))
    ]
    assert peaks[0].peak_bytes <= peaks[1].peak_bytes < peaks[2].peak_bytes
