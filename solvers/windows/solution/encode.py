"""Orders of execution as orders: read as a solution of a model, and rid of executions they do not need."""

from collections.abc import Callable, Sequence

import numpy as np

from graphs.schedule import Compute, schedule_of
from solvers.highs.program import Floats
from solvers.problem import Problem
from solvers.windows.formulation.granularity import Discretization, Model
from solvers.windows.solution.decode import Choice, Trial, order_of, try_out


def choice_of(problem: Problem, detail: Discretization, computed: Sequence[int]) -> Choice:
    """What R, Q and S are for an order of execution: the inverse of ``expand``."""
    order = order_of(detail, computed)
    again: list[set[int]] = [set() for _ in detail.ends]
    handed: list[set[int]] = [set() for _ in range(len(detail.ends) + 1)]
    twice: set[tuple[int, int]] = set()
    ends = set(detail.ends[:-1])
    live: set[int] = set()
    position = -1
    boundary = -1
    for step in schedule_of(problem.graph, computed).steps:
        if not isinstance(step, Compute):
            live.discard(step.tensor)
            continue
        if boundary >= 0:
            handed[boundary] = {t for t in live if not problem.kept[t]}
            boundary = -1
        position += 1
        live.update(problem.outputs[step.op])
        if not order.first[position]:
            if step.op in again[order.windows[position]]:
                twice.add((order.windows[position], step.op))
            again[order.windows[position]].add(step.op)
        elif step.op in ends:
            boundary = order.windows[position] + 1
    return Choice(tuple(map(frozenset, again)), tuple(map(frozenset, handed)), frozenset(twice))


def choice_of_trial(problem: Problem, detail: Discretization, trial: Trial) -> Choice:
    """What R, Q, S and A are for a trial."""
    if problem.copies is None:
        return choice_of(problem, detail, trial.order.computed)
    order = order_of(detail, trial.order.computed)
    again, handed, taken = ([set[int]() for _ in range(len(detail.ends) + 1)] for _ in range(3))
    twice: set[tuple[int, int]] = set()
    executed = {end: place for place, end in enumerate(trial.ends)}
    back = {trip.in_op: t for t, trip in problem.copies.trips.items()}
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
            if op in again[window]:
                twice.add((window, op))
            again[window].add(op)
        elif op == detail.ends[window]:
            window += 1
            handed[window] = {t for t in live if not problem.kept[t]}
    freeze = tuple(map(frozenset, handed))
    return Choice(tuple(map(frozenset, again[:-1])), freeze, frozenset(twice), tuple(map(frozenset, taken[:-1])))


def start_values(model: Model, choice: Choice) -> Floats:
    """`choice` as values to start a solve from; NaN for the variables it says nothing about."""
    values = np.full(len(model.program.cost), np.nan)
    for (k, i), column in model.again.items():
        values[column] = i in choice.again[k]
    for (k, t), column in model.handed.items():
        values[column] = t in choice.handed[k]
    for pair, column in model.twice.items():
        values[column] = pair in choice.twice
    for (k, t), column in model.taken.items():
        values[column] = t in choice.taken[k]
    return values


def without_needless(
    problem: Problem, detail: Discretization, trial: Trial, budget_bytes: int, should_stop: Callable[[], bool], passes: int
) -> Trial:
    """`trial`, which fits, less the further executions that the budget does not call for.

    The longest first: without it, its outputs live on from their execution before.
    """
    for _ in range(passes):
        if should_stop():
            break
        needless = _needless(problem, trial, budget_bytes)
        if not needless:
            break
        computed = [op for position, op in enumerate(trial.order.computed) if position not in needless]
        trial = try_out(problem, order_of(detail, computed))
    return trial


def _needless(problem: Problem, trial: Trial, budget_bytes: int) -> set[int]:
    """Positions of executions in `trial` that can be left out together; of each op one at most."""
    memory = np.array(trial.memory_bytes)
    last_use: dict[int, int] = {}
    longer_lives: list[tuple[float, int, list[tuple[int, int]]]] = []
    for position, (op, first) in enumerate(zip(trial.order.computed, trial.order.first, strict=True)):
        if not first:
            lives = [(last_use[t] + 1, problem.sizes[t]) for t in problem.outputs[op] if not problem.kept[t]]
            longer_lives.append((-problem.time_s[op], position, lives))
        for t in (*problem.inputs[op], *problem.outputs[op]):
            last_use[t] = position
    needless: set[int] = set()
    shortened: set[int] = set()
    for _, position, lives in sorted(longer_lives):
        begin = min((since for since, _ in lives), default=position)
        longer = memory[begin:position].copy()
        for since, size in lives:
            longer[since - begin :] += size
        if trial.order.computed[position] not in shortened and (longer <= budget_bytes).all():
            memory[begin:position] = longer
            needless.add(position)
            shortened.add(trial.order.computed[position])
    return needless
