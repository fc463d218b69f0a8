"""How often the garbage collector runs while ops are recorded."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from planner.train.eager.session import rematerialize
from tests.support.eager.chains import chain, is_open
from tests.support.native import NEEDS_LIBRARY


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[tuple[int, ...]]:
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)


def train(model: nn.Module) -> None:
    for _ in range(2):
        model(torch.ones(8, 64)).sum().backward()
    torch.ones(1).add(1)


@NEEDS_LIBRARY
def test_the_collector_runs_rarely_only_while_ops_are_recorded(thresholds: tuple[int, ...]) -> None:
    youngest, *older = thresholds
    rarely = (20 * youngest, *older)
    with rematerialize("1GB") as session:
        assert gc.get_threshold() == rarely
        train(chain(2))
        assert is_open(session)
        assert gc.get_threshold() == thresholds
        session.debug.reader.log.shared.must_close = 1
        torch.ones(1)
        assert gc.get_threshold() == rarely
    assert gc.get_threshold() == thresholds


def test_thresholds_that_the_program_sets_are_kept() -> None:
    with rematerialize("1GB"):
        gc.set_threshold(900, 5, 5)
    assert gc.get_threshold() == (900, 5, 5)


def test_an_error_restores_the_thresholds(thresholds: tuple[int, ...]) -> None:
    with pytest.raises(KeyError), rematerialize("1GB"):
        raise KeyError
    assert gc.get_threshold() == thresholds
