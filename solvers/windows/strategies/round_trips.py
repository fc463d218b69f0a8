"""Ways to look for schedules in which tensors go to the host and come back.

Solutions of coarse models know what to execute again and what to send, and that the channels have the time for it; not, in
which order memory and channels are wanted within a window. Solved for a little less memory, or for a slower link, they
often need not wait at all (``variations``). What is left of either is then used (``polishing``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from graphs.options.offload import Copies
from solvers.highs.program import Floats
from solvers.problem import Problem
from solvers.windows.decoding.decode import Trial, decoded, late_writers, order_of, read_choice
from solvers.windows.decoding.host_transfers import timed
from solvers.windows.decoding.pruning import uses_of, without
from solvers.windows.relaxation.discretization import Discretization, Model
from solvers.windows.relaxation.models import build_relaxation
from solvers.windows.search import WORK_PER_EXECUTION, Search
from solvers.windows.strategies.refinement import solve_part
from solvers.windows.strategies.restricted_model import CandidateSet
from solvers.windows.strategies.waits import with_fewer_waits

Away = frozenset[tuple[int, int]]


def variations(search: Search, coarse: Discretization, known: CandidateSet) -> Iterator[None]:
    """Offer solutions of the coarse model for less memory and slower links, the least changes first; `known` learns them."""
    params = search.params.round_trips
    changes = [(share, slower) for share in params.capacities for slower in params.slower]
    for share, slower in sorted(changes, key=lambda change: 1 / change[0] + params.weight * change[1]):
        search.progress.tell(f"looking for schedules for {share:.0%} of the memory and a link {slower:g} times as slow")
        problem = search.problem
        varied = replace(problem, capacity_bytes=int(share * problem.capacity_bytes), copies=_slower(problem.copies, slower))
        model = build_relaxation(varied, coarse)
        _solve_and_offer(search, model, known)
        yield


def _solve_and_offer(search: Search, model: Model, known: CandidateSet) -> None:
    """Offer what solutions of `model` come to that could be better, and that with what they wait for computed again."""
    problem, params, detail = search.problem, search.params.round_trips, model.detail
    below = problem.units(search.incumbent.best_s - problem.base_s)

    def try_solution(values: Floats, objective: float) -> bool:
        choice = read_choice(model, values)
        known.learn(choice)
        order = decoded(problem, detail, choice)
        if objective < below and not late_writers(problem, order):
            offer_with_fewer_waits(search, search.offer(order, detail))
        return False

    answer = solve_part(search, model.program, params.limit, gap=params.gap, below=below, on_incumbent=try_solution)
    if answer.values is not None and answer.objective is not None:
        try_solution(answer.values, answer.objective)


def offer_with_fewer_waits(search: Search, trial: Trial) -> None:
    """Offer what comes of `trial` if it computes again what it waits for, where it fits and could be better than the best."""
    if trial.peak_bytes > search.budget_bytes or trial.time_s - sum(trial.waits_s) >= search.incumbent.best_s:
        return
    stop = search.stopping.polled(WORK_PER_EXECUTION * len(trial.order.computed), search.stopping.enough)
    better = with_fewer_waits(search.problem, trial, search.budget_bytes, stop, search.params.round_trips)
    if better is not trial:
        search.offer(better.order, Discretization((search.problem.ops - 1,)))


def _slower(copies: Copies | None, times: float) -> Copies | None:
    if copies is None:
        return None
    trips = {t: replace(trip, out_s=times * trip.out_s, in_s=times * trip.in_s) for t, trip in copies.trips.items()}
    return replace(copies, trips=trips)


def polishing(search: Search) -> Iterator[None]:
    """Leave out a further execution or a copy of the best schedule, and keep or fetch what it made, until none can be."""
    problem = search.problem
    done: Trial | None = None
    below_s = np.inf
    while search.incumbent.best is not done:
        best = search.incumbent.best_trial
        offer_with_fewer_waits(search, best)
        best = search.incumbent.best_trial
        for place, computed, away in simpler(problem, best, search.budget_bytes, below_s):
            search.progress.tell("leaving out copies and executions")
            _offer_faster(search, computed, away)
            yield
            if search.incumbent.best is not best:
                # What has been of no use before is looked at again only once the others have been.
                below_s = np.inf if place is None else problem.time_s[best.order.computed[place]]
                break
        else:
            done = best if below_s == np.inf else None
            below_s = np.inf


def _offer_faster(search: Search, computed: Sequence[int], away: Away) -> None:
    """Offer an order if it fits and takes less time than the best."""
    problem = search.problem
    search.clock.spend(WORK_PER_EXECUTION * len(computed))
    found = timed(problem, computed, away)
    if found.time_s < search.incumbent.best_s and max(found.memory_bytes) + problem.graph.static_bytes <= search.budget_bytes:
        whole = Discretization((problem.ops - 1,))
        search.offer(order_of(whole, computed, found.away), whole)


def simpler(
    problem: Problem, trial: Trial, budget_bytes: int, below_s: float = np.inf
) -> Iterator[tuple[int | None, Sequence[int], Away]]:
    """Orders with one further execution less than `trial`, the longest first; then with one copy less, if it waits at all.

    What an execution that is left out has made stays from its last use before, where `trial` leaves the room for it, or
    is fetched. Each comes with the execution's position, None where it is a copy.

    Args:
        below_s: executions of ops that take longer are not looked at.
    """
    assert problem.copies is not None
    computed, away = trial.order.computed, trial.order.away
    last_use, next_read = uses_of(problem, computed)
    memory = np.array(trial.memory_bytes)
    again = [place for place, first in enumerate(trial.order.first) if not first]
    for place in sorted(again, key=lambda place: -problem.time_s[computed[place]]):
        if not problem.time_s[computed[place]]:
            break
        if problem.time_s[computed[place]] > below_s:
            continue
        wanted = [t for t in problem.outputs[computed[place]] if (t, place) in next_read and not problem.kept[t]]
        fewer, shifted = without(computed, {place}, away, next_read)
        stays = {
            t: not len(between := memory[last_use[t, place] + 1 : place]) or int(between.max()) + problem.sizes[t] <= budget_bytes
            for t in wanted
        }
        if all(stays.values()):
            yield place, fewer, shifted
        fetched = [t for t in wanted if not stays[t]]
        if fetched and all(t in problem.copies.trips for t in fetched):
            yield place, fewer, shifted.union((t, next_read[t, place] - 1) for t in fetched)
    if any(trial.waits_s):
        for pair in sorted(away, key=lambda pair: (problem.sizes[pair[0]], pair)):
            yield None, computed, away - {pair}
