"""Schedules that offload tensors to the host: variations of the coarse model, and their improvement.

Solutions of coarse models decide which tensors to recompute and to offload within the capacity of the channels, but not in which
order memory and channels are used within a window. Solutions for a little less memory, or a slower link, often need not wait at
all (``CoarseVariations``). Unused memory and channel time then allow removing transfers and recomputations (``Polishing``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from solvers.highs.program import Floats
from solvers.problem import Problem
from solvers.windows.decoding.decode import Trial, decoded, late_writers, order_of, read_solution
from solvers.windows.decoding.pruning import uses_of, without_executions
from solvers.windows.decoding.transfers import with_transfers
from solvers.windows.relaxation.discretization import Model
from solvers.windows.relaxation.models import build_relaxation
from solvers.windows.search import WORK_PER_EXECUTION, Search
from solvers.windows.strategies.refinement import solve_part
from solvers.windows.strategies.restricted_model import CandidateSet
from solvers.windows.strategies.strategy import SteppedStrategy

Reloads = frozenset[tuple[int, int]]


class CoarseVariations(SteppedStrategy):
    """Solutions of the coarse model for less memory and slower links, the smallest changes first."""

    def __init__(self, search: Search, known: CandidateSet) -> None:
        """Create the strategy; `known` learns the solutions."""
        super().__init__(search)
        self.known = known

    def steps(self) -> Iterator[None]:
        """Solve one variation per step and offer its solutions."""
        search, params = self.search, self.search.params.offloading
        changes = [(share, slower) for share in params.capacities for slower in params.slower]
        for share, slower in sorted(changes, key=lambda change: 1 / change[0] + params.weight * change[1]):
            search.progress.tell(f"looking for schedules for {share:.0%} of the memory and a link {slower:g} times as slow")
            problem = search.problem
            varied = replace(
                problem, capacity_bytes=int(share * problem.capacity_bytes), offloads=problem.offloads.slower(slower)
            )
            model = build_relaxation(varied, search.models.coarse)
            _solve_and_offer(search, model, self.known)
            yield


def _solve_and_offer(search: Search, model: Model, known: CandidateSet) -> None:
    """Offer the solutions of `model` that may be the best."""
    problem, params, detail = search.problem, search.params.offloading, model.detail
    below = problem.units(search.incumbent.best_s - problem.base_s)

    def try_solution(values: Floats, objective: float) -> bool:
        solution = read_solution(model, values)
        known.learn(solution)
        order = decoded(problem, detail, solution)
        if objective < below and not late_writers(problem, order):
            search.offer(order, detail)
        return False

    answer = solve_part(search, model.program, params.limit, gap=params.gap, below=below, on_incumbent=try_solution)
    if answer.values is not None and answer.objective is not None:
        try_solution(answer.values, answer.objective)


class Polishing(SteppedStrategy):
    """Removal of one recomputation or transfer of the best schedule at a time, until none can be removed."""

    def steps(self) -> Iterator[None]:
        """Try one removal per step."""
        search = self.search
        problem = search.problem
        done: Trial | None = None
        below_s = np.inf
        while search.incumbent.best is not done:
            best = search.incumbent.best_trial
            for place, computed, reloads in simpler(problem, best, search.budget_bytes, below_s):
                search.progress.tell("leaving out transfers and executions")
                _offer_faster(search, computed, reloads)
                yield
                if search.incumbent.best is not best:
                    # Removals that failed before are tried again only after the others.
                    below_s = np.inf if place is None else problem.time_s[best.order.computed[place]]
                    break
            else:
                done = best if below_s == np.inf else None
                below_s = np.inf


def _offer_faster(search: Search, computed: Sequence[int], reloads: Reloads) -> None:
    """Offer an order if it fits and takes less time than the best."""
    problem = search.problem
    search.clock.spend(WORK_PER_EXECUTION * len(computed))
    found = with_transfers(problem, computed, reloads)
    if found.time_s < search.incumbent.best_s and max(found.memory_bytes) <= search.budget_bytes:
        search.offer(order_of(problem, computed, found.reloads))


def simpler(
    problem: Problem, trial: Trial, budget_bytes: int, below_s: float = np.inf
) -> Iterator[tuple[int | None, Sequence[int], Reloads]]:
    """Yield orders with one recomputation less than `trial`, the longest first; then with one transfer less, if it waits at all.

    The outputs of the removed execution stay in memory since their last use, if `trial` leaves space, or are reloaded. Each order
    comes with the position of the execution, None for a transfer.

    Args:
        below_s: executions of longer ops are skipped.
    """
    computed, reloads = trial.order.computed, trial.order.reloads
    last_use, next_read = uses_of(problem, computed)
    memory = np.array(trial.memory_bytes)
    again = [place for place, first in enumerate(trial.order.first) if not first]
    for place in sorted(again, key=lambda place: -problem.time_s[computed[place]]):
        if not problem.time_s[computed[place]]:
            break
        if problem.time_s[computed[place]] > below_s:
            continue
        wanted = [t for t in problem.outputs[computed[place]] if (t, place) in next_read and not problem.kept[t]]
        fewer, shifted = without_executions(computed, {place}, reloads, next_read)
        stays = {
            t: not len(between := memory[last_use[t, place] + 1 : place]) or int(between.max()) + problem.sizes[t] <= budget_bytes
            for t in wanted
        }
        if all(stays.values()):
            yield place, fewer, shifted
        fetched = [t for t in wanted if not stays[t]]
        if fetched and all(t in problem.offloads.by_tensor for t in fetched):
            yield place, fewer, shifted.union((t, next_read[t, place] - 1) for t in fetched)
    if any(trial.waits_s):
        for pair in sorted(reloads, key=lambda pair: (problem.sizes[pair[0]], pair)):
            yield None, computed, reloads - {pair}
