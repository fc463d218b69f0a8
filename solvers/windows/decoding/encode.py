"""Encoding of an order of executions as values of a model's variables: the inverse of ``expand``."""

from collections.abc import Sequence

import numpy as np

from graphs.schedule import Compute, schedule_of
from solvers.highs.program import Floats
from solvers.problem import Problem
from solvers.windows.decoding.decode import Trial, order_of
from solvers.windows.decoding.expand import Solution
from solvers.windows.relaxation.discretization import Discretization, Model


def encode_order(
    problem: Problem, discretization: Discretization, computed: Sequence[int], instead: frozenset[int] = frozenset()
) -> Solution:
    """Return the values of R, Q, S and z for an order of execution: the inverse of ``expand``."""
    order = order_of(problem, computed, instead=instead, discretization=discretization)
    recomputed: list[set[int]] = [set() for _ in discretization.ends]
    handed: list[set[int]] = [set() for _ in range(len(discretization.ends) + 1)]
    twice: set[tuple[int, int]] = set()
    live: set[int] = set()
    position = -1
    boundaries = range(0)
    for step in schedule_of(problem.graph, [problem.places.ids[op] for op in computed]).steps:
        if not isinstance(step, Compute):
            live.discard(step.tensor)
            continue
        for k in boundaries:
            handed[k] = {t for t in live if not problem.kept[t] or problem.settled[t] >= discretization.start_of(k)}
        position += 1
        op, window = computed[position], order.windows[position]
        live.update(problem.outputs[op])
        if not order.first[position]:
            if op in recomputed[window]:
                twice.add((window, op))
            recomputed[window].add(op)
        following = order.windows[position + 1] if position + 1 < len(computed) else window
        boundaries = range(window + 1, following + 1)
    return Solution(tuple(map(frozenset, recomputed)), tuple(map(frozenset, handed)), frozenset(twice), instead=instead)


def encode_trial(problem: Problem, discretization: Discretization, trial: Trial) -> Solution:
    """Return the values of R, Q, S and A for a trial."""
    if not problem.offloads:
        return encode_order(problem, discretization, trial.order.computed, trial.order.instead)
    order = order_of(problem, trial.order.computed, discretization=discretization)
    recomputed, handed, taken = ([set[int]() for _ in range(len(discretization.ends) + 1)] for _ in range(3))
    twice: set[tuple[int, int]] = set()
    executed = {end: place for place, end in enumerate(trial.ends)}
    back = {transfers.back.op: t for t, transfers in problem.offloads.by_tensor.items()}
    live: set[int] = set()
    window = 0
    for index, step in enumerate(trial.schedule.steps):
        if not isinstance(step, Compute):
            live.discard(step.tensor)
        elif step.op in back:
            live.add(back[step.op])
            taken[window].add(back[step.op])
        elif step.op < problem.ops:
            live.update(problem.outputs[step.op])
        place = executed.get(index + 1)
        if place is None:
            continue
        op, window = order.computed[place], order.windows[place]
        if not order.first[place]:
            if op in recomputed[window]:
                twice.add((window, op))
            recomputed[window].add(op)
        elif op == discretization.ends[window]:
            window += 1
            handed[window] = {t for t in live if not problem.kept[t]}
    freeze = tuple(map(frozenset, handed))
    return Solution(tuple(map(frozenset, recomputed[:-1])), freeze, frozenset(twice), tuple(map(frozenset, taken[:-1])))


def start_values(model: Model, solution: Solution) -> Floats:
    """Return `solution` as values to start a solve from; NaN for variables that it does not determine."""
    values = np.full(len(model.program.cost), np.nan)
    for (k, i), column in model.recomputed.items():
        values[column] = i in solution.recomputed[k]
    for (k, t), column in model.handed.items():
        values[column] = t in solution.handed[k]
    for pair, column in model.twice.items():
        values[column] = pair in solution.twice
    for (k, t), column in model.taken.items():
        values[column] = t in solution.taken[k]
    for b, column in model.instead.items():
        values[column] = b in solution.instead
    return values
