"""Orders of execution as orders: read as a solution of a model, and rid of executions they do not need."""

from collections.abc import Callable, Sequence

import numpy as np

from graphs.schedule import Compute, schedule_of
from solvers.highs.program import Floats
from solvers.problem import Problem
from solvers.windows.decoding.decode import Trial, order_of, try_out
from solvers.windows.decoding.expand import Choice
from solvers.windows.relaxation.discretization import Discretization, Model


def choice_of(problem: Problem, detail: Discretization, computed: Sequence[int], instead: frozenset[int] = frozenset()) -> Choice:
    """What R, Q, S and z are for an order of execution: the inverse of ``expand``."""
    places = problem.places
    order = order_of(detail, computed, instead=instead, places=None if places.plain else places)
    again: list[set[int]] = [set() for _ in detail.ends]
    handed: list[set[int]] = [set() for _ in range(len(detail.ends) + 1)]
    twice: set[tuple[int, int]] = set()
    live: set[int] = set()
    position = -1
    boundaries = range(0)
    for step in schedule_of(problem.graph, [places.ids[op] for op in computed]).steps:
        if not isinstance(step, Compute):
            live.discard(step.tensor)
            continue
        for k in boundaries:
            handed[k] = {t for t in live if not problem.kept[t] or problem.settled[t] >= detail.start_of(k)}
        position += 1
        op, window = computed[position], order.windows[position]
        live.update(problem.outputs[op])
        if not order.first[position]:
            if op in again[window]:
                twice.add((window, op))
            again[window].add(op)
        following = order.windows[position + 1] if position + 1 < len(computed) else window
        boundaries = range(window + 1, following + 1)
    return Choice(tuple(map(frozenset, again)), tuple(map(frozenset, handed)), frozenset(twice), instead=instead)


def choice_of_trial(problem: Problem, detail: Discretization, trial: Trial) -> Choice:
    """What R, Q, S and A are for a trial."""
    if problem.copies is None:
        return choice_of(problem, detail, trial.order.computed, trial.order.instead)
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
    for b, column in model.instead.items():
        values[column] = b in choice.instead
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
        places = None if problem.places.plain else problem.places
        trial = try_out(problem, order_of(detail, computed, instead=trial.order.instead, places=places))
    return trial


def _needless(problem: Problem, trial: Trial, budget_bytes: int) -> set[int]:
    """Positions of executions in `trial` that can be left out together; of each op one at most."""
    memory = np.array(trial.memory_bytes)
    last_use: dict[int, int] = {}
    longer_lives: list[tuple[float, int, list[tuple[int, int]]]] = []
    for position, (op, first) in enumerate(zip(trial.order.computed, trial.order.first, strict=True)):
        if not first and all(t in last_use for t in problem.outputs[op]):
            # Where the last use of t has written over it, it takes memory of its own from there on.
            over = {t for t in problem.outputs[op] if problem.may_overwrite(trial.order.computed[last_use[t]], t)}
            lives = [(last_use[t] + (t not in over), problem.sizes[t]) for t in problem.outputs[op] if not problem.kept[t]]
            longer_lives.append((-problem.time_s[op], position, lives))
        for t in (*problem.inputs[op], *problem.outputs[op]):
            last_use[t] = position
    needless = set[int]() if problem.places.plain else _for_nothing(problem, trial)
    if needless:
        return needless
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
            needless.add(position)
            shortened.add(trial.order.computed[position])
    return needless


def _for_nothing(problem: Problem, trial: Trial) -> set[int]:
    """Positions of executions of which no output is read before it is made again, nor kept."""
    wanted: set[int] = set()
    needless: set[int] = set()
    earlier: set[int] = set()
    made_before: list[frozenset[int]] = []
    for op in trial.order.computed:
        made_before.append(frozenset(t for t in problem.outputs[op] if t in earlier))
        earlier.update(problem.outputs[op])
    for position in range(len(trial.order.computed) - 1, -1, -1):
        op = trial.order.computed[position]
        of_use = any(t in wanted or (problem.kept[t] and t not in made_before[position]) for t in problem.outputs[op])
        if not trial.order.first[position] and not of_use:
            needless.add(position)
            continue
        wanted.difference_update(t for t in problem.outputs[op] if not problem.kept[t])
        wanted.update(problem.inputs[op])
    return needless
