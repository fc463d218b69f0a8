"""Schedules with transfers to the host, by eviction with random keys.

An eviction rule takes milliseconds and never exceeds the budget, but does not look ahead; a solution of the relaxation considers
the whole step, but its order exceeds the budget in places. So evict with a solution as guide: tensors that it hands over are
evicted last, others first. And vary the rule, its budget (tensors live shorter in the schedule than in the run), and a factor to
each tensor's rank: a search over random keys that decode to schedules (Bean, ORSA J. Computing 1994).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.solvers.eviction.engine import WORK_PER_EVICTION
from planner.solvers.eviction.rules import EvictionRule, EvictionSettings, Guide
from planner.solvers.windows.decoding.decode import Trial
from planner.solvers.windows.decoding.expand import Solution
from planner.solvers.windows.search import Search
from planner.solvers.windows.strategies.first_schedules import add_prices, find_evicted

_EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5)  # of random rules
# Tried with each solution of a model as guide, with factors to the budget.
_GUIDED_RULES = (
    EvictionRule(),
    EvictionRule(size=0.5, distance=0.5),
    EvictionRule(size=0.25, distance=2.0),
    EvictionRule(size=0.25, distance=0.5),
)
_FACTORS = (1.0, 1.04)
_POOL = 4  # runs that are varied
_WORSE = 1.15  # times the best time: a run is given up
_FRESH, _FRESH_SHARE = 40, 0.05  # random rules before the first variation, and their share in later runs
_WHOLE_SHARE = 0.25  # of random rules that use the whole budget; others use a factor between these
_BUDGET_FACTORS = (0.9, 1.4)
_VARIED = (0.1, 0.025, 0.006)  # shares of the tensors that get another factor in a variation, one of which is drawn
_RULE_SHARE, _RULE_STEP = 0.3, 0.1  # probability of a change of the rule, and deviation of each exponent
_BUDGET_SHARE, _BUDGET_STEP = 0.3, 0.02  # probability of a change of the budget, and deviation of the factor's logarithm
_MOST_EXECUTIONS = 8.0  # per op
_PRICES, _PRICE_STEP = (0.0, 0.01, 0.03, 0.1, 0.3), 0.3  # random prices of channel time, and deviation of their logarithm


@dataclass(frozen=True, slots=True)
class EvictionKeys:
    """The input of an eviction: a rule, a factor to the budget, a guide, and a factor for each tensor."""

    rule: EvictionRule
    factor: float
    guide: Guide | None
    bias: NDArray[np.float64]


class RandomKeys:
    """A pool of the best evictions, which are varied."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.problem = search.problem
        self.pool: list[tuple[float, EvictionKeys]] = []
        self.runs = 0
        self.found: Trial | None = None  # its last schedule that was the best of the search
        self._seen: set[Solution] = set()
        self._draw = np.random.default_rng(0)
        self._even = np.ones(len(self.problem.sizes))

    def repair_solutions(self, should_stop: Callable[[], bool]) -> None:
        """Repair the new solutions of models."""
        while self.search.models.solutions:
            discretization, solution = self.search.models.solutions.pop()
            if solution in self._seen:
                continue
            self._seen.add(solution)
            handed = np.zeros((len(discretization.ends), len(self.problem.sizes)), dtype=bool)
            for k, tensors in enumerate(solution.handed[1:]):
                handed[k, list(tensors)] = True
            guide = Guide(discretization.ends, handed)
            for rule in add_prices(self.problem, _GUIDED_RULES):
                for factor in _FACTORS:
                    if should_stop():
                        return
                    self.take(EvictionKeys(rule, factor, guide, self._even), None)

    def vary(self, runs: int, should_stop: Callable[[], bool]) -> None:
        """Try `runs` more evictions: random ones, and variations of the best."""
        for _ in range(runs):
            if should_stop():
                return
            if self.runs < _FRESH or not self.pool or self._draw.random() < _FRESH_SHARE:
                self.take(self.draw_keys(), None)
            else:
                # The best is varied most often.
                parent = min(int(self._draw.integers(len(self.pool))), int(self._draw.integers(len(self.pool))))
                self.take(self.vary_keys(self.pool[parent][1]), parent)

    def draw_keys(self) -> EvictionKeys:
        """Return a random rule without a guide."""
        cost, size, distance = (float(e) for e in self._draw.choice(_EXPONENTS, 3))
        exact = self._draw.random() < _WHOLE_SHARE
        factor = 1.0 if exact else float(self._draw.uniform(*_BUDGET_FACTORS))
        rule = EvictionRule(cost, size, distance, channel=float(self._draw.choice(_PRICES)))
        return EvictionKeys(rule, factor, None, self._even)

    def vary_keys(self, keys: EvictionKeys) -> EvictionKeys:
        """Return `keys` with other factors for some tensors, and sometimes another rule or budget."""
        draw = self._draw
        share = float(draw.choice(_VARIED))
        chosen = draw.random(len(keys.bias)) < share
        keys = replace(keys, bias=keys.bias * np.where(chosen, np.exp(draw.normal(size=len(chosen))), 1.0))
        if draw.random() < _RULE_SHARE:
            exponents = (keys.rule.cost, keys.rule.size, keys.rule.distance)
            cost, size, distance = (max(0.0, e + _RULE_STEP * float(draw.normal())) for e in exponents)
            channel = keys.rule.channel * math.exp(_PRICE_STEP * float(draw.normal()))
            keys = replace(keys, rule=EvictionRule(cost, size, distance, channel=channel))
        if draw.random() < _BUDGET_SHARE:
            keys = replace(keys, factor=keys.factor * math.exp(_BUDGET_STEP * float(draw.normal())))
        return keys

    def take(self, keys: EvictionKeys, parent: int | None) -> None:
        """Try an eviction, and keep it if it is as good as its parent or better than the worst of the pool."""
        self.runs += 1
        limit_s = _WORSE * self.search.incumbent.best_s
        settings = EvictionSettings(
            capacity_bytes=int(self.problem.capacity_bytes * keys.factor),
            bias=keys.bias,
            guide=keys.guide,
            max_factor=_MOST_EXECUTIONS,
            max_time_s=limit_s,
        )
        order = find_evicted(self.problem, keys.rule, settings)
        executed = self.problem.ops if order is None else len(order.computed)
        self.search.clock.spend(WORK_PER_EVICTION * executed)
        if order is None:
            return
        trial = self.search.improve_order(order, limit_s)
        if trial is None:
            return
        if trial is self.search.incumbent.best:
            self.found = trial
        if parent is not None:
            # A variation that is as good replaces its parent, so that the pool moves on along plateaus.
            if trial.time_s <= self.pool[parent][0]:
                self.pool[parent] = (trial.time_s, keys)
        elif len(self.pool) < _POOL:
            self.pool.append((trial.time_s, keys))
        elif trial.time_s < self.pool[-1][0]:
            self.pool[-1] = (trial.time_s, keys)
        self.pool.sort(key=lambda entry: entry[0])
