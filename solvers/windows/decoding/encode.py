"""Encoding of an order of executions as values of a model's variables: the inverse of ``expand``."""

from collections.abc import Sequence

import numpy as np

from planner.graphs.schedule import Compute, Step, schedule_of
from planner.solvers.highs.program import Floats
from planner.solvers.problem import Problem
from planner.solvers.windows.decoding.decode import Order, Trial, order_of
from planner.solvers.windows.decoding.expand import Solution
from planner.solvers.windows.relaxation.discretization import Discretization, Model


def encode_order(
    problem: Problem, discretization: Discretization, computed: Sequence[int], instead: frozenset[int] = frozenset()
) -> Solution:
    """Return the values of R, Q, S and z for an order of execution: the inverse of ``expand``."""
    steps = schedule_of(problem.graph, [problem.places.ids[op] for op in computed]).steps
    starts = [index for index, step in enumerate(steps) if isinstance(step, Compute)]
    order = order_of(problem, computed, instead=instead, discretization=discretization)
    return _encode(problem, discretization, order, steps, [*starts[1:], len(steps)])


def encode_trial(problem: Problem, discretization: Discretization, trial: Trial) -> Solution:
    """Return the values of R, Q, S, z and A for a trial."""
    if not problem.round_trips:
        return encode_order(problem, discretization, trial.order.computed, trial.order.instead)
    order = order_of(problem, trial.order.computed, discretization=discretization)
    return _encode(problem, discretization, order, trial.schedule.steps, trial.ends)


def _encode(
    problem: Problem, discretization: Discretization, order: Order, steps: Sequence[Step], ends: Sequence[int]
) -> Solution:
    """Return the values for the `steps` of an order; `ends`: for each execution the number of steps up to the frees after it."""
    recomputed, handed, taken = ([set[int]() for _ in range(len(discretization.ends) + 1)] for _ in range(3))
    executed, back = {end: place for place, end in enumerate(ends)}, {x.back.op: t for t, x in problem.round_trips.items()}
    live: set[int] = set()
    window = 0
    for index, step in enumerate(steps):
        if not isinstance(step, Compute):
            live.discard(step.tensor)
        elif (t := back.get(step.op)) is not None:
            taken[window].add(t)
            live.add(t)
        elif step.op < len(problem.graph.ops):  # else it offloads
            live.update(problem.graph.ops[step.op].outputs)
        if (place := executed.get(index + 1)) is None:
            continue
        op, window = order.computed[place], order.windows[place]
        if not order.first[place]:
            recomputed[window].add(op)
        following = order.windows[place + 1] if place + 1 < len(order.computed) else window
        for k in range(window + 1, following + 1):
            handed[k] = {t for t in live if not problem.kept[t] or problem.settled[t] >= discretization.start_of(k)}
        window = following
    return Solution(
        tuple(map(frozenset, recomputed[:-1])),
        tuple(map(frozenset, handed)),
        tuple(map(frozenset, taken[:-1])) if problem.round_trips else (),
        order.instead,
    )


def start_values(model: Model, solution: Solution) -> Floats:
    """Return `solution` as values to start a solve from; NaN for variables that it does not determine."""
    values = np.full(len(model.program.cost), np.nan)
    for (k, i), column in model.recomputed.items():
        values[column] = i in solution.recomputed[k]
    for (k, t), column in model.handed.items():
        values[column] = t in solution.handed[k]
    for (k, t), column in model.taken.items():
        values[column] = t in solution.taken[k]
    for b, column in model.instead.items():
        values[column] = b in solution.instead
    return values
