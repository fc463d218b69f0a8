"""Search in one narrow model: fix what fits, choose the rest anew.

What a narrow model's solution expands to is over the budget in few places. So what it chose elsewhere is fixed,
those places are looked at more closely, and the model is solved again, which takes a moment; and so on until all
fits. Once there is a schedule, a few choices of it at a time are opened and the rest is fixed (large-neighbourhood
search, Shaw, CP 1998): all choices in some windows; or in all windows those of some ops, so that something else may
be kept over much of the step. Unlike in a segment (``segments.py``), there are few choices.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from solvers.highs.program import Floats, Outcome
from solvers.problem import OBJECTIVE_SCALE, without_small
from solvers.windows.decoding.decode import Trial, decoded, late_writers, order_of, read_choice
from solvers.windows.decoding.encode import choice_of_trial, start_values
from solvers.windows.decoding.expand import Choice
from solvers.windows.decoding.refinement import refined, where_it_waits, with_stages_in_order
from solvers.windows.relaxation.discretization import Discretization, Model
from solvers.windows.relaxation.models import build_relaxation
from solvers.windows.search import Search
from solvers.windows.strategies.placed import Columns, Placed, columns_in, columns_of, fixed_but_for
from solvers.windows.strategies.refinement import solve_part
from solvers.windows.strategies.restricted_model import CandidateSet, build_restricted, tight_windows


class Neighbourhoods:
    """The narrow model of a solve, and what it has found out."""

    def __init__(self, search: Search, coarse: Discretization) -> None:
        self.search = search
        self.params = search.params.neighbourhoods
        self.coarse = coarse
        # With optional ops, what is always there would need one that makes it.
        plain = search.problem.places.plain
        self.small = without_small(search.problem, self.params.small_share) if plain else search.problem
        self.known = CandidateSet()
        self.detail = coarse
        self._best: Placed | None = None
        self._draw = np.random.default_rng(0)

    def begin(self) -> None:
        """Take windows and choices from coarse solutions, and find a first schedule."""
        trials = self.coarse_trials()
        self.detail = self.coarse
        self.look_closer(trials)
        fresh, before_s = self.detail, self.search.incumbent.best_s
        self.restart(self.params.whole_limit)
        # What was solved for the least capacity is not as good, but nearly fits.
        if trials and trials[-1].time_s < before_s <= self.search.incumbent.best_s:
            self.search.progress.tell("repairing a coarse solution")
            self.detail = fresh
            self.settle(trials[-1])

    def look_closer(self, trials: Iterable[Trial]) -> None:
        """Have a window wherever `trials` take much memory."""
        windows = max(self.params.windows, self.params.size // self.search.problem.ops)
        detail = tight_windows(self.search.problem, trials, self.params.tight_share * self.search.budget_bytes, windows)
        self.detail = self.detail.ending_at(detail.ends)

    def choose_from(self, ops: Iterable[int]) -> None:
        """Have these executed again as well, wherever something near wants it."""
        before = len(self.known.ops)
        self.known.ops.update(ops)
        if len(self.known.ops) > before:
            self._best = None

    def more_choices(self) -> bool:
        """As of ``CandidateSet``."""
        self._best = None
        return self.known.more_choices(self.search.problem.ops)

    def coarse_trials(self) -> list[Trial]:
        """What solutions of coarse models look like, for several capacities."""
        trials: list[Trial] = []
        search, small, coarse = self.search, self.small, self.coarse
        for share in self.params.coarse_capacities:
            if search.stopping.enough():
                break
            search.progress.tell("looking for what is worth executing again")
            model = build_relaxation(replace(small, capacity_bytes=int(share * small.capacity_bytes)), coarse)
            answer = solve_part(search, model.program, self.params.coarse_limit, gap=search.stopping.tolerance)
            if answer.values is None:
                break
            choice = read_choice(model, answer.values)
            self.known.learn(choice)
            order = decoded(small, coarse, choice)
            if not late_writers(search.problem, order):
                trials.append(search.offer(order, coarse))
        return trials

    def restarts(self) -> Iterator[None]:
        """Solve the whole model anew, for longer and longer, until it is solved to the end."""
        limit = self.params.whole_limit
        while not self.restart(limit):
            limit *= self.params.longer
            yield

    def restart(self, limit: float) -> bool:
        """Solve the model with nothing fixed and settle what it finds; whether there is nothing more to find in it."""
        search = self.search
        if search.stopping.enough():
            return True
        model = self.model()
        search.progress.tell(f"searching in {len(self.detail.ends)} windows")

        def try_solution(values: Floats, objective: float) -> bool:
            # A schedule that is far from the best is soon found, and better than none.
            if search.incumbent.best is None:
                self.look(model, read_choice(model, values))
            return False

        gap = self.params.settle_gap * search.stopping.tolerance
        answer = solve_part(search, model.program, limit, gap=gap, on_incumbent=try_solution)
        if answer.outcome is Outcome.INFEASIBLE:
            return not self.more_choices()
        if answer.values is None:
            return False
        trial = self.look(model, read_choice(model, answer.values))
        if trial is not None:
            self.settle(trial)
        return answer.outcome is Outcome.OPTIMAL and model.detail == self.detail

    def reopenings(self) -> Iterator[None]:
        """Open a few windows of the best schedule at a time; more of them where that is soon done."""
        return self.openings("windows", lambda model: len(model.detail.ends), self.in_windows)

    def exchanges(self) -> Iterator[None]:
        """Open what a few ops make, in all windows: some of it may be kept instead of the rest."""
        return self.openings("ops", lambda model: model.problem.ops, self.of_ops)

    def openings(self, what: str, count: Callable[[Model], int], opened: Callable[[Placed, int], Columns]) -> Iterator[None]:
        """Solve for some choices of the best schedule, the others fixed, as long as that may lead further.

        Args:
            what: is opened.
            count: of these in a model.
            opened: columns of so many of them.
        """
        search, params = self.search, self.params
        if search.incumbent.best is None:
            return
        size = max(4, count(self.best_in_model().model) // params.first_part)
        while True:
            best = self.best_in_model()
            whole = count(best.model)
            search.progress.tell(f"improving {min(size, whole)} of {whole} {what}")
            began = search.clock.now
            program = fixed_but_for(best, opened(best, size))
            answer = solve_part(search, program, params.open_limit, gap=params.open_gap, start=best.start)
            took = search.clock.now - began
            before = search.problem.units(best.trial.time_s - search.problem.base_s)
            enough = before - params.open_gap * OBJECTIVE_SCALE
            if answer.values is not None and answer.objective is not None and answer.objective < enough:
                trial = self.look(best.model, read_choice(best.model, answer.values))
                if trial is not None:
                    self.settle(trial)
            done = answer.outcome in {Outcome.OPTIMAL, Outcome.INFEASIBLE}
            if done and size >= 2 * whole and search.incumbent.best is best.trial and self.detail == best.model.detail:
                return
            if not done:
                size = max(2, int(params.shrink * size))
            elif took < params.soon * params.open_limit:
                size += 1 + int(params.grow * size)
            yield

    def best_in_model(self) -> Placed:
        """The best schedule as a solution of the narrow model."""
        trial = self.search.incumbent.best_trial
        if self._best is None or self._best.trial is not trial or self._best.model.detail != self.detail:
            self.known.learn_order(trial.order)
            self._best = self.placed(self.model(), trial)
        return self._best

    def placed(self, model: Model, trial: Trial) -> Placed:
        """What `trial` is in `model`."""
        return Placed(trial, model, start_values(model, choice_of_trial(self.search.problem, model.detail, trial)))

    def in_windows(self, best: Placed, size: int) -> Columns:
        """Columns of `size` windows that follow each other, most often of such as execute much again."""
        costs = np.zeros(len(best.model.detail.ends))
        for (k, _), cost in best.repeated():
            costs[k] += cost
        middle = int(self._draw.choice(len(costs), p=_shares(costs)))
        return columns_in(best.model, range(middle - size // 2, middle + size // 2 + 1))

    def of_ops(self, best: Placed, size: int) -> Columns:
        """Columns of `size` ops in two runs, most often of such as are executed again at much cost."""
        costs = np.zeros(best.model.problem.ops)
        for (_, i), cost in best.repeated():
            costs[i] += cost
        half = size // 4
        ops = {
            i for middle in self._draw.choice(len(costs), 2, p=_shares(costs)) for i in range(middle - half, middle + half + 1)
        }
        return columns_of(best.model, ops)

    def settle(self, trial: Trial) -> bool:
        """Look closer where `trial` does not fit, and choose anew there, until all fits; whether it does.

        What it has looked at closely stays so in the model.
        """
        search, budget_bytes = self.search, self.search.budget_bytes
        ahead = 1
        for _ in range(self.params.rounds):
            fits = trial.peak_bytes <= budget_bytes
            if fits and not any(trial.waits_s):
                return True
            if fits:
                closer = where_it_waits(self.detail, trial, search.params.refinement)
            else:
                closer = refined(self.detail, trial, budget_bytes, search.params.refinement, ahead=ahead)
            if not fits and search.problem.places.plain:
                closer = with_stages_in_order(closer, trial, budget_bytes, search.params.refinement, ahead=ahead)
            closer = replace(closer, chains=frozenset())
            if closer == self.detail or search.stopping.enough():
                return fits
            self.detail = closer
            self.known.learn_order(trial.order)
            model = self.model()
            choice = self.around(model, trial)
            looked = None if choice is None else self.look(model, choice)
            if looked is None:
                return fits
            # What costs the same has probably but moved what does not fit to an earlier op.
            ahead = 2 * ahead if looked.time_s < trial.time_s * (1 + self.params.open_gap) else 1
            if fits and looked.time_s >= trial.time_s:
                return True
            trial = looked
        return trial.peak_bytes <= budget_bytes

    def around(self, model: Model, trial: Trial) -> Choice | None:
        """A solution of `model` that is `trial` but for the windows around those in which that does not fit."""
        search, problem = self.search, self.search.problem
        order = order_of(model.detail, trial.order.computed, instead=trial.order.instead, places=problem.places)
        over = {w for w, taken in zip(order.windows, trial.memory_bytes, strict=True) if taken > search.budget_bytes}
        over.update(w for w, wait_s in zip(order.windows, trial.waits_s, strict=False) if wait_s)
        placed = self.placed(model, trial)
        much = problem.units(trial.time_s - problem.base_s * (1 - self.params.much))
        windows = len(model.detail.ends)
        radius = self.params.radius
        best: Floats | None = None
        least = np.inf
        while not search.stopping.enough():
            opened = {w for middle in over for w in range(max(0, middle - radius), min(windows, middle + radius + 1))}
            program = fixed_but_for(placed, columns_in(model, opened))
            answer = solve_part(search, program, self.params.part_limit, gap=self.params.settle_gap * search.stopping.tolerance)
            if answer.values is not None and answer.objective is not None and answer.objective < least:
                best, least = answer.values, answer.objective
            if least <= much or len(opened) == windows:
                break
            radius *= self.params.wider
        return None if best is None else read_choice(model, best)

    def look(self, model: Model, choice: Choice) -> Trial | None:
        """What a solution expands to; None if that would read what has been written over, or may not be executed."""
        order = decoded(model.problem, model.detail, choice)
        if writers := late_writers(self.search.problem, order):
            self.detail = model.detail.ending_at(writers)
            return None
        if not self.search.problem.allows(order.computed):
            return None
        return self.search.offer(order, model.detail)

    def model(self) -> Model:
        """The narrow model as it is now."""
        return build_restricted(self.small, self.detail, self.known, self.params)


def _shares(costs: Floats) -> Floats:
    """What each is drawn with: half even, half by cost."""
    if not costs.any():
        costs = np.ones(len(costs))
    shares: Floats = 0.5 * costs / costs.sum() + 0.5 / len(costs)
    return shares
