"""Heuristics of eviction: those of DTR (Kirisame et al., ICLR 2021), what they were compared with, and MegEngine's.


The evicted storage is the one of least score, in DTR

    h = (own cost + cost of its evicted neighbourhood) / (bytes x staleness),

staleness being the time since it was last read. The neighbourhood of h_DTR are its evicted ancestors and descendants that are
reachable through evicted storages; that of h_DTR-eq, the published default, are classes of a union-find of evicted storages:
eviction merges neighbouring classes, recomputation subtracts the cost from a class and never splits it; h_DTR-local has none. For
comparison: least recently used, largest, random, and MSPS (Peng et al., 2020): (own cost + evicted ancestors) / bytes.

MegEngine's (Megvii, 2020) is in ``Interpreter``.

Known weakness of h_DTR-eq, as published: a class that was merged is never split, so its cost may contain storages that are no
longer connected. ``CostByRegions`` has the exact neighbourhoods, at more work for each eviction.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from solvers.online.storages import Bits, Floats, Ints, Storages

MIB = 2**20
BYTES_PER_S = 1e8  # by which MegEngine estimates the time of an op


class DtrRule(StrEnum):
    """A heuristic of the DTR paper, by its name in the registry of solvers."""

    DTR = "dtr"
    FULL = "dtr-full"
    LOCAL = "dtr-local"
    LRU = "lru"
    LARGEST = "largest"
    MSPS = "msps"
    RANDOM = "dtr-random"


MEGENGINE = "megengine"

NAMES = (*(rule.value for rule in DtrRule), MEGENGINE)


def make_heuristic(name: str, seed: int = 0) -> "Heuristic":
    """Return the heuristic called `name`, one of ``NAMES``; `seed` is for the random one.

    Raises:
        ValueError: there is no such heuristic.
    """
    match name:
        case DtrRule.DTR:
            return CostByClasses()
        case DtrRule.FULL:
            return CostByRegions(descendants=True)
        case DtrRule.MSPS:
            return CostByRegions(descendants=False, stale=False)
        case DtrRule.LOCAL:
            return Cost()
        case DtrRule.LRU:
            return LeastRecentlyUsed()
        case DtrRule.LARGEST:
            return Largest()
        case DtrRule.RANDOM:
            return RandomScores(seed)
        case _ if name == MEGENGINE:
            return Interpreter()
    raise ValueError(f"there is no heuristic {name!r}; choose one of {', '.join(NAMES)}")


class Heuristic(ABC):
    """A choice of the evicted storage, the one of least score; it is notified of evictions and recomputations.

    Attributes:
        keeps_siblings: True if an op that is recomputed for one output leaves the others in memory too.
        keeps_random: True if outputs of random ops are never evicted.
        least_bytes: storages of up to this size are never evicted.
        counts_bytes: True if it estimates the time of an op from the bytes read and written.
    """

    keeps_siblings = True
    keeps_random = False
    least_bytes = -1
    counts_bytes = False

    def spares(self, size_bytes: int) -> bool:
        """Return True if storages of this size are never evicted."""
        return size_bytes <= self.least_bytes

    def estimate_s(self, time_s: float, moved_bytes: int) -> float:
        """Return the heuristic's estimate of the seconds of an op, which takes `time_s` and reads and writes `moved_bytes`.

        It is the cost of the op, and what it adds to the clock by which storages become stale.
        """
        return moved_bytes / BYTES_PER_S if self.counts_bytes else time_s

    def begin(self, storages: Storages) -> None:
        """Prepare for the storages of an empty ledger, whose heuristic it is from now on."""
        self.storages = storages

    def grow(self, capacity: int) -> None:  # noqa: B027 (not all have arrays)
        """Make room for `capacity` storages."""

    def note_added(self, storage: int) -> None:  # noqa: B027
        """Record a new storage; its id is the next one, or that of a dropped storage."""

    def note_evicted(self, storage: int) -> None:  # noqa: B027 (not all listen)
        """Record that `storage` was evicted."""

    def note_restored(self, storage: int) -> None:  # noqa: B027
        """Record that `storage`, which was evicted, is in memory again or was dropped."""

    def note_related(self, parent: int, child: int) -> None:  # noqa: B027
        """Record that an op writing `child` has read `parent`, of which one at least is evicted."""

    def note_chosen(self, storage: int) -> None:  # noqa: B027
        """Record that `storage` had the least score of all candidates."""

    def note_dearer(self, storage: int, seconds: float) -> None:  # noqa: B027
        """Record that the own cost of `storage`, which is evicted, rose by `seconds`."""

    @abstractmethod
    def score(self, storages: Ints, now_s: float) -> Floats:
        """Return the score of each of `storages` at `now_s`."""


class LeastRecentlyUsed(Heuristic):
    """The heuristic h = time of the last read."""

    def score(self, storages: Ints, now_s: float) -> Floats:
        """Return the times of the last reads."""
        return self.storages.touched_s[storages]


class Largest(Heuristic):
    """The heuristic h = 1 / bytes."""

    def score(self, storages: Ints, now_s: float) -> Floats:
        """Return the inverse sizes."""
        return divide(np.ones(len(storages)), self.storages.size_bytes[storages])


class RandomScores(Heuristic):
    """The heuristic of a uniform random choice, each time among all candidates.

    A storage fires at random times, by a Poisson process of rate 1; the next to fire is evicted. That process has no memory: the
    next one is any of the candidates with the same probability, whatever was evicted before. The times are a function of the
    seed, the origin of the storage and their number. So they do not depend on other storages, nor on how often they are asked
    for: a storage that turns out to be in use has no effect on the next choice. Scores are these times, which only rise.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._now = 0.0  # when the last one fired
        self._next: Floats = np.zeros(0)  # when each storage fires next, if that is later
        self._drawn: Ints = np.zeros(0, dtype=np.int64)

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` storages."""
        more = capacity - len(self._next)
        self._next = np.concatenate([self._next, np.zeros(more)])
        self._drawn = np.concatenate([self._drawn, np.zeros(more, dtype=np.int64)])

    def note_added(self, storage: int) -> None:
        """Begin the process of a new storage."""
        self._next[storage] = self._now
        self._drawn[storage] = 0

    def note_chosen(self, storage: int) -> None:
        """Go on to the time at which `storage` fires."""
        self._now = float(self._next[storage])

    def score(self, storages: Ints, now_s: float) -> Floats:
        """Advance the processes of `storages` beyond the present, and return the time at which each fires next."""
        fired = storages
        while len(fired := fired[self._next[fired] <= self._now]):
            draws = hash_to_uniform(np.array([self._seed]), self.storages.origin[fired], self._drawn[fired])
            self._next[fired] -= np.log1p(-draws)
            self._drawn[fired] += 1
        return self._next[storages]


def hash_to_uniform(*numbers: Ints) -> Floats:
    """Return numbers in [0, 1) that are a function of `numbers`, by the mixing steps of SplitMix64 (Steele et al., 2014)."""
    mixed = np.zeros(1, dtype=np.uint64)
    for number in numbers:
        mixed = (mixed ^ number.astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return np.ldexp((mixed >> np.uint64(11)).astype(np.float64), -53)


class Cost(Heuristic):
    """The heuristic h = (own cost + cost of the neighbourhood) / (bytes x staleness), or / bytes; without a neighbourhood."""

    def __init__(self, *, stale: bool = True) -> None:
        self.stale = stale

    def score(self, storages: Ints, now_s: float) -> Floats:
        """Return h; infinite for storages of no bytes or read just now."""
        known = self.storages
        below = known.size_bytes[storages]
        if self.stale:
            below = below * (now_s - known.touched_s[storages])
        return divide(known.own_s[storages] + self.compute_neighbourhood_s(storages), below)

    def compute_neighbourhood_s(self, storages: Ints) -> Floats:
        """Return the cost of the evicted neighbourhood of each of `storages`, in seconds."""
        return np.zeros(len(storages))


def divide(above: Floats, below: Floats) -> Floats:
    """Return `above` / `below`, infinite where `below` is 0."""
    quotient: Floats = np.full(len(above), np.inf)
    np.divide(above, below, out=quotient, where=below > 0)
    return quotient


class _Cached:
    """A cost of each storage that is computed when it is asked for and has changed."""

    def __init__(self) -> None:
        self.cost_s: Floats = np.zeros(0)
        self.outdated: Bits = np.ones(0, dtype=np.bool_)

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` storages."""
        more = capacity - len(self.cost_s)
        self.cost_s = np.concatenate([self.cost_s, np.zeros(more)])
        self.outdated = np.concatenate([self.outdated, np.ones(more, dtype=np.bool_)])


@dataclass(slots=True)
class _Class:
    """A class of evicted storages that are neighbours.

    Attributes:
        members: those that are evicted.
        around: storages with a neighbour among them, and some that had one.
        cost_s: of the members; what has left it may leave a rounding error.
        joined: number of storages that have joined it.
    """

    members: set[int]
    around: set[int] = field(default_factory=set)
    cost_s: float = 0.0
    joined: int = 1


class CostByClasses(Cost):
    """The cost with classes of a union-find as neighbourhood: a cheap estimate, as classes are never split."""

    def __init__(self) -> None:
        super().__init__()
        self.costs = _Cached()
        self.label: list[int] = []  # class of each evicted storage, otherwise -1
        self.classes: dict[int, _Class] = {}
        self.labels = 0

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` storages."""
        self.costs.grow(capacity)

    def note_added(self, storage: int) -> None:
        """Record a new storage, without neighbours."""
        if storage == len(self.label):
            self.label.append(-1)
        self.costs.outdated[storage] = True

    def list_neighbours(self, storage: int) -> list[int]:
        """Return the storages whose classes `storage` joins when evicted, and by which it is scored."""
        return [*self.storages.parents[storage], *self.storages.children[storage]]

    def list_observers(self, storage: int) -> list[int]:
        """Return the storages that have `storage` as a neighbour."""
        return self.list_neighbours(storage)

    def note_evicted(self, storage: int) -> None:
        """Add a class for `storage`, merged with those of its evicted neighbours."""
        around = {self.label[n] for n in self.list_neighbours(storage)} - {-1}
        new = self.labels
        self.labels += 1
        own = self.classes[new] = _Class({storage}, cost_s=float(self.storages.own_s[storage]))
        own.around.update(self.list_observers(storage))
        self.label[storage] = new
        merged = self._merge({new, *around})
        self._mark_changed(merged)

    def note_restored(self, storage: int) -> None:
        """Subtract the cost of `storage` from its class."""
        label = self.label[storage]
        left = self.classes[label]
        left.cost_s -= float(self.storages.own_s[storage])
        left.members.discard(storage)
        self.label[storage] = -1
        self.costs.outdated[storage] = True
        self._mark_changed(left)
        if not left.members:
            del self.classes[label]
        for n in self.list_neighbours(storage):
            if self.label[n] >= 0:
                self.classes[self.label[n]].around.add(storage)

    def note_related(self, parent: int, child: int) -> None:
        """Merge the classes of two evicted storages, or note that one of them is next to the class of the other."""
        labels = {self.label[parent], self.label[child]} - {-1}
        merged = self._merge(labels)
        merged.around |= {parent, child}
        self._mark_changed(merged)

    def note_dearer(self, storage: int, seconds: float) -> None:
        """Add to the cost of the class of `storage`."""
        label = self.classes[self.label[storage]]
        label.cost_s += seconds
        self._mark_changed(label)

    def _merge(self, labels: set[int]) -> _Class:
        classes = self.classes
        largest, *others = sorted(labels, key=lambda label: (-classes[label].joined, label))
        into = classes[largest]
        for label in others:
            merged = classes.pop(label)
            for storage in merged.members:
                self.label[storage] = largest
            into.members |= merged.members
            into.joined += len(merged.members)
            into.cost_s += merged.cost_s
            into.around = _unite(into.around, merged.around)
        return into

    def _mark_changed(self, changed: _Class) -> None:
        """Mark the costs of storages around a class as out of date."""
        gone = self.storages.gone
        changed.around = {storage for storage in changed.around if not gone[storage]}
        self.costs.outdated[list(changed.around)] = True

    def compute_neighbourhood_s(self, storages: Ints) -> Floats:
        """Return the sum over the distinct classes of the evicted neighbours of each storage."""
        costs = self.costs
        for storage in storages[costs.outdated[storages]].tolist():
            costs.cost_s[storage] = self.compute_cost_around_s(self.list_neighbours(storage))
            costs.outdated[storage] = False
        return costs.cost_s[storages]

    def compute_cost_around_s(self, neighbours: Iterable[int]) -> float:
        """Return the cost of a storage's neighbourhood."""
        cost_s = 0.0
        for label in sorted({self.label[n] for n in neighbours} - {-1}):
            cost_s += self.classes[label].cost_s
        return cost_s


