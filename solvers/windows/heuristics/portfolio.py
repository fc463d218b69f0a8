"""Looks for schedules, in several ways that take turns by what they achieve."""

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from solvers.problem import problem_of
from solvers.windows.formulation.granularity import Discretization, Model
from solvers.windows.heuristics.neighbourhoods import Neighbourhoods
from solvers.windows.heuristics.random_keys import RandomKeys
from solvers.windows.heuristics.relax_and_fix import advance
from solvers.windows.heuristics.segments import improvements
from solvers.windows.incumbent import Search
from solvers.windows.solution.decode import Choice, read_choice
from solvers.windows.solution.encode import start_values

_FIRST_SLICE_S = 2.0  # for the model that looks for schedules; twice as much in each further round
_ADVANCE_S = 30.0
_PLACE_S = 4.0  # for each model on the way
_PLACE_GAP = 5e-3  # of the whole step, likewise
_RUNS = 20  # of eviction at a time
_IDLE_RUNS = 200  # of these without better, and it is given a rest
_SEGMENT_S = 2.0  # for each model of a segment
_SEGMENT_GAP = 2e-5  # of the whole step, likewise; what is gained less is left
_LEAST_SHARE = 0.25  # of the time, for a way that gains nothing, beside the best
_SLOW = 1e-4  # of what is made smaller, in a second: where no way gains as much, all get about the same time
_MEMORY = 0.95  # what was gained and spent counts this much less a second later


class Portfolio:
    """Looks for schedules until the model that looks for them has no better one."""

    def __init__(self, search: Search, coarse: Discretization, detail: Discretization) -> None:
        """What it starts from.

        Args:
            coarse: two windows, up to the peak and after it.
            detail: what the relaxation came to so far.
        """
        self.search = search
        self.coarse = coarse
        self.detail = detail
        self.neighbourhoods = Neighbourhoods(search, coarse)
        self.repairs = RandomKeys(search.problem, search.budget_bytes, search.solutions, search.best_s, search.improve_order)

    def find(self) -> None:
        """Look for schedules."""
        search = self.search
        began = search.seconds
        self.neighbourhoods.begin()  # the first of the restarts
        began_s = search.seconds - began
        if search.best is None:
            self.advance()
        restarts = self.neighbourhoods.restarts()
        if search.best is None:
            take_turns([restarts], search.best_s, lambda: search.best is not None or search.enough())
        ways = [self.neighbourhoods.reopenings(), self.neighbourhoods.exchanges(), self.improvements(), restarts]
        take_turns(ways, search.best_s, search.enough, least=(0.25, 0.25, 0.25, 0.05), already=(0.0, 0.0, 0.0, began_s))
        self.repair()
        take_turns([self.improvements()], search.best_s, search.enough)
        slice_s = _FIRST_SLICE_S
        exhausted = False
        detail = self.detail
        while not (exhausted or search.enough()):
            detail, exhausted = search.refine(detail, slice_s, is_relaxation=False)
            slice_s *= 2

    def advance(self) -> None:
        """Go from the first op to the last, settling what fits; first without repeating ops after the peak."""
        search = self.search
        graph, budget_bytes = search.problem.graph, search.budget_bytes
        for repeatable, slice_s in ((range(self.coarse.ends[0] + 1), _ADVANCE_S), (None, 2 * _ADVANCE_S)):
            problem = problem_of(graph, budget_bytes, repeatable=repeatable)
            until = min(search.deadline, time.monotonic() + slice_s)
            if search.stopped() or advance(problem, budget_bytes, self.coarse, self.solve_place, search.offer, until):
                return

    def repair(self) -> None:
        """Evict, in many ways, until that leads no further."""
        search = self.search
        search.tell("trying rules of eviction")
        idle = 0
        while idle < _IDLE_RUNS and not search.enough():
            before = search.best_s()
            self.repairs.guided(search.enough)
            self.repairs.varied(_RUNS, search.enough)
            idle = 0 if search.best_s() < before * (1 - _SEGMENT_GAP) else idle + _RUNS

    def improvements(self) -> Iterator[None]:
        """Choose anew in one segment of the best schedule after another."""
        search = self.search
        if search.best is None:
            return
        yield from improvements(
            search.problem, search.best_trial, search.budget_bytes, self.solve_segment, search.offer, search.enough
        )

    def solve_segment(self, model: Model, choice: Choice, below_s: float) -> Choice | None:
        """A solution of the model of a segment that costs less than `below_s`."""
        search = self.search
        search.tell(f"improving ops {model.detail.ends[0] + 1} to {model.detail.ends[-1]}")
        below = search.problem.units(below_s - _SEGMENT_GAP * search.problem.base_s)
        start = start_values(model, choice)
        answer = search.solve_part(
            model.program, _SEGMENT_S, gap=_SEGMENT_GAP, start=start, below=below, should_stop=search.stopped
        )
        if answer.values is None or answer.objective is None or answer.objective >= below:
            return None
        return read_choice(model, answer.values)

    def solve_place(self, model: Model, left_s: float) -> Choice | None:
        """A solution of one of the models of ``advance``, good enough to go on from."""
        search = self.search
        search.tell(f"searching from op {model.detail.ends[0] if model.detail.ends else 0} on")
        answer = search.solve_part(model.program, min(left_s, _PLACE_S), gap=_PLACE_GAP, should_stop=search.stopped)
        return None if answer.values is None else read_choice(model, answer.values)


def take_turns(
    ways: Sequence[Iterator[None]],
    value: Callable[[], float],
    should_stop: Callable[[], bool],
    *,
    least: Sequence[float] | None = None,
    already: Sequence[float] | None = None,
) -> None:
    """Take steps of several ways until all have ended; a way that has gained more lately gets more of the time.

    The principle is that of adaptive large-neighbourhood search (Ropke and Pisinger, Transportation Science 2006).

    Args:
        value: what they make smaller.
        least: for each way its share where it gains nothing, beside 1 for the one that gains most; by default even.
        already: seconds that each is taken to have had; by default none.
    """
    ways, least = list(ways), list(least or [_LEAST_SHARE] * len(ways))
    gained, spent = [0.0] * len(ways), list(already or [0.0] * len(ways))
    while ways and not should_stop():
        shares = [few + gain / (max(gained) + _SLOW) for few, gain in zip(least, gained, strict=True)]
        turn = min(range(len(ways)), key=lambda i: spent[i] / shares[i])
        before, began = value(), time.monotonic()
        ended = next(ways[turn], _ENDED) is _ENDED
        took = time.monotonic() - began
        gain = (before - value()) / before if before > 0 else 0.0
        fading = _MEMORY**took
        gained = [fading * g for g in gained]
        spent = [fading * s for s in spent]
        gained[turn] += gain / took if np.isfinite(gain) and took > 0 else 0.0
        spent[turn] += took
        if ended:
            del ways[turn], least[turn], gained[turn], spent[turn]


_ENDED = object()
