"""Calls in processes of their own: what they yield, and how they end."""

import os
import sys
import time
from collections.abc import Iterator

import pytest

from planner.studies.processes import ProcessError, iterate_results


def counting(until: int, sleep_s: float = 0.0) -> Iterator[tuple[int, int]]:
    sys.stdout.write("what is printed is not what is yielded")
    for number in range(until):
        yield number, os.getpid()
    time.sleep(sleep_s)


def failing() -> Iterator[int]:
    yield 1
    raise ValueError("no such thing")


def variable(name: str) -> Iterator[str | None]:
    yield os.environ.get(name)


def test_stream_yields_values_from_another_process() -> None:
    numbers, processes = zip(*iterate_results(counting, 3), strict=True)
    assert numbers == (0, 1, 2)
    assert len(set(processes)) == 1 and os.getpid() not in processes


def test_failed_process_raises_after_its_yielded_values() -> None:
    made: list[int] = []
    with pytest.raises(ProcessError, match="exit code 1: ValueError: no such thing"):
        made.extend(number for number in iterate_results(failing))
    assert made == [1]
    with pytest.raises(ProcessError, match="exit code 1: TypeError"):
        list(iterate_results(divmod, 1))


def test_a_process_that_does_not_end_is_ended() -> None:
    with pytest.raises(ProcessError, match="not ended after 1 s"):
        list(iterate_results(counting, 2, 60.0, limit_s=1.0))


def test_variables_are_those_of_the_process() -> None:
    assert list(iterate_results(variable, "FOR_THE_CHILD", variables={"FOR_THE_CHILD": "yes"})) == ["yes"]
    assert "FOR_THE_CHILD" not in os.environ
