"""The bench of training with compression: what it measures is so, and what must not be is noticed."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks.compression import (
    BITS,
    CASES,
    OTHER_WEIGHTS,
    CurveRow,
    LearningCase,
    compute_largest_difference,
    generate_noisy_classes,
    generate_patterns,
    list_failures,
    smooth,
    train,
)
from benchmarks.training_loop import Recipe
from planner.capture.signature import Batch
from planner.capture.workload.models import build
from planner.studies.tables import group_by

STEPS, SEED = 3, 5


def points(like: Batch, count: int, seed: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(like[0].shape, generator=generator)
        yield x, x[:, :10].argmax(1)


CASE = LearningCase(
    Recipe(partial(build, "mlp", layers=2, width=32, batch=256, classes=10, dropout=0.1), "adamw", rate=1e-2), points
)


@pytest.fixture(scope="module")
def trained() -> list[CurveRow]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CASES, "mlp", CASE)
        return list(train("mlp", (), steps=STEPS, seed=SEED))


def test_curves_begin_alike_need_less_memory_and_part(trained: list[CurveRow]) -> None:
    assert list_failures(trained) == []
    found = group_by(trained, "model", "bits")
    assert list(found) == [("mlp", bits) for bits in (*BITS, OTHER_WEIGHTS)]
    assert all([row.step for row in curve] == list(range(STEPS)) for curve in found.values())
    eight, four = (found["mlp", bits] for bits in BITS)
    assert four[0].peak_bytes < eight[0].peak_bytes < eight[0].exact_peak_bytes
    for curve in (eight, four):
        one = curve[0]
        assert one.loss == one.exact_loss and all(row.loss != row.exact_loss for row in curve[1:])
        assert one.predicted_peak_bytes - one.peak_bytes in (0, 4)  # autograd lets the gradient of the loss go
        assert one.predicted_error / 2 < one.error < 2 * one.predicted_error
    assert eight[0].error < four[0].error
    other = found["mlp", OTHER_WEIGHTS]
    assert other[0].loss != other[0].exact_loss and other[0].error == 0


def test_exact_losses_are_those_of_a_plain_loop(trained: list[CurveRow]) -> None:
    torch.manual_seed(SEED)
    model, loss_fn, batch = CASE.recipe.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=CASE.recipe.rate)
    data = list(points(batch, STEPS, SEED))
    losses = []
    torch.manual_seed(SEED)
    for x, y in data:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == [row.exact_loss for row in trained[:STEPS]]


def test_smoothed_losses_and_their_largest_difference(trained: list[CurveRow]) -> None:
    assert smooth([1.0, 2.0, 6.0]) == [3.0]
    assert smooth([0.0] * 20 + [20.0] * 2) == [0.0, 1.0, 2.0]
    curve = [replace(trained[0], step=i, loss=2.0 - (i == 21), exact_loss=2.0) for i in range(22)]
    assert compute_largest_difference(curve) == pytest.approx(1 / 40)


def test_tokens_follow_from_a_period_and_images_from_their_class() -> None:
    like = torch.zeros(2, 12, dtype=torch.int64), torch.zeros(2, 12, dtype=torch.int64)
    first, second = generate_patterns(like, 2, SEED)
    for tokens, following in (first, second):
        assert torch.equal(tokens[:, 1:], following[:, :-1]) and torch.equal(tokens[:, 4:], tokens[:, :-4])
    assert not torch.equal(first[0], second[0])
    like = torch.zeros(500, 3, 4, 4), torch.zeros(500, dtype=torch.int64)
    (images, classes), (again, others) = generate_noisy_classes(like, 2, SEED)
    means = [torch.stack([x[y == c].mean(0) for c in range(10)]).flatten() for x, y in ((images, classes), (again, others))]
    assert torch.corrcoef(torch.stack(means))[0, 1] > 0.7
