"""Schedules by eviction, tried out by the hundred.

A rule of eviction takes milliseconds and is never over the budget, but it is blind to what comes; a solution of
the relaxation sees the whole step, but what it expands to is over the budget in places. So evict with a solution
as guide: what it hands on is evicted last, what it does not is evicted first. And vary: the rule, the
budget it is given (a tensor lives shorter in the schedule than in the run), and a factor to each tensor's rank, a
search over keys that decode to schedules (Bean, ORSA J. Computing 1994).
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from solvers.eviction.engine import evicting_order
from solvers.eviction.rules import Guide, Rule
from solvers.problem import Problem
from solvers.windows.formulation.granularity import Discretization
from solvers.windows.solution.decode import Choice, Order, Trial, late_writers, order_of

_EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5)
_GUIDED_RULES = (Rule(), Rule(size=0.5, distance=0.5), Rule(size=0.25, distance=2.0), Rule(size=0.25, distance=0.5))
_FACTORS = (1.0, 1.04)  # of the budget
_POOL = 4  # ways that are varied
_WORSE = 1.15  # times the best: a run that takes longer is given up
_FRESH = 40  # rules drawn before any is varied
_MAX_EXECUTIONS = 8.0  # per op

Improve = Callable[[Order, Discretization, float], Trial | None]


@dataclass(frozen=True, slots=True)
class Way:
    """A way to evict: a rule, the budget's factor, what guides it, and each tensor's own factor."""

    rule: Rule
    factor: float
    guide: Guide | None
    bias: NDArray[np.float64]


class RandomKeys:
    """Ways to evict, the best of them varied."""

    def __init__(
        self,
        problem: Problem,
        budget_bytes: int,
        solutions: deque[tuple[Discretization, Choice]],
        best_s: Callable[[], float],
        improve: Improve,
    ) -> None:
        """What it needs.

        Args:
            solutions: of models, as they come; those that are taken are removed.
            best_s: time of the best schedule (inf without).
            improve: tries an order out if it is faster than the last argument; the trial, less what is needless,
                where it fits.
        """
        self.problem = problem
        self.budget_bytes = budget_bytes
        self.best_s = best_s
        self.improve = improve
        self.solutions = solutions
        self.pool: list[tuple[float, Way]] = []
        self.runs = 0
        self._seen: set[Choice] = set()
        self._draw = np.random.default_rng(0)
        self._even = np.ones(len(problem.sizes))
        self._whole = Discretization((problem.ops - 1,))

    def guided(self, should_stop: Callable[[], bool]) -> None:
        """Repair the solutions that have come in."""
        while self.solutions:
            detail, choice = self.solutions.pop()
            if choice in self._seen:
                continue
            self._seen.add(choice)
            handed = np.zeros((len(detail.ends), len(self.problem.sizes)), dtype=bool)
            for k, tensors in enumerate(choice.handed[1:]):
                handed[k, list(tensors)] = True
            guide = Guide(detail.ends, handed)
            for rule in _GUIDED_RULES:
                for factor in _FACTORS:
                    if should_stop():
                        return
                    self.take(Way(rule, factor, guide, self._even), None)

    def varied(self, runs: int, should_stop: Callable[[], bool]) -> None:
        """Try `runs` more ways: drawn, and variations of the best."""
        for _ in range(runs):
            if should_stop():
                return
            if self.runs < _FRESH or not self.pool or self._draw.random() < 0.05:
                self.take(self.fresh(), None)
            else:
                # The best is varied most often.
                parent = min(int(self._draw.integers(len(self.pool))), int(self._draw.integers(len(self.pool))))
                self.take(self.variation(self.pool[parent][1]), parent)

    def fresh(self) -> Way:
        """A rule without a guide."""
        cost, size, distance = (float(e) for e in self._draw.choice(_EXPONENTS, 3))
        factor = 1.0 if self._draw.random() < 0.25 else float(self._draw.uniform(0.9, 1.4))
        return Way(Rule(cost, size, distance), factor, None, self._even)

    def variation(self, way: Way) -> Way:
        """`way` with other factors for some tensors, and now and then another rule or budget."""
        draw = self._draw
        share = float(draw.choice((0.1, 0.025, 0.006)))
        chosen = draw.random(len(way.bias)) < share
        way = replace(way, bias=way.bias * np.where(chosen, np.exp(draw.normal(size=len(chosen))), 1.0))
        if draw.random() < 0.3:
            rule = way.rule
            cost, size, distance = (max(0.0, e + 0.1 * float(draw.normal())) for e in (rule.cost, rule.size, rule.distance))
            way = replace(way, rule=Rule(cost, size, distance))
        if draw.random() < 0.3:
            way = replace(way, factor=way.factor * math.exp(0.02 * float(draw.normal())))
        return way

    def take(self, way: Way, parent: int | None) -> None:
        """Try a way, and keep it if it is as good as its parent or better than the worst of the pool."""
        self.runs += 1
        static_bytes = self.problem.graph.static_bytes
        limit_s = _WORSE * self.best_s()
        computed = evicting_order(
            self.problem.graph,
            static_bytes + int(self.problem.capacity_bytes * way.factor),
            way.rule,
            bias=way.bias,
            guide=way.guide,
            max_factor=_MAX_EXECUTIONS,
            max_time_s=limit_s,
        )
        if computed is None or late_writers(self.problem, order := order_of(self._whole, computed)):
            return
        trial = self.improve(order, self._whole, limit_s)
        if trial is None:
            return
        if parent is not None:
            if trial.time_s <= self.pool[parent][0]:
                self.pool[parent] = (trial.time_s, way)
        elif len(self.pool) < _POOL:
            self.pool.append((trial.time_s, way))
        elif trial.time_s < self.pool[-1][0]:
            self.pool[-1] = (trial.time_s, way)
        self.pool.sort(key=lambda entry: entry[0])
