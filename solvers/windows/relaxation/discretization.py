"""What a model looks at, and what its columns mean."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from solvers.highs.program import Milp
from solvers.problem import Problem

Decision = tuple[tuple[int, ...], bool]


@dataclass(frozen=True, slots=True)
class Discretization:
    """How finely a model looks: window ends, and the steps that have memory rows of their own.

    Attributes:
        ends: e_1 < ... < e_K, the last is the last op.
        firsts: ops v with row 6 (their first execution inside a window).
        repeats: pairs (e_k, x) with row 7 (x executed again in the window that ends at e_k).
        chains: triples (e_k, x, z): row 9 of z counts what x leaves in memory, see ``chains.py``.
        ordered: pairs (v, x) with Checkmate's memory row of x in the stage {v}: no relaxation, see ``in_stage.py``.
        spans: first and last op of runs of windows with row 8: windows that have been split, and halves.
        places: for each op the last one of its place, where windows end; () where each op has its own.
        decided: (stand-ins, whether one of them is executed in its place), where only such schedules are looked at, see
            ``branches.py``.
    """

    ends: tuple[int, ...]
    firsts: frozenset[int] = frozenset()
    repeats: frozenset[tuple[int, int]] = frozenset()
    chains: frozenset[tuple[int, int, int]] = frozenset()
    ordered: frozenset[tuple[int, int]] = frozenset()
    spans: frozenset[tuple[int, int]] = frozenset()
    places: tuple[int, ...] = ()
    decided: frozenset[Decision] = frozenset()

    def window_of(self, op: int) -> int:
        """Index of the window in which `op` is first executed."""
        return bisect_left(self.ends, op)

    def start_of(self, window: int) -> int:
        """First op of `window`."""
        return self.ends[window - 1] + 1 if window else 0

    def is_single(self, window: int) -> bool:
        """Whether `window` has one op only, or the ops of one place."""
        start = self.start_of(window)
        return (self.places[start] if self.places else start) == self.ends[window]

    def place_of(self, op: int) -> tuple[int, int]:
        """First and last op of the place that `op` belongs to."""
        if not self.places:
            return op, op
        return bisect_left(self.places, self.places[op]), self.places[op]

    def ending_at(self, ends: Iterable[int]) -> "Discretization":
        """With windows that end at `ends` too, or at the last op of their places."""
        ends = (self.places[end] for end in ends) if self.places else ends
        return replace(self, ends=tuple(sorted({*self.ends, *ends})))

    def split(self, ends: Iterable[int]) -> "Discretization":
        """The same. What has been known of whole windows stays known of them as spans."""
        finer = self.ending_at(ends)
        windows = [(self.start_of(k), end) for k, end in enumerate(self.ends)]
        spans = {(start, end) for start, end in windows if finer.window_of(start) < finer.window_of(end)}
        spans |= {(self.start_of(first), self.ends[last]) for first, last in halves(1, len(self.ends) - 1)}
        return replace(finer, spans=self.spans | spans)


@dataclass(slots=True)
class Model:
    """A 0-1 program and what its columns mean: (window, op) or (window, tensor) -> column."""

    problem: Problem
    detail: Discretization
    again: dict[tuple[int, int], int]  # R and Q: by windows they exclude each other
    handed: dict[tuple[int, int], int]  # S
    twice: dict[tuple[int, int], int]  # D, see ``chains.py``
    program: Milp
    taken: dict[tuple[int, int], int] = field(default_factory=dict)  # A, see ``copies.py``
    instead: dict[int, int] = field(default_factory=dict)  # z, by op


@dataclass(frozen=True, slots=True)
class Frame:
    """What is settled around the windows of a model; None: nothing, they cover the whole step.

    Attributes:
        entering: tensors handed over into window 1; window 0 is past, and not modelled.
        leaving: tensors to be handed on by the last window; what follows is not modelled.
    """

    entering: frozenset[int] | None = None
    leaving: frozenset[int] | None = None


def halves(first: int, last: int) -> list[tuple[int, int]]:
    """The spans first..last, its two halves, their halves, ... down to two windows."""
    if first >= last:
        return []
    middle = (first + last) // 2
    return [(first, last), *halves(first, middle), *halves(middle + 1, last)]