def _unite(one: set[int], other: set[int]) -> set[int]:
    """Return the union of two sets that are no longer used, in the time of the smaller."""
    if len(one) < len(other):
        one, other = other, one
    one |= other
    return one


class CostByRegions(Cost):
    """The cost with the exact neighbourhood: storages reachable through evicted ones, upwards or in both directions."""

    def __init__(self, *, descendants: bool, stale: bool = True) -> None:
        super().__init__(stale=stale)
        self.upwards = _Cached()
        self.downwards = _Cached() if descendants else None

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` storages."""
        for side in (self.upwards, self.downwards):
            if side is not None:
                side.grow(capacity)

    def note_added(self, storage: int) -> None:
        """Record a new storage, without neighbours."""
        for side in (self.upwards, self.downwards):
            if side is not None:
                side.outdated[storage] = True

    def note_evicted(self, storage: int) -> None:
        """Mark the costs that include `storage` as out of date."""
        self._mark_changed(storage)

    def note_restored(self, storage: int) -> None:
        """Mark the costs that included `storage`, and its own, as out of date."""
        self._mark_changed(storage)

    def note_related(self, parent: int, child: int) -> None:
        """Mark the costs on both sides of the evicted one as out of date."""
        for storage in (parent, child):
            self._mark_changed(storage)

    def note_dearer(self, storage: int, seconds: float) -> None:
        """Mark the costs that include `storage` as out of date."""
        self._mark_changed(storage)

    def _mark_changed(self, storage: int) -> None:
        """Mark costs as out of date."""
        known = self.storages
        for side, back in ((self.upwards, known.children), (self.downwards, known.parents)):
            if side is not None:
                behind = self._find_reachable(storage, back, through=False)
                side.outdated[[storage, *behind]] = True

    def _find_reachable(self, storage: int, onward: list[dict[int, None]], *, through: bool) -> list[int]:
        """Return the evicted storages that `storage` reaches through evicted ones (`through`), or those in memory behind them."""
        gone = self.storages.gone
        seen, stack = {storage}, [storage]
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

    def compute_neighbourhood_s(self, storages: Ints) -> Floats:
        """Return the sum over all reachable storages; those reachable in both directions count twice, as published."""
        known = self.storages
        total = np.zeros(len(storages))
        for side, onward in ((self.upwards, known.parents), (self.downwards, known.children)):
            if side is None:
                continue
            for storage in storages[side.outdated[storages]].tolist():
                own_s = known.own_s[self._find_reachable(storage, onward, through=True)]
                side.cost_s[storage] = own_s.cumsum()[-1] if len(own_s) else 0.0  # one by one: a sum would round otherwise
                side.outdated[storage] = False
            total += side.cost_s[storages]
        return total


class Interpreter(CostByClasses):
    """The heuristic of MegEngine's interpreter.

    The score is (cost of neighbours + 1e-3) x 1.0001^(number of recomputations) / (MiB x (staleness + 1e-3)), neighbours being
    evicted inputs and siblings of the storage's producer; each counts with its class in a union-find of these relations, or with
    its own cost if that is more. MegEngine's bytes include free memory next to the tensor; here memory has no addresses, so there
    is none. The time of an op is estimated from its bytes read and written.
    """

    keeps_random = True
    counts_bytes = True

    def __init__(self, least_bytes: int = MIB) -> None:
        super().__init__()
        self.least_bytes = least_bytes

    def list_neighbours(self, storage: int) -> list[int]:
        """Return the inputs of the producer of `storage`, and its siblings."""
        return [*self.storages.parents[storage], *self.storages.list_siblings(storage)]

    def list_observers(self, storage: int) -> list[int]:
        """Return the storages that are computed from `storage`, and its siblings."""
        return [*self.storages.children[storage], *self.storages.list_siblings(storage)]

    def score(self, storages: Ints, now_s: float) -> Floats:
        """Return the scores of the rule."""
        known = self.storages
        cost = self.compute_neighbourhood_s(storages) * BYTES_PER_S + 1e-3
        below = known.size_bytes[storages] / MIB * (now_s - known.touched_s[storages] + 1e-3)
        return divide(cost * 1.0001 ** known.again[storages], below)

    def compute_cost_around_s(self, neighbours: Iterable[int]) -> float:
        """Return the sum over the evicted neighbours of their class, or of themselves if they cost more."""
        cost_s = 0.0
        for n in neighbours:
            if self.label[n] >= 0:
                cost_s += max(self.classes[self.label[n]].cost_s, float(self.storages.own_s[n]))
        return cost_s
