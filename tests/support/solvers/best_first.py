"""The fastest of all ways through states that have times: of two states that differ in times alone, the earlier one is enough."""

import heapq
from collections.abc import Iterable
from math import inf
from typing import Any, Protocol

from planner.graphs.schedule import Schedule, Step


class Search(Protocol):
    """What states there are."""

    def moves(self, state: Any) -> Iterable[tuple[tuple[Step, ...], Any]]:
        """Return the steps that may come next, and the state after each."""

    def at_least(self, state: Any) -> float:
        """Return a bound on the time of all ways through `state`."""

    def count_done(self, state: Any) -> int:
        """Return how much is done, by which states of the same bound are ordered."""

    def is_over(self, state: Any) -> bool:
        """Return True if nothing is left to do."""

    def split(self, state: Any) -> tuple[object, tuple[float, ...]]:
        """Return what is compared for equality, and times: earlier is better."""


def find_fastest(search: Search, start: Any, most: float = inf) -> tuple[float, Schedule] | None:
    """Time and steps of the fastest way from `start` to a state where all is done; None if there is none.

    Raises:
        TimeoutError: more than `most` states.
    """
    queue: list[tuple[float, int, int, Any, object]] = [(0.0, 0, 0, start, None)]
    fronts: dict[object, list[tuple[float, ...]]] = {}
    pushed = 0
    while queue:
        _, _, _, state, came = heapq.heappop(queue)
        if search.is_over(state):
            return max(state.clocks), _trace(came)
        key, times = search.split(state)
        front = fronts.setdefault(key, [])
        if any(all(a <= b for a, b in zip(other, times, strict=True)) for other in front):
            continue
        front.append(times)
        for steps, after in search.moves(state):
            pushed += 1
            if pushed > most:
                raise TimeoutError
            heapq.heappush(queue, (search.at_least(after), -search.count_done(after), pushed, after, (came, steps)))
    return None


def _trace(came: object) -> Schedule:
    steps: list[Step] = []
    while came is not None:
        came, some = came
        steps = [*some, *steps]
    return Schedule(tuple(steps))
