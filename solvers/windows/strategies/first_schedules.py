"""First schedules: keeping everything, eviction rules, and those of baselines.

Tried and removed: eviction rules with any number of recomputations, rules for tight budgets, and the schedule of least peak that
eviction finds, while there was no schedule. By equal work no cost, bound or status of 56 solves depended on them, those at the
least budget that is found soon among them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from planner.graphs.options import remove_options
from planner.solvers.clock import measure_rest
from planner.solvers.eviction.engine import WORK_PER_EVICTION, find_evicting_order
from planner.solvers.eviction.rules import EvictionRule, EvictionSettings
from planner.solvers.problem import Problem
from planner.solvers.registry import get_solver
from planner.solvers.request import Request
from planner.solvers.windows.decoding.decode import Order, order_of, order_of_schedule
from planner.solvers.windows.relaxation.devices import find_exposed
from planner.solvers.windows.relaxation.discretization import Discretization
from planner.solvers.windows.search import Search
from planner.solvers.windows.strategies.strategy import Strategy

_FEW_EXECUTIONS = 4.0  # per op of the graph: of rules before models
OFFLOADING_RULES_LIMIT = 3.0  # of the clock: for eviction rules at all prices, and for random rules in the portfolio
# Prices of channel time; at the last only tensors that cannot be recomputed are offloaded.
_PRICES = (0.03, 0.0, 0.1, 1e3)


class KeepEverything(Strategy):
    """The program without recomputation, whose peak ends the first window of the relaxation; and what the request starts from."""

    def step(self, limit: float) -> bool:
        """Offer the schedule that keeps everything, split the windows at its peak, and begin from the start; return False."""
        ops = self.search.problem.ops
        trial = self.search.offer(order_of(self.search.problem, range(ops)))
        assert trial is not None
        peak = int(np.argmax(trial.memory_bytes))
        # What is sent last goes out after a window of its own (row 21).
        *_, last = find_exposed(self.search.problem)
        self.search.models.coarse = self.search.models.refined = Discretization(tuple(sorted({peak, last, ops - 1})))
        self._begin_from_start()
        return False

    def _begin_from_start(self) -> None:
        """Offer the schedule of the request's start, and take over its windows, if its first executions are in this order."""
        search, start = self.search, self.search.request.start
        order = None if start is None else order_of_schedule(search.problem, start.schedule)
        if start is None or order is None or search.offer(order) is None:
            return
        ends = [end for end in start.windows if 0 <= end < search.problem.ops]
        search.models.refined = search.models.refined.split_at(ends)


class EvictionRules(Strategy):
    """One eviction rule after another, with few recomputations each. The first step ends with the first schedule."""

    def __init__(self, search: Search) -> None:
        super().__init__(search)
        self._rules = add_prices(search.problem, search.params.first_schedule.rules)
        self._begun = False

    def step(self, limit: float) -> bool:
        """Try rules for about `limit`; return False once there are no more."""
        search, first, self._begun = self.search, not self._begun, True
        stopping, until = search.stopping, search.clock.now + limit
        while not (stopping.is_solved() or stopping.poll_stop() or search.clock.now >= until):
            if first and search.incumbent.best is not None:
                break
            if (rule := next(self._rules, None)) is None:
                return False
            stopped = stopping.count_polls(WORK_PER_EVICTION, stopping.poll_stop)
            most = _FEW_EXECUTIONS
            if (order := find_evicted(search.problem, rule, EvictionSettings(max_factor=most, should_stop=stopped))) is not None:
                search.offer(order)
        return True


class Imitation(Strategy):
    """The schedules of the baselines in ``FirstScheduleParams.imitated``, so that none of them finds a faster one."""

    def step(self, limit: float) -> bool:
        """Run the baselines for at most `limit` and offer their schedules; return False."""
        search, clock = self.search, self.search.clock.start_part(limit)
        program = remove_options(search.problem.graph)
        for name in search.params.first_schedule.imitated:
            if search.stopping.is_solved() or search.stopping.poll_stop() or measure_rest(clock) <= 0:
                break
            search.progress.tell(f"trying {name}")
            request = Request(program, search.budget_bytes, clock=clock, should_stop=search.stopping.poll_stop)
            found = get_solver(name)(request)
            if found.schedule is not None:
                offer_program(search, found.schedule.computed)
        return False


def find_evicted(problem: Problem, rule: EvictionRule, settings: EvictionSettings) -> Order | None:
    """Return the order that `rule` finds; None if the rule fails.

    It may be impossible: eviction ignores that tensors may have been written in place since they were first read.
    """
    found = find_evicting_order(problem, rule, settings)
    return None if found is None else order_of(problem, *found)


def add_prices(problem: Problem, rules: Sequence[EvictionRule]) -> Iterator[EvictionRule]:
    """Yield `rules`; with transfers to the host, at one price of channel time after another."""
    for price in _PRICES if problem.round_trips else _PRICES[:1]:
        yield from (replace(rule, channel=price) for rule in rules)


def offer_program(search: Search, computed: Sequence[int] | None) -> None:
    """Offer an order of ops of the program, if there is one."""
    if computed is not None:
        search.offer(order_of(search.problem, computed))
