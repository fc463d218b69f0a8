"""Pruning of schedules: removal of recomputations that the budget does not require.

A decoded solution recomputes what its windows say, although there is often room to keep the tensor. Removal is greedy, and takes
at most one execution of each op in a pass, so that last uses stay valid. So it ends in a local optimum, from which the
strategies that improve schedules go on.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate

import numpy as np

from planner.solvers.problem import Problem
from planner.solvers.windows.decoding.decode import Trial, order_of, try_out
from planner.solvers.windows.decoding.transfer_plan import Reloads
from planner.solvers.windows.relaxation.discretization import Discretization

_PASSES = 8  # over an order


def prune(
    problem: Problem,
    trial: Trial,
    discretization: Discretization | None,
    budget_bytes: int,
    should_stop: Callable[[], bool],
) -> Trial:
    """Return `trial`, which fits, without recomputations that the budget does not require, the longest first.

    Their outputs stay in memory since the previous execution. With optional ops and transfers to the host nothing is removed:
    that is done in its plain graph.
    """
    if problem.round_trips:
        return prune_with_transfers(problem, trial, budget_bytes, should_stop) if problem.places.plain else trial
    for _ in range(_PASSES):
        if should_stop():
            break
        useless = set[int]() if problem.places.plain else _find_useless(problem, trial)
        unnecessary = useless or _find_affordable(problem, trial, budget_bytes)
        if not unnecessary:
            break
        computed = [op for position, op in enumerate(trial.order.computed) if position not in unnecessary]
        trial = try_out(problem, order_of(problem, computed, instead=trial.order.instead, discretization=discretization))
    return trial


def _find_affordable(problem: Problem, trial: Trial, budget_bytes: int) -> set[int]:
    """Return the positions of recomputations whose outputs there is memory to keep, the longest first."""
    memory = np.array(trial.memory_bytes)
    last_use: dict[int, int] = {}
    longer_lives: list[tuple[float, int, list[tuple[int, int]]]] = []
    for position, (op, first) in enumerate(zip(trial.order.computed, trial.order.first, strict=True)):
        if not first and all(t in last_use for t in problem.outputs[op]):
            # If the last use of t has overwritten it, t takes memory of its own from there on.
            over = {t for t in problem.outputs[op] if problem.may_overwrite(trial.order.computed[last_use[t]], t)}
            lives = [(last_use[t] + (t not in over), problem.sizes[t]) for t in problem.outputs[op] if not problem.kept[t]]
            longer_lives.append((-problem.time_s[op], position, lives))
        for t in (*problem.inputs[op], *problem.outputs[op]):
            last_use[t] = position
    affordable: set[int] = set()
    shortened: set[int] = set()
    for _, position, lives in sorted(longer_lives):
        if trial.order.computed[position] in shortened:
            continue
        begin = min((since for since, _ in lives), default=position)
        longer = memory[begin:position].copy()
        for since, size in lives:
            longer[since - begin :] += size
        if (longer <= budget_bytes).all():
            memory[begin:position] = longer
            affordable.add(position)
            shortened.add(trial.order.computed[position])
    return affordable


def _find_useless(problem: Problem, trial: Trial) -> set[int]:
    """Return the positions of executions whose outputs are neither kept nor read before they are recomputed."""
    wanted: set[int] = set()
    unnecessary: set[int] = set()
    earlier: set[int] = set()
    made_before: list[frozenset[int]] = []
    for op in trial.order.computed:
        made_before.append(frozenset(t for t in problem.outputs[op] if t in earlier))
        earlier.update(problem.outputs[op])
    for position in range(len(trial.order.computed) - 1, -1, -1):
        op = trial.order.computed[position]
        of_use = any(t in wanted or (problem.kept[t] and t not in made_before[position]) for t in problem.outputs[op])
        if not trial.order.first[position] and not of_use:
            unnecessary.add(position)
            continue
        wanted.difference_update(t for t in problem.outputs[op] if not problem.kept[t])
        wanted.update(problem.inputs[op])
    return unnecessary


def prune_with_transfers(problem: Problem, trial: Trial, budget_bytes: int, should_stop: Callable[[], bool]) -> Trial:
    """Return `trial`, which fits, without recomputations whose outputs fit in memory, as long as that takes less time."""
    for _ in range(_PASSES):
        computed, reloads = _remove_affordable(problem, trial, budget_bytes)
        if len(computed) == len(trial.order.computed) or should_stop():
            break
        found = try_out(problem, order_of(problem, computed, reloads))
        if found.peak_bytes > budget_bytes or found.time_s >= trial.time_s:
            break
        trial = found
    return trial


def _remove_affordable(problem: Problem, trial: Trial, budget_bytes: int) -> tuple[Sequence[int], Reloads]:
    """Return the order of `trial` without executions, the longest first, whose outputs fit in memory since their last use.

    At most one execution of each op is removed: then its last use stays valid.
    """
    computed = trial.order.computed
    last_use, next_read = find_uses(problem, computed)
    memory = np.array(trial.memory_bytes)
    recomputed = (place for place, first in enumerate(trial.order.first) if not first)
    left_out: set[int] = set()
    ops: set[int] = set()
    for place in sorted(recomputed, key=lambda place: -problem.time_s[computed[place]]):
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
    return remove_executions(computed, left_out, trial.order.reloads, next_read)


def find_uses(problem: Problem, computed: Sequence[int]) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
    """Return for each tensor and position that reads or produces it the previous use, and the next position that reads it."""
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


def remove_executions(
    computed: Sequence[int], left_out: Collection[int], reloads: Reloads, next_read: dict[tuple[int, int], int]
) -> tuple[Sequence[int], Reloads]:
    """Return the order without some executions; a reload for one of them becomes a reload for the next reader."""
    shift = list(accumulate((place in left_out for place in range(len(computed))), initial=0))
    moved: set[tuple[int, int]] = set()
    for t, place in reloads:
        at: int | None = place
        while at is not None and at in left_out:
            at = next_read.get((t, at))
        if at is not None:
            moved.add((t, at - shift[at]))
    return tuple(op for place, op in enumerate(computed) if place not in left_out), frozenset(moved)
