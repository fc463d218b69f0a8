"""Calls in processes of their own: what they yield, and how they end."""

import os
import sys
import time
from collections.abc import Iterator

import pytest

from planner.studies.processes import ProcessError, stream


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


def test_what_is_yielded_in_a_process_comes_from_there() -> None:
    numbers, processes = zip(*stream(counting, 3), strict=True)
    assert numbers == (0, 1, 2)
    assert len(set(processes)) == 1 and os.getpid() not in processes


def test_a_process_that_fails_is_named_after_what_it_yielded() -> None:
    made: list[int] = []
    with pytest.raises(ProcessError, match="exit code 1: ValueError: no such thing"):
        made.extend(number for number in stream(failing))
    assert made == [1]
    with pytest.raises(ProcessError, match="exit code 1: TypeError"):
        list(stream(divmod, 1))


def test_a_process_that_does_not_end_is_ended() -> None:
    with pytest.raises(ProcessError, match="not ended after 1 s"):
        list(stream(counting, 2, 60.0, limit_s=1.0))


def test_variables_are_those_of_the_process() -> None:
    assert list(stream(variable, "FOR_THE_CHILD", variables={"FOR_THE_CHILD": "yes"})) == ["yes"]
    assert "FOR_THE_CHILD" not in os.environ
