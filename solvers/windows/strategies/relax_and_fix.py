"""Schedules for tight budgets: fix what fits, look closer at what follows, from the first op to the last.

The model that looks for schedules is solved with few windows: those at the place reached, and coarse ones
for the rest of the step, which tell what is worth having there. The windows in which the expansion fits are
settled; the first place where it does not fit gets finer windows; and so on to the end. Each model is small, as
settled windows are constants, so that a schedule is found in a time that grows with the number of tight
places rather than exponentially. Where what was settled leaves no way on, the last of it is opened again.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from solvers.clock import Clock, left
from solvers.problem import Problem
from solvers.windows.decoding.decode import Order, Trial, late_writers, order_of
from solvers.windows.decoding.expand import Choice, expand
from solvers.windows.decoding.refinement import refined, with_stages_in_order
from solvers.windows.params import RefinementParams, WindowsParams
from solvers.windows.relaxation.discretization import Discretization, Frame, Model
from solvers.windows.relaxation.models import build_ordered

Solve = Callable[[Model, float], Choice | None]
Offer = Callable[[Order, Discretization], Trial]


@dataclass(frozen=True, slots=True)
class Place:
    """How far it has come.

    Attributes:
        prefix: executions that are settled; all of window 0 and before.
        entering: tensors in memory after them (None: nothing is settled).
        detail: the windows; window 0 is past if anything is settled.
    """

    prefix: tuple[int, ...]
    entering: frozenset[int] | None
    detail: Discretization

    @property
    def first_window(self) -> int:
        """The first window that is open."""
        return 0 if self.entering is None else 1


def advance(problem: Problem, detail: Discretization, solve: Solve, offer: Offer, clock: Clock, params: WindowsParams) -> bool:
    """Find a schedule; whether it did.

    Args:
        detail: coarse windows to start from.
        solve: gives the solution of a model within so much of the clock, None if there is none (or no time).
        offer: tries an order out, and keeps it if it fits.
        clock: gives up at its limit.
    """
    budget_bytes = problem.budget_bytes
    place = Place((), None, detail)
    behind: list[Place] = []
    back = 1
    for _ in range(params.relax_and_fix.most_solves):
        if left(clock) <= 0:
            return False
        choice = solve(build_ordered(problem, place.detail, Frame(entering=place.entering)), left(clock))
        closer = None
        if choice is not None:
            order = order_of(place.detail, place.prefix + expand(problem, place.detail, choice, first_window=place.first_window))
            if writers := late_writers(problem, order):
                place = replace(place, detail=_with_ends(place.detail, writers))
                continue
            trial = offer(order, place.detail)
            if trial.peak_bytes <= budget_bytes:
                return True
            closer = _closer(place.detail, trial, budget_bytes, params.refinement)
        if choice is None or closer is None or closer == place.detail:
            if not behind:
                return False
            for _ in range(min(back, len(behind))):
                earlier = behind.pop()
            back *= 2
            place = replace(earlier, detail=_merged(earlier.detail, place.detail))
            continue
        still_open = params.relax_and_fix.open_windows
        settled = _settle(replace(place, detail=closer), place.detail, choice, trial, budget_bytes, still_open)
        if settled is not None:
            behind.append(replace(place, detail=closer))
            place = settled
            back = max(1, back // 2)
        else:
            place = replace(place, detail=closer)
    return False


def _closer(detail: Discretization, trial: Trial, budget_bytes: int, params: RefinementParams) -> Discretization:
    """`detail` refined at the first run of executions over the budget, and what else is over it in that window."""
    first = next(step for step, taken in enumerate(trial.memory_bytes) if taken > budget_bytes)
    window = trial.order.windows[first]
    memory = tuple(
        taken if at == window else min(taken, budget_bytes)
        for taken, at in zip(trial.memory_bytes, trial.order.windows, strict=True)
    )
    here = replace(trial, memory_bytes=memory)
    return with_stages_in_order(refined(detail, here, budget_bytes, params), here, budget_bytes, params)


def _settle(
    place: Place, solved: Discretization, choice: Choice, trial: Trial, budget_bytes: int, still_open: int
) -> Place | None:
    """`place` with the windows of `solved` settled that lie well before the first execution over the budget."""
    first = next(step for step, taken in enumerate(trial.memory_bytes) if taken > budget_bytes)
    last = trial.order.windows[first] - 1 - still_open  # the last window to settle
    if last < place.first_window:
        return None
    end = solved.ends[last]
    executed = trial.order.computed.index(end)
    ends = tuple(e for e in place.detail.ends if e >= end)
    return Place(trial.order.computed[: executed + 1], choice.handed[last + 1], replace(place.detail, ends=ends))


def _with_ends(detail: Discretization, more: Collection[int]) -> Discretization:
    return replace(detail, ends=tuple(sorted({*detail.ends, *more})))


def _merged(earlier: Discretization, later: Discretization) -> Discretization:
    """The windows of `later`, and before them those of `earlier`."""
    return Discretization(
        tuple(sorted({*earlier.ends, *later.ends})),
        earlier.firsts | later.firsts,
        earlier.repeats | later.repeats,
        ordered=earlier.ordered | later.ordered,
    )
