"""Dynamic tensor rematerialization (DTR, Kirisame et al., ICLR 2021) and the heuristics it was compared with.

The run itself is in ``online``; here is what is evicted: the tensor of least score

    h = (own cost + cost of its evicted neighbourhood) / (bytes x staleness),

staleness being the time since it was last read. The neighbourhood of h_DTR is what was made from it or it was
made from, as far as that is reachable through evicted tensors; that of h_DTR-eq, the published default, the
classes of a union-find of evicted tensors: evicting merges neighbouring classes, recomputing takes the cost off
a class and never splits it; h_DTR-local has none. For comparison: least recently used, largest, random, and
MSPS (Peng et al., 2020): (own cost + evicted ancestors) / bytes.

Feasibility is not monotone in the budget. A failure proves nothing.
"""

import random
from dataclasses import asdict, dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from solvers.baselines.common.online import Deallocation, Floats, Heuristic, Ints, Online, online_result
from solvers.request import Request
from solvers.result import Result


@dataclass(frozen=True, slots=True)
class DtrParams:
    """Of a run.

    Attributes:
        deallocation: what happens after a tensor's last use.
        thrash_factor: a step longer than this times the one without recomputation is a failure.
        seed: of the rule ``dtr-random``.
    """

    deallocation: Deallocation = Deallocation.EAGER
    thrash_factor: float = 2.0
    seed: int = 0


class DtrRule(StrEnum):
    """A heuristic, by its name in the registry."""

    DTR = "dtr"
    FULL = "dtr-full"
    LOCAL = "dtr-local"
    LRU = "lru"
    LARGEST = "largest"
    MSPS = "msps"
    RANDOM = "dtr-random"


def solve(request: Request, *, rule: str = DtrRule.DTR) -> Result:
    """As ``solvers.registry.Solver``; LIMIT when the run is out of memory or thrashes.

    Args:
        request: its parameters are ``DtrParams``.
        rule: what to evict; see ``DtrRule``.

    Raises:
        ValueError: no such rule.
    """
    params = request.params_of(DtrParams())
    return online_result(
        request,
        str(rule),
        [(heuristic(DtrRule(rule), params.seed), {})],
        deallocation=params.deallocation,
        thrash_factor=params.thrash_factor,
        settings={"rule": str(rule), **asdict(params)},
    )


def heuristic(rule: DtrRule, seed: int = 0) -> Heuristic:
    """The heuristic called `rule`; `seed` is for the random one."""
    match rule:
        case DtrRule.DTR:
            return CostByClasses()
        case DtrRule.FULL:
            return CostByRegions(ancestors=True, descendants=True)
        case DtrRule.MSPS:
            return CostByRegions(ancestors=True, descendants=False, stale=False)
        case DtrRule.LOCAL:
            return Cost()
        case DtrRule.LRU:
            return LeastRecentlyUsed()
        case DtrRule.LARGEST:
            return Largest()
        case DtrRule.RANDOM:
            return Random(seed)


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
