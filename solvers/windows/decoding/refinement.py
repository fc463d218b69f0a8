"""Refinement of a discretization where a trial exceeds the budget."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby

import numpy as np

from planner.solvers.windows.decoding.decode import Trial
from planner.solvers.windows.relaxation.discretization import Discretization

_PIECE, _MOST_PIECES = 12, 8  # ops of a piece of a long run over the budget, of each of which the worst execution is refined
_MOST_WAITS = 4  # places with the longest waits for transfers that are refined


def find_worst_in_runs(trial: Trial, budget_bytes: int) -> Iterator[int]:
    """Yield for each run of consecutive executions over the budget the one that needs most; several for long runs."""
    for exceeds, steps in groupby(range(len(trial.memory_bytes)), lambda step: trial.memory_bytes[step] > budget_bytes):
        if not exceeds:
            continue
        run = list(steps)
        pieces = min(_MOST_PIECES, -(-len(run) // _PIECE))
        size = -(-len(run) // pieces)
        for begin in range(0, len(run), size):
            yield max(run[begin : begin + size], key=lambda step: (trial.memory_bytes[step], -step))


def refine_windows(discretization: Discretization, trial: Trial, budget_bytes: int, *, ahead: int = 1) -> Discretization:
    """Return `discretization`, refined at every place where `trial` exceeds the budget.

    At a first execution of v: row 6; if it is there, a window ends at v. At a recomputation of x before v: a window of its own
    for v; if it has one, row 7. If nothing is left to add, `discretization` is returned.

    Args:
        ahead: refine the last so many ops up to v as if the schedule exceeded the budget at each: the next solution would often
            recompute x before an earlier one.
    """
    ends, firsts = set(discretization.ends), set(discretization.firsts)
    recomputations = set(discretization.recomputations)
    for step in find_worst_in_runs(trial, budget_bytes):
        op = trial.order.computed[step]
        if trial.order.first[step]:
            (ends if op in firsts else firsts).add(op)
            continue
        before = next(trial.order.computed[s] for s in range(step, len(trial.order.first)) if trial.order.first[s])
        for v in _list_ops_up_to(before, ahead):
            single = discretization.is_single(discretization.find_window(v))
            if not single:
                first, last = discretization.place_of(v)
                ends.update((first - 1, last) if first > 0 else (last,))
            if single or ahead > 1:
                recomputations.add((v, op))
    closer = replace(
        discretization,
        firsts=frozenset(firsts),
        recomputations=frozenset(recomputations),
    )
    return closer.split(ends)


def split_at_waits(discretization: Discretization, trial: Trial) -> Discretization:
    """Return `discretization` with windows that end at the first executions with the longest waits of `trial`."""
    new = [op for op, first in zip(trial.order.computed, trial.order.first, strict=True) if first]
    done = list(accumulate(trial.order.first, initial=0))
    waits = sorted(((wait_s, place) for place, wait_s in enumerate(trial.waits_s) if wait_s > 0), reverse=True)
    return discretization.split({new[done[place]] for _, place in waits[:_MOST_WAITS]}) if waits else discretization


def _list_ops_up_to(op: int, count: int) -> range:
    return range(max(0, op - count + 1), op + 1)


def halve(discretization: Discretization) -> Discretization:
    """Return `discretization` with every window of several ops split in the middle."""
    ends = set(discretization.ends)
    for window, end in enumerate(discretization.ends):
        start = discretization.start_of(window)
        if start < end:
            ends.add((start + end) // 2)
    return discretization.split(ends)


def split_evenly(discretization: Discretization, time_s: Sequence[float], parts: int) -> Discretization:
    """Return `discretization` with windows that split the step into `parts` of equal time."""
    done_s = np.cumsum(time_s)
    places = np.searchsorted(done_s, np.linspace(0.0, done_s[-1], parts + 1)[1:-1])
    return discretization.split_at(int(op) for op in places if op < len(time_s) - 1)
