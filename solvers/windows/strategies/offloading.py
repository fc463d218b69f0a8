"""Improvement of schedules that offload tensors to the host.

Solutions of coarse models decide which tensors to recompute and to offload within the capacity of the channels, but not in which
order memory and channels are used within a window. Where a schedule waits for a transfer, the tensor is recomputed instead.
Unused memory and channel time then allow removing transfers and recomputations (``Polishing``).

Tried and removed: solutions for a little less memory, or a slower link, which need not wait as often. No cost and no bound of 132
graphs with offloading depended on them by equal work.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from planner.solvers.problem import Problem
from planner.solvers.windows.decoding.decode import Trial, order_of, try_out
from planner.solvers.windows.decoding.pruning import find_uses, remove_executions
from planner.solvers.windows.decoding.transfer_plan import PoolStay, Reloads, TransferPlan
from planner.solvers.windows.decoding.transfers import add_transfers
from planner.solvers.windows.search import WORK_PER_EXECUTION, Search
from planner.solvers.windows.strategies.strategy import SteppedStrategy

_PLACES, _TENSORS = 3, 20  # longest waits, and tensors at each, that are tried without a transfer,
_LONGEST, _LEAST_GAIN = 4, 1e-6  # if at most so many ops recompute the tensor, and the step becomes faster by this share


def offer_without_waits(search: Search, trial: Trial) -> None:
    """Offer `trial` with recomputation in place of waits, if it fits and may be the best."""
    if trial.peak_bytes > search.budget_bytes or trial.time_s - sum(trial.waits_s) >= search.incumbent.best_s:
        return
    stop = search.stopping.count_polls(WORK_PER_EXECUTION * len(trial.order.computed), search.stopping.is_enough)
    better = recompute_where_it_waits(search.problem, trial, search.budget_bytes, stop)
    if better is not trial:
        search.offer(better.order)


class Polishing(SteppedStrategy):
    """Removal of one recomputation or transfer of the best schedule at a time, until none can be removed."""

    def take_steps(self) -> Iterator[None]:
        """Try one removal per step."""
        search = self.search
        problem = search.problem
        done: Trial | None = None
        below_s = np.inf
        while search.incumbent.best is not done:
            best = search.incumbent.best_trial
            offer_without_waits(search, best)
            best = search.incumbent.best_trial
            for place, computed, reloads in generate_simpler(problem, best, search.budget_bytes, below_s):
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
    found = add_transfers(problem, computed, reloads)
    if found.time_s < search.incumbent.best_s and max(found.memory_bytes) <= search.budget_bytes:
        search.offer(order_of(problem, computed, found.reloads))


def generate_simpler(
    problem: Problem, trial: Trial, budget_bytes: int, below_s: float = np.inf
) -> Iterator[tuple[int | None, Sequence[int], Reloads]]:
    """Yield orders with one recomputation less than `trial`, the longest first; then with one transfer less, if it waits at all.

    The outputs of the removed execution stay in memory since their last use, if `trial` leaves space, or are reloaded. Each order
    comes with the position of the execution, None for a transfer.

    Args:
        below_s: executions of longer ops are skipped.
    """
    computed, reloads = trial.order.computed, trial.order.reloads
    last_use, next_read = find_uses(problem, computed)
    memory = np.array(trial.memory_bytes)
    recomputed = [place for place, first in enumerate(trial.order.first) if not first]
    for place in sorted(recomputed, key=lambda place: -problem.time_s[computed[place]]):
        if not problem.time_s[computed[place]]:
            break
        if problem.time_s[computed[place]] > below_s:
            continue
        wanted = [t for t in problem.outputs[computed[place]] if (t, place) in next_read and not problem.kept[t]]
        fewer, shifted = remove_executions(computed, {place}, reloads, next_read)
        stays = {
            t: not len(between := memory[last_use[t, place] + 1 : place]) or int(between.max()) + problem.sizes[t] <= budget_bytes
            for t in wanted
        }
        if all(stays.values()):
            yield place, fewer, shifted
        fetched = [t for t in wanted if not stays[t]]
        if fetched and all(t in problem.round_trips for t in fetched):
            yield place, fewer, shifted.union((t, next_read[t, place] - 1) for t in fetched)
    if any(trial.waits_s):
        for pair in sorted(reloads, key=lambda pair: (problem.sizes[pair[0]], pair)):
            yield None, computed, reloads - {pair}


def recompute_where_it_waits(problem: Problem, trial: Trial, budget_bytes: int, should_stop: Callable[[], bool]) -> Trial:
    """Return `trial`, which fits, with recomputation in place of transfers, one tensor after another, while it becomes faster."""
    found: Trial | None = trial
    while found is not None:
        trial, found = found, None
        for computed, reloads in _generate_recomputing(problem, trial):
            if should_stop():
                return trial
            run = add_transfers(problem, computed, reloads)
            fits = max(run.memory_bytes) <= budget_bytes
            if fits and run.time_s < trial.time_s * (1 - _LEAST_GAIN):
                found = try_out(problem, order_of(problem, computed, run.reloads))
                break
    return trial


def _generate_recomputing(problem: Problem, trial: Trial) -> Iterator[tuple[Sequence[int], Reloads]]:
    """Yield orders with one transfer less: at the longest waits, the cheapest recomputation per second first."""
    computed, reloads = trial.order.computed, trial.order.reloads
    plan = TransferPlan(problem, computed, reloads)
    waits = sorted(((wait_s, place) for place, wait_s in enumerate(trial.waits_s) if wait_s > 0), reverse=True)
    chains: dict[tuple[int, int], list[int] | None] = {}
    tried: set[tuple[int, int]] = set()
    for wait_s, place in waits[:_PLACES]:
        ranked: list[tuple[float, tuple[int, int]]] = []
        for stay in plan.stays:
            pair = (stay.tensor, plan.find_index(stay.read))
            if pair not in reloads or plan.find_index(stay.after) >= place or pair in tried:
                continue
            if pair not in chains:
                chains[pair] = _find_chain(problem, plan, stay, computed[: pair[1]], _LONGEST)
            chain = chains[pair]
            cost_s = 0.0 if chain is None else sum(problem.time_s[op] for op in chain)
            if chain is not None and cost_s < wait_s:
                ranked.append((cost_s / problem.round_trips[stay.tensor].out.time_s, pair))
        for _, pair in sorted(ranked)[:_TENSORS]:
            tried.add(pair)
            chain = chains[pair]
            assert chain is not None
            yield _insert_chain(problem, computed, reloads, pair, chain)


def _find_chain(
    problem: Problem, plan: TransferPlan, reloaded: PoolStay, before: Sequence[int], longest: int
) -> list[int] | None:
    """Return the ops that recompute a tensor right before its reload; None if there are too many, or they must not run.

    Args:
        before: what is executed before the reader.
    """
    place = reloaded.read
    there = {stay.tensor for stay in plan.stays if stay.read < place <= stay.end or (stay.read == place and stay.by)}
    there.discard(reloaded.tensor)
    done = max(before, default=-1) + 1
    chain: set[int] = set()
    stack = [reloaded.tensor]
    while stack:
        t = stack.pop()
        op = problem.producer[t]
        if t in there or op in chain:
            continue
        if not problem.recomputable[op] or problem.recompute_before[op] < done or len(chain) == longest:
            return None
        chain.add(op)
        stack += problem.inputs[op]
    return sorted(chain)


def _insert_chain(
    problem: Problem, computed: Sequence[int], reloads: Reloads, pair: tuple[int, int], chain: Sequence[int]
) -> tuple[Sequence[int], Reloads]:
    """Return `computed` with `chain` in place of the reload `pair`; other reloads there move before the readers in it."""
    _, place = pair
    first_read = {t: place + i for i, op in reversed(list(enumerate(chain))) for t in problem.inputs[op]}
    moved = {
        (t, first_read.get(t, at + len(chain)) if at == place else at + len(chain) * (at > place)) for t, at in reloads - {pair}
    }
    return (*computed[:place], *chain, *computed[place:]), frozenset(moved)
