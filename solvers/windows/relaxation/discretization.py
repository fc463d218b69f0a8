"""The discretization of a model (windows and requested rows), and the meaning of its columns."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Self

from planner.solvers.highs.program import Milp
from planner.solvers.problem import Problem

Decision = tuple[tuple[int, ...], bool]


@dataclass(frozen=True, slots=True)
class Discretization:
    """The windows of a model, and the steps that have memory rows of their own.

    Attributes:
        ends: e_1 < ... < e_K, the last is the last op.
        firsts: ops v with row 6 (their first execution inside a window).
        recomputations: pairs (e_k, x) with row 7 (x recomputed in the window that ends at e_k).
        merged: first and last op of consecutive windows that row 8 takes as one: windows that have been split, and halves.
        places: for each op the last one of its place, where windows end; () if each op has its own place.
        decided: (ops, True if one of them is executed in its place): a restriction to such schedules, see ``branches.py``.
    """

    ends: tuple[int, ...]
    firsts: frozenset[int] = frozenset()
    recomputations: frozenset[tuple[int, int]] = frozenset()
    merged: frozenset[tuple[int, int]] = frozenset()
    places: tuple[int, ...] = ()
    decided: frozenset[Decision] = frozenset()

    @classmethod
    def whole(cls, problem: Problem) -> Self:
        """Return one window over the whole step."""
        places = problem.places
        return cls((problem.ops - 1,), places=() if places.plain else places.last)

    def find_window(self, op: int) -> int:
        """Return the index of the window in which `op` is first executed."""
        return bisect_left(self.ends, op)

    def start_of(self, window: int) -> int:
        """Return the first op of `window`."""
        return self.ends[window - 1] + 1 if window else 0

    def is_single(self, window: int) -> bool:
        """Return True if `window` has one op only, or the ops of one place."""
        start = self.start_of(window)
        return (self.places[start] if self.places else start) == self.ends[window]

    def place_of(self, op: int) -> tuple[int, int]:
        """Return the first and last op of the place that `op` belongs to."""
        if not self.places:
            return op, op
        return bisect_left(self.places, self.places[op]), self.places[op]

    def split_at(self, ends: Iterable[int]) -> "Discretization":
        """Return this discretization with windows that also end at `ends`, or at the last ops of their places."""
        ends = (self.places[end] for end in ends) if self.places else ends
        return replace(self, ends=tuple(sorted({*self.ends, *ends})))

    def split(self, ends: Iterable[int]) -> "Discretization":
        """Return the result of ``split_at``, with split windows as merged ones, so that their rows remain."""
        finer = self.split_at(ends)
        windows = [(self.start_of(k), end) for k, end in enumerate(self.ends)]
        merged = {(start, end) for start, end in windows if finer.find_window(start) < finer.find_window(end)}
        merged |= {(self.start_of(first), self.ends[last]) for first, last in list_halves(1, len(self.ends) - 1)}
        return replace(finer, merged=self.merged | merged)


@dataclass(slots=True)
class Model:
    """A 0-1 program and the meaning of its columns: (window, op) or (window, tensor) -> column."""

    problem: Problem
    discretization: Discretization
    recomputed: dict[tuple[int, int], int]  # R and Q, which exclude each other in a window
    handed: dict[tuple[int, int], int]  # S
    program: Milp
    taken: dict[tuple[int, int], int] = field(default_factory=dict)  # A, see ``transfers.py``
    instead: dict[int, int] = field(default_factory=dict)  # z, by op


def list_halves(first: int, last: int) -> list[tuple[int, int]]:
    """Return the runs first..last, its two halves, their halves, ... down to two windows."""
    if first >= last:
        return []
    middle = (first + last) // 2
    return [(first, last), *list_halves(first, middle), *list_halves(middle + 1, last)]
