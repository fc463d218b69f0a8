"""How often the garbage collector runs while ops are recorded."""

import gc
from collections.abc import Iterator

import pytest

from planner.train.eager.session import rematerialize


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[tuple[int, ...]]:
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)


def test_the_collector_runs_rarely_in_a_block(thresholds: tuple[int, ...]) -> None:
    youngest, *older = thresholds
    with rematerialize("1GB"):
        assert gc.get_threshold() == (20 * youngest, *older)
    assert gc.get_threshold() == thresholds


def test_thresholds_that_the_program_sets_are_kept() -> None:
    with rematerialize("1GB"):
        gc.set_threshold(900, 5, 5)
    assert gc.get_threshold() == (900, 5, 5)


def test_an_error_restores_the_thresholds(thresholds: tuple[int, ...]) -> None:
    with pytest.raises(KeyError), rematerialize("1GB"):
        raise KeyError
    assert gc.get_threshold() == thresholds
