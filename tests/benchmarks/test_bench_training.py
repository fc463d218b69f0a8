"""The bench of training loops: what it measures is so, and what must not be is noticed."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks import training
from benchmarks.training import EAGER, PLANNED, TrainingRow, choose_budget, group_pairs, list_failures, train
from benchmarks.training_loop import Recipe, generate_batches
from planner.capture.step import TrainingStep
from planner.capture.workload.models import Workload, build
from planner.measure import tracing
from planner.measure.steps import get_loss
from planner.plans.solve import solve
from planner.train.compile.step import PlannedStep
from tests.support.models.steps import mutated

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")

CPU = torch.device("cpu")
GPT2 = partial(build, "gpt2", layers=1, width=32, heads=4, vocab=97, seq=24, batch=16)
# The names are the bench's, the models are tiny: the second has buffers and dropout.
RECIPES = {
    "gpt2": Recipe(GPT2, "adamw", rate=1e-3, clip=0.5, autocast=True),
    "resnet50": Recipe(lambda device: mutated(), "momentum", rate=0.05),
}


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "RECIPES", {"cpu": RECIPES})
        patch.setattr(training, "_LEAST_LIMIT_S", 1.0)
        patch.setattr(training, "_SOLVE_LIMIT_S", 1.0)
        yield


@pytest.fixture(scope="module")
def trained(_quick: None) -> list[TrainingRow]:
    return [row for name in RECIPES for row in train(name, (), device=CPU, steps=3)]


def test_planned_loops_are_eager_ones_in_less_memory(trained: list[TrainingRow]) -> None:
    assert list_failures(trained) == []
    assert [(row.model, row.loop, row.step) for row in trained] == [
        (model, loop, step) for model in RECIPES for loop in (EAGER, PLANNED) for step in range(3)
    ]
    for pair in group_pairs(trained).values():
        assert len({row.loss for row in pair.eager}) == 3  # every step has a batch, and parameters, of its own
        for row in pair.planned:
            assert row.peak_bytes <= row.predicted_peak_bytes <= row.budget_bytes < pair.peak_bytes
            assert 0 < row.time_s < row.loop_s
        assert pair.eager[0].peak_bytes < pair.eager[1].peak_bytes  # optimizer state is made at the end of the first step


def noticed(spoil: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is noticed of a loop that keeps everything, and does `spoil` to its loss."""

    def plan(workload: Workload, recipe: Recipe, device: torch.device, budget_bytes: int) -> PlannedStep:
        eager = TrainingStep(workload.model, workload.loss_fn)
        found = solve(tracing.trace(*workload, passes=1), "100%", solver="keep-everything")
        return PlannedStep(replace(found, budget_bytes=budget_bytes), lambda *batch: spoil(get_loss(eager(*batch))), None)

    monkeypatch.setattr(training, "plan", plan)
    monkeypatch.setattr(training, "find_least", lambda *_: 0)
    return list_failures(list(train("gpt2", (), device=CPU, steps=3)))


def test_steps_that_take_more_than_their_budget_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    said = noticed(lambda loss: loss, monkeypatch)
    assert [line.partition(" took ")[0] for line in said] == [f"gpt2: step {step}" for step in range(3)]
    assert all("over its budget of" in line for line in said)


def test_losses_that_are_not_eagers_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    *_, losses, states = noticed(lambda loss: loss * (1 + 1e-6), monkeypatch)
    assert losses == "gpt2: the losses of 3 of 3 steps are not eager's"
    assert states == "gpt2: parameters, buffers or random state are not eager's in the end"


def test_a_random_state_that_moved_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(loss: torch.Tensor) -> torch.Tensor:
        torch.rand(1)
        return loss

    *_, losses, states = noticed(draw, monkeypatch)
    assert losses == "gpt2: the losses of 2 of 3 steps are not eager's"  # the first has the same dropout still
    assert "random state" in states


def test_the_budget_is_half_where_that_can_be() -> None:
    assert choose_budget(100, 50) == 50
    assert choose_budget(100, 60) == 80


def test_batches_differ_and_come_again() -> None:
    like = (torch.randn(4, 3), torch.arange(4))
    first, second = generate_batches(like, 2, seed=1)
    assert not torch.equal(first[0], second[0])
    assert all(torch.equal(a, b) for a, b in zip(first, next(generate_batches(like, 1, seed=1)), strict=True))
    assert [(t.shape, t.dtype) for t in first] == [(t.shape, t.dtype) for t in like]
