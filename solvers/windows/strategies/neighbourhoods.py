"""Fix-and-optimize in one restricted model.

The decoded solution of a restricted model exceeds the budget in few places. So its choices elsewhere are fixed, those places are
refined, and the model is solved again, which takes a moment; and so on until the schedule fits. Then a few variables of the
schedule at a time are opened and the others fixed (large-neighbourhood search, Shaw, CP 1998): all variables in some windows; or
those of some ops in all windows, so that another tensor may be kept over much of the step.

Known weaknesses: what is opened is chosen at random, half by cost, so choices that are far apart and pay only together are found
by luck. Tried and removed: to open the choice of optional ops too. By equal work one of 197 graphs with options was slower
without, and 13 were faster, since more time is left for the plain graphs of ``commitments.py``.
"""

from abc import abstractmethod
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from planner.solvers.highs.program import Floats, Milp, Outcome
from planner.solvers.problem import OBJECTIVE_SCALE, keep_small
from planner.solvers.windows.decoding.decode import Trial, decode, find_late_writers, order_of, read_solution
from planner.solvers.windows.decoding.encode import encode_trial, start_values
from planner.solvers.windows.decoding.expand import Solution
from planner.solvers.windows.decoding.refinement import refine_windows, split_at_waits
from planner.solvers.windows.relaxation.discretization import Discretization, Model
from planner.solvers.windows.relaxation.models import build_relaxation
from planner.solvers.windows.search import Search
from planner.solvers.windows.strategies.refinement import solve_for_schedules
from planner.solvers.windows.strategies.restricted_model import CandidateSet, build_restricted, find_tight_windows
from planner.solvers.windows.strategies.strategy import SteppedStrategy

Columns = list[int]
_SMALL_SHARE = 5e-4  # of the capacity, for all tensors that are assumed to be always in memory
_COARSE_CAPACITIES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)  # shares of the capacity for which coarse models are solved
_COARSE_LIMIT = 2.0  # of the clock, for each of them
_TIGHT_SHARE = 0.85  # of the budget: an op that needs as much has a window of its own
_LONGER = 1.5  # factor to the limit of each further model with nothing fixed
_ROUNDS = 20  # of fixing and refining
_RADIUS, _WIDER = 3, 4  # open windows on both sides of one over the budget; factor to it if the repair costs more than
_MUCH = 0.01  # of the step
_OPEN_LIMIT, _OPEN_GAP = 1.0, 1e-4  # of the clock, and of the step, for a model with few open variables
# A neighbourhood shrinks after a solve that ran out of time, and grows after one that took less than a share of its time.
_SHRINK, _GROW, _SOON = 0.8, 0.1, 0.25
_FIRST_PART = 6  # one window or op in so many is open at first
_SETTLE_GAP = 0.5  # of the tolerance, for models that only have to fit


@dataclass(frozen=True, slots=True)
class EncodedTrial:
    """A schedule, and its values in a model."""

    trial: Trial
    model: Model
    start: Floats

    def iterate_recomputed(self) -> Iterator[tuple[tuple[int, int], float]]:
        """Yield (window, op) and the cost of each recomputation, and of each reload, by the producer."""
        model, problem = self.model, self.model.problem
        yield from ((key, model.program.cost[column]) for key, column in model.recomputed.items() if self.start[column] > 0.5)
        for (k, t), column in model.taken.items():
            if self.start[column] > 0.5:
                yield (k, problem.producer[t]), problem.convert_to_units(problem.round_trips[t].back.time_s)


