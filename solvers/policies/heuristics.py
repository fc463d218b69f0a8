"""What DTR evicts, and what it was compared with: scores of tensors, for a run in ``online``."""

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solvers.policies.heuristic import Floats, Heuristic, Ints
from solvers.policies.online import Online


class LeastRecentlyUsed(Heuristic):
    """h = when it was last read."""

    def scores(self, candidates: Ints) -> Floats:
        """As in ``Heuristic``."""
        return self.run.touched_s[candidates]


class Largest(Heuristic):
    """h = 1 / bytes."""

    def scores(self, candidates: Ints) -> Floats:
        """As in ``Heuristic``."""
        return ratio(np.ones(len(candidates)), self.run.size_bytes[candidates])


class Random(Heuristic):
    """Any, with equal chances."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def scores(self, candidates: Ints) -> Floats:
        """As in ``Heuristic``."""
        return np.array([self.draw.random() for _ in candidates])


class Cost(Heuristic):
    """h = (own cost + cost of the neighbourhood) / (bytes x staleness), or / bytes; here without a neighbourhood."""

    def __init__(self, *, stale: bool = True) -> None:
        self.stale = stale

    def scores(self, candidates: Ints) -> Floats:
        """As in ``Heuristic``; what has no bytes, or was read just now, goes last."""
        below = self.run.size_bytes[candidates]
        if self.stale:
            below = below * (self.run.clock_s - self.run.touched_s[candidates])
        return ratio(self.run.own_s[candidates] + self.neighbourhood_s(candidates), below)

    def neighbourhood_s(self, candidates: Ints) -> Floats:
        """Cost of the evicted neighbourhood of each of `candidates`."""
        return np.zeros(len(candidates))


def ratio(above: Floats, below: Floats) -> Floats:
    """`above` / `below`, infinite where below is 0."""
    quotient: Floats = np.full(len(above), np.inf)
    np.divide(above, below, out=quotient, where=below > 0)
    return quotient


class CostByClasses(Cost):
    """The neighbourhood as classes of a union-find: cheap, and an estimate, as classes are never split."""

    def begin(self, run: Online) -> None:
        """As in ``Heuristic``."""
        super().begin(run)
        pairs = [(t, n) for t in range(len(run.parents)) for n in self.neighbours(t)]
        self.here, self.there = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        self.label: Ints = np.full(len(run.parents), -1, dtype=np.int64)  # class of each evicted tensor
        self.members: list[list[int]] = []  # of each class; some may have left it
        self.value: Floats = np.zeros(1024)  # cost of each class

    def neighbours(self, t: int) -> tuple[int, ...]:
        """Whose classes `t` joins, and is scored by."""
        return (*self.run.parents[t], *self.run.children[t])

    def evicted(self, t: int) -> None:
        """A class of its own, merged with those of its evicted neighbours."""
        run = self.run
        around = {int(self.label[n]) for n in self.neighbours(t) if run.gone[n]} - {-1}
        new = len(self.members)
        if new == len(self.value):
            self.value = np.concatenate([self.value, np.zeros(new)])
        self.members.append([t])
        self.label[t] = new
        self.value[new] = run.own_s[t]
        self._merge({new, *around})

    def restored(self, t: int) -> None:
        """Its class costs so much less."""
        self.value[self.label[t]] -= self.run.own_s[t]
        self.label[t] = -1

    def _merge(self, classes: set[int]) -> None:
        largest = max(classes, key=lambda c: len(self.members[c]))
        for c in classes - {largest}:
            moving = [t for t in self.members[c] if self.label[t] == c]
            self.label[moving] = largest
            self.members[largest] += moving
            self.members[c] = []
            self.value[largest] += self.value[c]

    def neighbourhood_s(self, candidates: Ints) -> Floats:
        """The sum over the different classes of its evicted neighbours."""
        count, classes = len(self.label), max(len(self.members), 1)
        is_candidate = np.zeros(count, dtype=np.bool_)
        is_candidate[candidates] = True
        at = np.flatnonzero((self.label[self.there] >= 0) & is_candidate[self.here])
        different = np.unique(self.here[at] * classes + self.label[self.there[at]])
        costs = np.bincount(different // classes, weights=self.value[different % classes], minlength=count)
        return np.asarray(costs[candidates], dtype=np.float64)


@dataclass(slots=True)
class _Side:
    """Evicted tensors reachable one way: their cost for each tensor, and whether it must be summed again."""

    onward: tuple[tuple[int, ...], ...]
    cost_s: Floats
    stale: NDArray[np.bool_]


class CostByRegions(Cost):
    """The neighbourhood exactly: what is reachable through evicted tensors, upwards, downwards or both."""

    def __init__(self, *, ancestors: bool, descendants: bool, stale: bool = True) -> None:
        super().__init__(stale=stale)
        self.ancestors, self.descendants = ancestors, descendants

    def begin(self, run: Online) -> None:
        """As in ``Heuristic``."""
        super().begin(run)
        count = len(run.parents)
        wanted = [run.parents] * self.ancestors + [run.children] * self.descendants
        self.sides = [_Side(onward, np.zeros(count), np.ones(count, dtype=np.bool_)) for onward in wanted]

    def evicted(self, t: int) -> None:
        """All that sees `t` costs more."""
        self._changed(t)

    def restored(self, t: int) -> None:
        """All that saw `t` costs less; so may `t` itself, since it went."""
        self._changed(t)

    def _changed(self, t: int) -> None:
        for side in self.sides:
            back = self.run.children if side.onward is self.run.parents else self.run.parents
            side.stale[[t, *self._reachable(t, back, through=False)]] = True

    def _reachable(self, t: int, onward: tuple[tuple[int, ...], ...], *, through: bool) -> list[int]:
        """Tensors that `t` reaches through evicted ones: these themselves, or those in memory behind them."""
        gone = self.run.gone
        seen, stack = {t}, [t]
        found: list[int] = []
        while stack:
            for n in onward[stack.pop()]:
                if n in seen:
                    continue
                seen.add(n)
                if gone[n]:
                    stack.append(n)
                if gone[n] == through:
                    found.append(n)
        return found

    def neighbourhood_s(self, candidates: Ints) -> Floats:
        """The sum over all tensors reached; what is reached on both sides counts twice, as published."""
        total = np.zeros(len(candidates))
        for side in self.sides:
            for t in candidates[side.stale[candidates]].tolist():
                side.cost_s[t] = self.run.own_s[self._reachable(t, side.onward, through=True)].sum()
                side.stale[t] = False
            total += side.cost_s[candidates]
        return total
