"""Plans inside the trainers' loops: one for the main size, cheaper ones for others, without a word for each."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner.graphs.errors import InfeasibleError, LimitError
from planner.measure import optimizers
from planner.settings.budget import read_budget
from planner.train.compile import per_batch
from planner.train.compile.per_batch import BatchPlans
from planner.train.compile.step import PlannedStep
from planner.train.distributed.wrappers import unwrap
from tests.support.raised_warnings import raise_warnings

QUICK = {"passes": 1, "tolerance": 0.05, "compare_eager": False}


class Loop:
    """A model that is trained on batches of any size, as the trainers do it."""

    def __init__(self, budget: str | int = "1MB", **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))
        self.plans = BatchPlans(unwrap(self.model), read_budget(budget), {**QUICK, **options})
        self._optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self, rows: int, *, accumulate: bool = False) -> PlannedStep:
        x, y = torch.randn(rows, 8), torch.randint(3, (rows,))
        step = self.plans.step(F.cross_entropy, (x, y), optimizer=self._optimizer, accumulate=accumulate)
        loss = step(x, y)
        assert torch.equal(loss, F.cross_entropy(self.model(x), y))
        loss.backward()
        return step


def test_the_main_plan_is_that_of_the_size_that_came_most_often() -> None:
    loop = Loop()
    assert loop.plans.main is None
    with raise_warnings(UserWarning):
        smaller = loop.step(3)
        whole = loop.step(8)
        assert loop.plans.main is smaller
        assert loop.step(8) is whole
        assert loop.plans.main is whole
        assert loop.step(3) is smaller
    assert loop.plans.main is whole


def test_steps_that_begin_to_accumulate_count_the_gradients() -> None:
    loop = Loop()
    alone, added = loop.step(8), loop.step(8, accumulate=True)
    assert [step.plan.graph.provenance["accumulate"] for step in (alone, added)] == [False, True]


def test_a_smaller_last_batch_runs_by_eager_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = noted(monkeypatch)
    loop = Loop()
    for _ in range(2):
        whole = loop.step(8)
        loop.model.zero_grad()
        assert loop.step(3) is whole is loop.plans.main
        loop.model.zero_grad()
    assert len(whole.plans) == len(seen) == 1
    loop.step(8)
    loop.step(3)  # while the gradients of an earlier step are there
    assert len(whole.plans) == 2


def test_the_optimizer_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[torch.optim.Optimizer] = []
    measure = optimizers.measure_optimizer
    monkeypatch.setattr(optimizers, "measure_optimizer", lambda *given: (measured.append(given[0]), measure(*given))[1])
    loop = Loop()
    whole, other = (loop.step(rows).plan.graph.provenance["optimizer"] for rows in (8, 9))
    assert len(measured) == 1 and whole == other
    loop.model[0].requires_grad_(False)
    loop.step(8)
    assert len(measured) == 2


def noted(monkeypatch: pytest.MonkeyPatch, *, quickest_s: float = 0.0) -> list[dict[str, Any]]:
    """The options that plans are made with; solves that have less time than `quickest_s` find nothing."""
    seen: list[dict[str, Any]] = []

    def compile(*args: Any, **options: Any) -> PlannedStep:  # noqa: A001
        seen.append(options)
        if options.get("time_limit_s", 60.0) < quickest_s:
            raise LimitError("nothing was found")
        return planner.compile(*args, **options)

    monkeypatch.setattr(per_batch, "compile", compile)
    return seen


def test_other_sizes_are_solved_for_a_shorter_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = noted(monkeypatch)
    loop = Loop(compare_eager=True)
    loop.step(8), loop.step(9)
    assert [(options.get("time_limit_s"), options["compare_eager"]) for options in seen] == [(None, True), (5.0, False)]
    loop.model[0].bias.requires_grad_(False)  # another step, not another size
    loop.step(8)
    assert "time_limit_s" not in seen[2]


def test_another_size_gets_all_the_time_where_less_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = noted(monkeypatch, quickest_s=9.0)
    loop = Loop(time_limit_s=9.0)
    loop.step(8), loop.step(9)
    assert [options["time_limit_s"] for options in seen] == [9.0, 5.0, 9.0]


def test_another_size_need_not_wait_for_a_good_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = noted(monkeypatch)
    for options in ({}, {"wait": "1%"}, {"swap": "never"}):
        loop = Loop(passes=3, **options)
        loop.step(8), loop.step(9)
    assert [(options.get("wait"), options["passes"]) for options in seen] == [
        (None, 3), (0, 1), ("1%", 3), ("1%", 3), (None, 3), (None, 3),
    ]  # fmt: skip


def test_many_sizes_are_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(per_batch, "_MANY_SIZES", 2)
    loop = Loop()
    loop.step(8), loop.step(9)
    with pytest.warns(UserWarning, match=r"batches have come in 3 sizes so far, .*pad_to_multiple_of=64.*dynamic=True"):
        loop.step(10)
    with raise_warnings(UserWarning):
        loop.step(11)


def test_a_size_that_nothing_fits_is_named() -> None:
    loop = Loop("100%")
    loop.step(8)
    with pytest.raises(
        InfeasibleError, match=r"for a batch of \[512, 8\], \[512\], whose budget is 100% of the first batch's peak, .*: budget"
    ):
        loop.step(512)
