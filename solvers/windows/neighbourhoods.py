"""Search in one narrow model: fix what fits, choose the rest anew.

What a narrow model's solution expands to is over the budget in few places. So what it chose elsewhere is fixed,
those places are looked at more closely, and the model is solved again, which takes a moment; and so on until all
fits. Once there is a schedule, a few windows of it at a time are opened and the rest is fixed (large-neighbourhood
search, Shaw, CP 1998). Unlike in a stretch (``stretch.py``), what is handed through the windows that are open
may be dropped or kept over all the step; but there are few choices.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np

from solvers.highs import Floats, Outcome, Program
from solvers.windows.detail import Detail, Model
from solvers.windows.expand import Choice, Trial, expand, late_writers, order_of, read_choice
from solvers.windows.model import Builder
from solvers.windows.narrow import Known, NarrowBuilder, tight_windows
from solvers.windows.orders import choice_of, start_values
from solvers.windows.problem import OBJECTIVE_SCALE, without_small
from solvers.windows.refine import refined, with_stages_in_order
from solvers.windows.search import Search

_SMALL_SHARE = 5e-4  # of the capacity: what tensors that are taken to be always there may take together
_COARSE_CAPACITIES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)  # of the capacity: what coarse models are solved for
_COARSE_S = 2.0  # for each of them
_WINDOWS = 120  # of a narrow model at first, about; more in small graphs:
_SIZE = 120_000  # windows times ops
_WHOLE_S = 5.0  # for a narrow model with nothing fixed
_LONGER = 1.5  # times as long for each further
_ROUNDS = 20  # of fixing and looking closer
_PART_S = 3.0  # for each model there
_RADIUS = 3  # windows on both sides of one that does not fit that are open
_MUCH = 0.01  # of the whole step: where a round costs more, more windows are opened
_OPEN_S = 2.0  # for a model with a few windows open
_GAP = 1e-4  # of the whole step, there; what is gained less is left
_FIRST_PART = 6  # of all windows, one in so many is open at first


class Neighbourhoods:
    """The narrow model of a solve, and what it has found out."""

    def __init__(self, search: Search, coarse: Detail) -> None:
        self.search = search
        self.coarse = coarse
        self.small = without_small(search.problem, _SMALL_SHARE)
        self.known = Known()
        self.detail = coarse
        self._draw = np.random.default_rng(0)

    def begin(self) -> None:
        """Take windows and choices from coarse solutions, and find a first schedule."""
        trials = self.coarse_trials()
        windows = max(_WINDOWS, _SIZE // self.search.problem.ops)
        detail = tight_windows(self.search.problem, trials, self.search.budget_bytes, windows)
        self.detail = replace(detail, ends=tuple(sorted({*detail.ends, *self.coarse.ends})))
        self.restart(_WHOLE_S)

    def coarse_trials(self) -> list[Trial]:
        """What solutions of coarse models look like, for several capacities."""
        trials: list[Trial] = []
        search, small, coarse = self.search, self.small, self.coarse
        for share in _COARSE_CAPACITIES:
            if search.enough():
                break
            search.tell("looking for what is worth executing again")
            model = Builder(replace(small, capacity_bytes=int(share * small.capacity_bytes)), coarse).build()
            answer = search.solve_part(model.program, _COARSE_S, gap=search.tolerance)
            if answer.values is None:
                break
            choice = read_choice(model, answer.values)
            self.known.learn(choice)
            order = order_of(coarse, expand(small, coarse, choice))
            if not late_writers(search.problem, order):
                trials.append(search.offer(order, coarse))
        return trials

    def restarts(self) -> Iterator[None]:
        """Solve the whole model anew, for longer and longer, until it is solved to the end."""
        seconds = _WHOLE_S
        while not self.restart(seconds):
            seconds *= _LONGER
            yield

    def restart(self, seconds: float) -> bool:
        """Solve the model with nothing fixed and settle what it finds; whether there is nothing more to find in it."""
        search = self.search
        if search.enough():
            return True
        model = self.model()
        search.tell(f"searching in {len(self.detail.ends)} windows")

        def try_solution(values: Floats, objective: float) -> bool:
            # A schedule that is far from the best is soon found, and better than none.
            if search.best is None:
                self.look(model, read_choice(model, values))
            return False

        answer = search.solve_part(model.program, seconds, gap=0.5 * search.tolerance, on_incumbent=try_solution)
        if answer.outcome is Outcome.INFEASIBLE:
            return not self.known.more_choices(search.problem.ops)
        if answer.values is None:
            return False
        trial = self.look(model, read_choice(model, answer.values))
        if trial is not None:
            self.settle(trial)
        return answer.outcome is Outcome.OPTIMAL and model.detail == self.detail

    def reopenings(self) -> Iterator[None]:
        """Open a few windows of the best schedule at a time; more of them where that is soon done."""
        search = self.search
        size = max(4, len(self.detail.ends) // _FIRST_PART)
        built: tuple[Trial, Detail] | None = None
        while search.best is not None:
            best = search.best
            if built is None or built[0] is not best or built[1] != self.detail:
                self.known.learn_order(best.order)
                model = self.model()
                start = start_values(model, choice_of(self.small, self.detail, best.order.computed))
                costs = _costs(model, start)
                built = best, self.detail
            search.tell(f"improving {size} of {len(self.detail.ends)} windows")
            windows = len(self.detail.ends)
            middle = int(self._draw.choice(windows, p=costs))
            program = _fixed_outside(model, start, range(middle - size // 2, middle + size // 2 + 1))
            began = search.seconds
            answer = search.solve_part(program, _OPEN_S, gap=_GAP, start=start)
            took = search.seconds - began
            gain = (
                -np.inf
                if answer.objective is None
                else search.problem.units(best.time_s - search.problem.base_s) - answer.objective
            )
            if answer.values is not None and gain > _GAP * OBJECTIVE_SCALE:
                trial = self.look(model, read_choice(model, answer.values))
                if trial is not None:
                    self.settle(trial)
            done = answer.outcome in {Outcome.OPTIMAL, Outcome.INFEASIBLE}
            if done and size >= 2 * windows and search.best is best and self.detail == model.detail:
                return
            if not done:
                size = max(2, int(0.8 * size))
            elif took < 0.25 * _OPEN_S:
                size += 1 + size // 10
            yield

    def settle(self, trial: Trial) -> bool:
        """Look closer where `trial` does not fit, and choose anew there, until all fits; whether it does.

        What it has looked at closely stays so in the model.
        """
        search, budget_bytes = self.search, self.search.budget_bytes
        for _ in range(_ROUNDS):
            if trial.peak_bytes <= budget_bytes:
                return True
            closer = with_stages_in_order(refined(self.detail, trial, budget_bytes), trial, budget_bytes)
            closer = replace(closer, chains=frozenset())
            if closer == self.detail or search.enough():
                return False
            self.detail = closer
            self.known.learn_order(trial.order)
            model = self.model()
            choice = self.around(model, trial)
            looked = None if choice is None else self.look(model, choice)
            if looked is None:
                return False
            trial = looked
        return trial.peak_bytes <= budget_bytes

    def around(self, model: Model, trial: Trial) -> Choice | None:
        """A solution of `model` that is `trial` but for the windows around those in which that does not fit."""
        search, problem = self.search, self.search.problem
        order = order_of(model.detail, trial.order.computed)
        over = {w for w, taken in zip(order.windows, trial.memory_bytes, strict=True) if taken > search.budget_bytes}
        start = start_values(model, choice_of(self.small, model.detail, trial.order.computed))
        much = problem.units(trial.time_s - problem.base_s * (1 - _MUCH))
        windows = len(model.detail.ends)
        radius = _RADIUS
        best: Floats | None = None
        least = np.inf
        while not search.enough():
            opened = {w for middle in over for w in range(max(0, middle - radius), min(windows, middle + radius + 1))}
            answer = search.solve_part(_fixed_outside(model, start, opened), _PART_S, gap=0.5 * search.tolerance)
            if answer.values is not None and answer.objective is not None and answer.objective < least:
                best, least = answer.values, answer.objective
            if least <= much or len(opened) == windows:
                break
            radius *= 4
        return None if best is None else read_choice(model, best)

    def look(self, model: Model, choice: Choice) -> Trial | None:
        """What a solution expands to; None if that would read what has been written over."""
        order = order_of(model.detail, expand(self.small, model.detail, choice))
        if writers := late_writers(self.search.problem, order):
            self.detail = replace(model.detail, ends=tuple(sorted({*model.detail.ends, *writers})))
            return None
        return self.search.offer(order, model.detail)

    def model(self) -> Model:
        """The narrow model as it is now."""
        return NarrowBuilder(self.small, self.detail, self.known).build()


def _fixed_outside(model: Model, start: Floats, opened: Collection[int]) -> Program:
    """The program with the choices fixed, as in `start`, that have nothing to do with the windows `opened`."""
    fixed = np.zeros(len(start), dtype=bool)
    fixed[[*model.again.values(), *model.handed.values()]] = True
    opened = frozenset(opened)
    for (k, _), column in model.again.items():
        if k in opened:
            fixed[column] = False
    for (k, _), column in model.handed.items():
        if k in opened or k - 1 in opened:
            fixed[column] = False
    fixed &= ~np.isnan(start)
    lower, upper = model.program.lower.copy(), model.program.upper.copy()
    lower[fixed] = upper[fixed] = start[fixed]
    return replace(model.program, lower=lower, upper=upper)


def _costs(model: Model, start: Floats) -> Floats:
    """For each window a share: half even, half by what is executed again in it."""
    costs = np.zeros(len(model.detail.ends))
    for (k, _), column in model.again.items():
        if start[column] > 0.5:
            costs[k] += model.program.cost[column]
    if not costs.any():
        costs[:] = 1.0
    shares: Floats = 0.5 * costs / costs.sum() + 0.5 / len(costs)
    return shares
