"""Orders with round trips rid of executions they do not need."""

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate

import numpy as np

from solvers.problem import Problem
from solvers.windows.decoding.decode import Trial, order_of, try_out
from solvers.windows.relaxation.discretization import Discretization

Away = frozenset[tuple[int, int]]


def lean(problem: Problem, trial: Trial, budget_bytes: int, should_stop: Callable[[], bool], passes: int) -> Trial:
    """`trial`, which fits, less further executions for whose outputs there is room, as long as that takes less time."""
    whole = Discretization((problem.ops - 1,))
    for _ in range(passes):
        computed, away = leaner(problem, trial, budget_bytes)
        if len(computed) == len(trial.order.computed) or should_stop():
            break
        found = try_out(problem, order_of(whole, computed, away))
        if found.peak_bytes > budget_bytes or found.time_s >= trial.time_s:
            break
        trial = found
    return trial


def leaner(problem: Problem, trial: Trial, budget_bytes: int) -> tuple[Sequence[int], Away]:
    """The order of `trial` less executions, the longest first, for whose outputs there is room since their last use.

    Of each op one at most: then what is said of its last use holds.
    """
    computed = trial.order.computed
    last_use, next_read = uses_of(problem, computed)
    memory = np.array(trial.memory_bytes)
    again = (place for place, first in enumerate(trial.order.first) if not first)
    left_out: set[int] = set()
    ops: set[int] = set()
    for place in sorted(again, key=lambda place: -problem.time_s[computed[place]]):
        if computed[place] in ops:
            continue
        wanted = [t for t in problem.outputs[computed[place]] if (t, place) in next_read and not problem.kept[t]]
        since = min((last_use[t, place] + 1 for t in wanted), default=place)
        longer = memory[since:place].copy()
        for t in wanted:
            longer[last_use[t, place] + 1 - since :] += problem.sizes[t]
        if (longer <= budget_bytes).all():
            memory[since:place] = longer
            left_out.add(place)
            ops.add(computed[place])
    return without(computed, left_out, trial.order.away, next_read)


def uses_of(problem: Problem, computed: Sequence[int]) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
    """For each tensor and position where it is read or made, its use before, and the next position that reads it so."""
    last_use: dict[tuple[int, int], int] = {}
    next_read: dict[tuple[int, int], int] = {}
    last: dict[int, int] = {}
    for place, op in enumerate(computed):
        for t in problem.inputs[op]:
            last_use[t, place] = last[t]
            next_read[t, last[t]] = place
            last[t] = place
        for t in problem.outputs[op]:
            last_use[t, place] = last.get(t, place)
            last[t] = place
    return last_use, next_read


def without(
    computed: Sequence[int], left_out: Collection[int], away: Away, next_read: dict[tuple[int, int], int]
) -> tuple[Sequence[int], Away]:
    """The order without some executions: what was fetched for one of them is fetched for the next that reads it."""
    shift = list(accumulate((place in left_out for place in range(len(computed))), initial=0))
    moved: set[tuple[int, int]] = set()
    for t, place in away:
        at: int | None = place
        while at is not None and at in left_out:
            at = next_read.get((t, at))
        if at is not None:
            moved.add((t, at - shift[at]))
    return tuple(op for place, op in enumerate(computed) if place not in left_out), frozenset(moved)
