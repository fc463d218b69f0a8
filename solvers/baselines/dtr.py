"""Dynamic tensor rematerialization (DTR, Kirisame et al., ICLR 2021) and the heuristics it was compared with.

The run itself is in ``common/online.py``; here is the choice of the evicted tensor, the one of least score

    h = (own cost + cost of its evicted neighbourhood) / (bytes x staleness),

staleness being the time since it was last read. The neighbourhood of h_DTR are its evicted ancestors and descendants that are
reachable through evicted tensors; that of h_DTR-eq, the published default, are classes of a union-find of evicted tensors:
eviction merges neighbouring classes, recomputation subtracts the cost from a class and never splits it; h_DTR-local has none. For
comparison: least recently used, largest, random, and MSPS (Peng et al., 2020): (own cost + evicted ancestors) / bytes.

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
    """Parameters of a run.

    Attributes:
        deallocation: treatment of a tensor after its last use.
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
    """Return the schedule of the run; LIMIT if it runs out of memory or thrashes.

    Args:
        request: its parameters are ``DtrParams``.
        rule: the choice of the evicted tensor; see ``DtrRule``.

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
    """Return the heuristic of `rule`; `seed` is for the random one."""
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
    """The heuristic h = time of the last read."""

    def scores(self, candidates: Ints) -> Floats:
        """Return the times of the last reads."""
        return self.run.touched_s[candidates]


class Largest(Heuristic):
    """The heuristic h = 1 / bytes."""

    def scores(self, candidates: Ints) -> Floats:
        """Return the inverse sizes."""
        return ratio(np.ones(len(candidates)), self.run.size_bytes[candidates])


class Random(Heuristic):
    """The heuristic of random scores."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def scores(self, candidates: Ints) -> Floats:
        """Return uniform random scores."""
        return np.array([self.draw.random() for _ in candidates])


class Cost(Heuristic):
    """The heuristic h = (own cost + cost of the neighbourhood) / (bytes x staleness), or / bytes; without a neighbourhood."""

    def __init__(self, *, stale: bool = True) -> None:
        self.stale = stale

    def scores(self, candidates: Ints) -> Floats:
        """Return h; infinite for tensors of no bytes or read just now."""
        below = self.run.size_bytes[candidates]
        if self.stale:
            below = below * (self.run.clock_s - self.run.touched_s[candidates])
        return ratio(self.run.own_s[candidates] + self.neighbourhood_s(candidates), below)

    def neighbourhood_s(self, candidates: Ints) -> Floats:
        """Return the cost of the evicted neighbourhood of each of `candidates`, in seconds."""
        return np.zeros(len(candidates))


def ratio(above: Floats, below: Floats) -> Floats:
    """Return `above` / `below`, infinite where `below` is 0."""
    quotient: Floats = np.full(len(above), np.inf)
    np.divide(above, below, out=quotient, where=below > 0)
    return quotient


class CostByClasses(Cost):
    """The cost with classes of a union-find as neighbourhood: a cheap estimate, as classes are never split."""

    def begin(self, run: Online) -> None:
        """Prepare the classes for a run, without evicted tensors."""
        super().begin(run)
        pairs = [(t, n) for t in range(len(run.parents)) for n in self.neighbours(t)]
        self.here, self.there = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        self.label: Ints = np.full(len(run.parents), -1, dtype=np.int64)  # class of each evicted tensor
        self.members: list[list[int]] = []  # of each class, including some that have left it
        self.value: Floats = np.zeros(1024)  # cost of each class

    def neighbours(self, t: int) -> tuple[int, ...]:
        """Return the tensors whose classes `t` joins when evicted, and by which it is scored."""
        return (*self.run.parents[t], *self.run.children[t])

    def evicted(self, t: int) -> None:
        """Add a class for `t`, merged with those of its evicted neighbours."""
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
        """Subtract the cost of `t` from its class."""
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
        """Return the sum over the distinct classes of the evicted neighbours of each candidate."""
        count, classes = len(self.label), max(len(self.members), 1)
        is_candidate = np.zeros(count, dtype=np.bool_)
        is_candidate[candidates] = True
        at = np.flatnonzero((self.label[self.there] >= 0) & is_candidate[self.here])
        different = np.unique(self.here[at] * classes + self.label[self.there[at]])
        costs = np.bincount(different // classes, weights=self.value[different % classes], minlength=count)
        return np.asarray(costs[candidates], dtype=np.float64)


@dataclass(slots=True)
class _Side:
    """Evicted tensors reachable in one direction: their cost for each tensor, and True if it is out of date."""

    onward: tuple[tuple[int, ...], ...]
    cost_s: Floats
    stale: NDArray[np.bool_]


class CostByRegions(Cost):
    """The cost with the exact neighbourhood: tensors reachable through evicted ones, upwards, downwards or both."""

    def __init__(self, *, ancestors: bool, descendants: bool, stale: bool = True) -> None:
        super().__init__(stale=stale)
        self.ancestors, self.descendants = ancestors, descendants

    def begin(self, run: Online) -> None:
        """Prepare the directions for a run."""
        super().begin(run)
        count = len(run.parents)
        wanted = [run.parents] * self.ancestors + [run.children] * self.descendants
        self.sides = [_Side(onward, np.zeros(count), np.ones(count, dtype=np.bool_)) for onward in wanted]

    def evicted(self, t: int) -> None:
        """Mark the costs that include `t` as out of date."""
        self._changed(t)

    def restored(self, t: int) -> None:
        """Mark the costs that included `t`, and its own, as out of date."""
        self._changed(t)

    def _changed(self, t: int) -> None:
        for side in self.sides:
            back = self.run.children if side.onward is self.run.parents else self.run.parents
            side.stale[[t, *self._reachable(t, back, through=False)]] = True

    def _reachable(self, t: int, onward: tuple[tuple[int, ...], ...], *, through: bool) -> list[int]:
        """Return the evicted tensors that `t` reaches through evicted ones (`through`), or those in memory behind them."""
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
        """Return the sum over all reachable tensors; those reachable in both directions count twice, as published."""
        total = np.zeros(len(candidates))
        for side in self.sides:
            for t in candidates[side.stale[candidates]].tolist():
                side.cost_s[t] = self.run.own_s[self._reachable(t, side.onward, through=True)].sum()
                side.stale[t] = False
            total += side.cost_s[candidates]
        return total