class RestrictedModel:
    """The restricted model of a solve, with the candidates for its variables."""

    def __init__(self, search: Search, coarse: Discretization) -> None:
        self.search = search
        self.params = search.params.neighbourhoods
        self.coarse = coarse
        self.small = keep_small(search.problem, _SMALL_SHARE)
        self.known = CandidateSet()
        self.discretization = coarse
        self._best: EncodedTrial | None = None
        self.draw = np.random.default_rng(0)

    def begin(self) -> None:
        """Choose windows and candidates from coarse solutions, and find a first schedule."""
        trials = self.solve_coarse_models()
        # Windows wherever these need much memory.
        windows = max(self.params.windows, self.params.size // self.search.problem.ops)
        discretization = find_tight_windows(self.search.problem, trials, _TIGHT_SHARE * self.search.budget_bytes, windows)
        self.discretization = self.discretization.split_at(discretization.ends)
        fresh, before_s = self.discretization, self.search.incumbent.best_s
        self.restart(self.params.whole_limit)
        # The solution for the least capacity is slower, but nearly fits.
        if trials and trials[-1].time_s < before_s <= self.search.incumbent.best_s:
            self.search.progress.tell("repairing a coarse solution")
            self.discretization = fresh
            self.settle(trials[-1])

    def allow_more_candidates(self) -> bool:
        """Allow more candidates, as ``CandidateSet.allow_more_candidates`` does."""
        self._best = None
        return self.known.allow_more_candidates(self.search.problem.ops)

    def solve_coarse_models(self) -> list[Trial]:
        """Return the trials of solutions of coarse models, for several capacities."""
        trials: list[Trial] = []
        search, small, coarse = self.search, self.small, self.coarse
        for share in _COARSE_CAPACITIES:
            if search.stopping.is_enough():
                break
            search.progress.tell("looking for recomputations that pay")
            model = build_relaxation(replace(small, capacity_bytes=int(share * small.capacity_bytes)), coarse)
            answer = solve_for_schedules(search, model.program, _COARSE_LIMIT, gap=search.stopping.tolerance)
            if answer.values is None:
                break
            solution = read_solution(model, answer.values)
            self.known.learn(solution)
            if (trial := search.offer(decode(small, coarse, solution), coarse)) is not None:
                trials.append(trial)
        return trials

    def restart(self, limit: float) -> bool:
        """Solve the model with nothing fixed and repair its solution; return True if nothing more can be found in it."""
        search = self.search
        if search.stopping.is_enough():
            return True
        model = self.model()
        search.progress.tell(f"searching in {len(self.discretization.ends)} windows")
        gap = _SETTLE_GAP * search.stopping.tolerance
        answer = solve_for_schedules(search, model.program, limit, gap=gap, on_incumbent=partial(self._try_solution, model))
        if answer.outcome is Outcome.INFEASIBLE:
            return not self.allow_more_candidates()
        if answer.values is None:
            return False
        trial = self.offer_solution(model, read_solution(model, answer.values))
        if trial is not None:
            self.settle(trial)
        return answer.outcome is Outcome.OPTIMAL and model.discretization == self.discretization

    def _try_solution(self, model: Model, values: Floats, _: float) -> bool:
        # A schedule far from the best is found quickly, and better than none.
        if self.search.incumbent.best is None:
            self.offer_solution(model, read_solution(model, values))
        return False

    def encode_best(self) -> EncodedTrial:
        """Return the best schedule as a solution of the restricted model."""
        trial = self.search.incumbent.best_trial
        if self._best is None or self._best.trial is not trial or self._best.model.discretization != self.discretization:
            self.known.learn_order(trial.order)
            self._best = self.encode(self.model(), trial)
        return self._best

    def encode(self, model: Model, trial: Trial) -> EncodedTrial:
        """Return `trial` as a solution of `model`."""
        solution = encode_trial(self.search.problem, model.discretization, trial)
        return EncodedTrial(trial, model, start_values(model, solution))

    def settle(self, trial: Trial) -> bool:
        """Refine where `trial` exceeds the budget, and solve again there, until it fits; return True if it does.

        The model keeps the refinements.
        """
        search, budget_bytes = self.search, self.search.budget_bytes
        ahead = 1
        for _ in range(_ROUNDS):
            fits = trial.peak_bytes <= budget_bytes
            if fits and not any(trial.waits_s):
                return True
            if fits:
                finer = split_at_waits(self.discretization, trial)
            else:
                finer = refine_windows(self.discretization, trial, budget_bytes, ahead=ahead)
            if finer == self.discretization or search.stopping.is_enough():
                return fits
            self.discretization = finer
            self.known.learn_order(trial.order)
            model = self.model()
            solution = self.encode_around(model, trial)
            tried = None if solution is None else self.offer_solution(model, solution)
            if tried is None:
                return fits
            # A solution of the same cost has probably moved the excess to an earlier op.
            ahead = 2 * ahead if tried.time_s < trial.time_s * (1 + _OPEN_GAP) else 1
            if fits and tried.time_s >= trial.time_s:
                return True
            trial = tried
        return trial.peak_bytes <= budget_bytes

    def encode_around(self, model: Model, trial: Trial) -> Solution | None:
        """Return a solution of `model` that equals `trial` except in the windows around those that exceed the budget."""
        search, problem = self.search, self.search.problem
        order = order_of(problem, trial.order.computed, instead=trial.order.instead, discretization=model.discretization)
        over = {w for w, taken in zip(order.windows, trial.memory_bytes, strict=True) if taken > search.budget_bytes}
        over.update(w for w, wait_s in zip(order.windows, trial.waits_s, strict=False) if wait_s)
        encoded = self.encode(model, trial)
        much = problem.convert_to_units(trial.time_s - problem.base_s * (1 - _MUCH))
        windows = len(model.discretization.ends)
        radius = _RADIUS
        best: Floats | None = None
        least = np.inf
        while not search.stopping.is_enough():
            opened = {w for middle in over for w in range(max(0, middle - radius), min(windows, middle + radius + 1))}
            program = fix_all_but(encoded, list_window_columns(model, opened))
            gap = _SETTLE_GAP * search.stopping.tolerance
            answer = solve_for_schedules(search, program, self.params.part_limit, gap=gap)
            if answer.values is not None and answer.objective is not None and answer.objective < least:
                best, least = answer.values, answer.objective
            if least <= much or len(opened) == windows:
                break
            radius *= _WIDER
        return None if best is None else read_solution(model, best)

    def offer_solution(self, model: Model, solution: Solution) -> Trial | None:
        """Return the trial of a solution; None if it would read an overwritten tensor or exceeds a resource."""
        order = decode(model.problem, model.discretization, solution)
        trial = self.search.offer(order, model.discretization)
        if trial is None and (writers := find_late_writers(self.search.problem, order)):
            self.discretization = model.discretization.split_at(writers)
        return trial

    def model(self) -> Model:
        """Return the restricted model in its current state."""
        return build_restricted(self.small, self.discretization, self.known)


class Restarts(SteppedStrategy):
    """Solves of the whole restricted model, with longer and longer limits, until it is solved to optimality."""

    def __init__(self, search: Search, restricted: RestrictedModel) -> None:
        super().__init__(search)
        self.restricted = restricted

    def take_steps(self) -> Iterator[None]:
        """Solve the model once per step."""
        limit = self.search.params.neighbourhoods.whole_limit
        while not self.restricted.restart(limit):
            limit *= _LONGER
            yield


class FixAndOptimize(SteppedStrategy):
    """Solves with some variables of the best schedule open and the others fixed, as long as that may improve it."""

    opened: str  # name of the elements, for progress messages

    def __init__(self, search: Search, restricted: RestrictedModel) -> None:
        super().__init__(search)
        self.restricted = restricted

    @abstractmethod
    def count(self, model: Model) -> int:
        """Return the number of elements of `model` that can be opened."""

    @abstractmethod
    def choose_columns(self, best: EncodedTrial, size: int) -> Columns:
        """Return the columns of `size` of these elements."""

    def take_steps(self) -> Iterator[None]:
        """Open some elements per step; more of them if the last solve was fast."""
        search, restricted = self.search, self.restricted
        if search.incumbent.best is None:
            return
        size = max(4, self.count(restricted.encode_best().model) // _FIRST_PART)
        while True:
            best = restricted.encode_best()
            whole = self.count(best.model)
            search.progress.tell(f"improving {min(size, whole)} of {whole} {self.opened}")
            began = search.clock.now
            program = fix_all_but(best, self.choose_columns(best, size))
            answer = solve_for_schedules(search, program, _OPEN_LIMIT, gap=_OPEN_GAP, start=best.start)
            took = search.clock.now - began
            before = search.problem.convert_to_units(best.trial.time_s - search.problem.base_s)
            enough = before - _OPEN_GAP * OBJECTIVE_SCALE
            if answer.values is not None and answer.objective is not None and answer.objective < enough:
                trial = restricted.offer_solution(best.model, read_solution(best.model, answer.values))
                if trial is not None:
                    restricted.settle(trial)
            done = answer.outcome in {Outcome.OPTIMAL, Outcome.INFEASIBLE}
            same = search.incumbent.best is best.trial and restricted.discretization == best.model.discretization
            if done and size >= 2 * whole and same:
                return
            if not done:
                size = max(2, int(_SHRINK * size))
            elif took < _SOON * _OPEN_LIMIT:
                size += 1 + int(_GROW * size)
            yield


class FixAndOptimizeWindows(FixAndOptimize):
    """Fix-and-optimize of consecutive windows, preferably those with much recomputation."""

    opened = "windows"

    def count(self, model: Model) -> int:
        """Return the number of windows."""
        return len(model.discretization.ends)

    def choose_columns(self, best: EncodedTrial, size: int) -> Columns:
        """Return the columns of `size` consecutive windows around a random one."""
        costs = np.zeros(len(best.model.discretization.ends))
        for (k, _), cost in best.iterate_recomputed():
            costs[k] += cost
        middle = int(self.restricted.draw.choice(len(costs), p=_compute_shares(costs)))
        return list_window_columns(best.model, range(middle - size // 2, middle + size // 2 + 1))


class FixAndOptimizeOps(FixAndOptimize):
    """Fix-and-optimize of two runs of ops, preferably recomputed at much cost: one may be kept instead of the other."""

    opened = "ops"

    def count(self, model: Model) -> int:
        """Return the number of ops."""
        return model.problem.ops

    def choose_columns(self, best: EncodedTrial, size: int) -> Columns:
        """Return the columns of `size` ops, half of them around each of two random ones."""
        costs = np.zeros(best.model.problem.ops)
        for (_, i), cost in best.iterate_recomputed():
            costs[i] += cost
        half = size // 4
        middles = self.restricted.draw.choice(len(costs), 2, p=_compute_shares(costs))
        return list_op_columns(best.model, {i for middle in middles for i in range(middle - half, middle + half + 1)})


def _compute_shares(costs: Floats) -> Floats:
    """Return the probabilities of the elements: half uniform, half by cost."""
    if not costs.any():
        costs = np.ones(len(costs))
    shares: Floats = 0.5 * costs / costs.sum() + 0.5 / len(costs)
    return shares


def fix_all_but(encoded: EncodedTrial, opened: Columns) -> Milp:
    """Return the program with its variables fixed as in `encoded`, except the columns `opened`."""
    model, start = encoded.model, encoded.start
    fixed = np.zeros(len(start), dtype=bool)
    fixed[[*model.recomputed.values(), *model.handed.values(), *model.taken.values()]] = True
    fixed[opened] = False
    fixed &= ~np.isnan(start)
    lower, upper = model.program.lower.copy(), model.program.upper.copy()
    lower[fixed] = upper[fixed] = start[fixed]
    return replace(model.program, lower=lower, upper=upper)


def list_window_columns(model: Model, windows: Container[int]) -> Columns:
    """Return the columns of variables in these windows, and at their ends."""
    return [
        *(column for (k, _), column in model.recomputed.items() if k in windows),
        *(column for (k, _), column in model.handed.items() if k in windows or k - 1 in windows),
        *(column for (k, _), column in model.taken.items() if k in windows),
    ]


def list_op_columns(model: Model, ops: Container[int]) -> Columns:
    """Return the columns of these ops and their outputs in all windows."""
    producer = model.problem.producer
    return [
        *(column for (_, i), column in model.recomputed.items() if i in ops),
        *(column for (_, t), column in model.handed.items() if producer[t] in ops),
        *(column for (_, t), column in model.taken.items() if producer[t] in ops),
    ]
