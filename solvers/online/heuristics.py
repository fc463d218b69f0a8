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

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import reduce

import numpy as np

from planner.solvers.online.storages import Floats, Ints, Storages

MIB = 2**20
BYTES_PER_S = 1e8  # by which MegEngine estimates the time of an op
_FIRST = 16  # storages whose neighbourhoods are looked at together at first; then twice as many
_ROUNDED = 1 + 1e-9  # costs of classes are sums and differences


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

    def note_added(self, storage: int) -> None:  # noqa: B027 (not all listen)
        """Record a new storage; its id is the next one, or that of a dropped storage."""

    def note_evicted(self, storage: int) -> None:  # noqa: B027
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

    def select_least(self, storages: Ints, now_s: float) -> tuple[Ints, float]:
        """Return those of `storages` of least score at `now_s`, and that score."""
        scores = self.score(storages, now_s)
        return storages[scores == scores.min()], float(scores.min())


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
        self._seed, self._now = seed, 0.0  # when the last one fired
        self._next: dict[int, float] = {}  # when each storage fires next, if that is later
        self._drawn: dict[int, int] = {}

    def note_added(self, storage: int) -> None:
        """Begin the process of a new storage."""
        self._next[storage], self._drawn[storage] = self._now, 0

    def note_chosen(self, storage: int) -> None:
        """Go on to the time at which `storage` fires."""
        self._now = self._next[storage]

    def score(self, storages: Ints, now_s: float) -> Floats:
        """Advance the processes of `storages` beyond the present, and return the time at which each fires next."""
        for storage in storages.tolist():
            while self._next[storage] <= self._now:
                numbers = np.array([[self._seed], [self.storages.origin[storage]], [self._drawn[storage]]])
                self._next[storage] -= float(np.log1p(-hash_to_uniform(*numbers))[0])
                self._drawn[storage] += 1
        return np.array([self._next[storage] for storage in storages.tolist()])


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

    stale = True

    def score(self, storages: Ints, now_s: float) -> Floats:
        """Return h; infinite for storages of no bytes or read just now."""
        return self.weigh(storages, self.compute_neighbourhood_s(storages), now_s)

    def weigh(self, storages: Ints, neighbourhood_s: Floats, now_s: float) -> Floats:
        """Return h with the costs of neighbourhoods in seconds, with which it rises."""
        known = self.storages
        below = known.size_bytes[storages]
        if self.stale:
            below = below * (now_s - known.touched_s[storages])
        return divide(known.own_s[storages] + neighbourhood_s, below)

    def compute_neighbourhood_s(self, storages: Ints) -> Floats:
        """Return the cost of the evicted neighbourhood of each of `storages`, in seconds."""
        return np.zeros(len(storages))

    def select_least(self, storages: Ints, now_s: float) -> tuple[Ints, float]:
        """Return those of least score, and that; neighbourhoods are looked at only where h without one is not above it."""
        alone = self.weigh(storages, np.zeros(len(storages)), now_s)
        order = np.argsort(alone, kind="stable")
        scores, at, least = np.full(len(storages), np.inf), 0, np.inf
        while at < len(order) and alone[order[at]] <= least * _ROUNDED:
            block = order[at : 2 * at + _FIRST]
            scores[block] = self.score(storages[block], now_s)
            at, least = at + len(block), min(least, float(scores[block].min()))
        return storages[scores == least], least


def divide(above: Floats, below: Floats) -> Floats:
    """Return `above` / `below`, infinite where `below` is 0."""
    quotient: Floats = np.full(len(above), np.inf)
    np.divide(above, below, out=quotient, where=below > 0)
    return quotient


@dataclass(slots=True)
class _Class:
    """A class of evicted storages that are neighbours.

    Attributes:
        members: those that are evicted.
        cost_s: of the members; what has left it may leave a rounding error.
        joined: number of storages that have joined it.
    """

    members: set[int]
    cost_s: float
    joined: int = 1


def _add_up(costs_s: Iterable[float]) -> float:
    """Return the sum of costs, added one by one: ``sum`` rounds otherwise since Python 3.12, and NumPy's in blocks."""
    return reduce(operator.add, costs_s, 0.0)


class CostByClasses(Cost):
    """The cost with classes of a union-find as neighbourhood: a cheap estimate, as classes are never split."""

    def __init__(self) -> None:
        self.label: dict[int, int] = {}  # class of each evicted storage
        self.classes: dict[int, _Class] = {}
        self.labels = 0

    def list_neighbours(self, storage: int) -> list[int]:
        """Return the storages whose classes `storage` joins when evicted, and by which it is scored."""
        return [*self.storages.parents[storage], *self.storages.children[storage]]

    def note_evicted(self, storage: int) -> None:
        """Add a class for `storage`, merged with those of its evicted neighbours."""
        self.label[storage] = self.labels
        self.classes[self.labels] = _Class({storage}, float(self.storages.own_s[storage]))
        self._merge({self.labels, *self._list_labels(self.list_neighbours(storage))})
        self.labels += 1

    def note_restored(self, storage: int) -> None:
        """Subtract the cost of `storage` from its class."""
        label = self.label.pop(storage)
        left = self.classes[label]
        left.cost_s -= float(self.storages.own_s[storage])
        left.members.discard(storage)
        if not left.members:
            del self.classes[label]

    def note_related(self, parent: int, child: int) -> None:
        """Merge the classes of two storages that are evicted."""
        self._merge(self._list_labels((parent, child)))

    def note_dearer(self, storage: int, seconds: float) -> None:
        """Add to the cost of the class of `storage`."""
        self.classes[self.label[storage]].cost_s += seconds

    def _list_labels(self, storages: Iterable[int]) -> set[int]:
        return {self.label[storage] for storage in storages if storage in self.label}

    def _merge(self, labels: set[int]) -> None:
        classes = self.classes
        largest, *others = sorted(labels, key=lambda label: (-classes[label].joined, label))
        into = classes[largest]
        for label in others:
            merged = classes.pop(label)
            self.label.update(dict.fromkeys(merged.members, largest))
            into.members |= merged.members
            into.joined += len(merged.members)
            into.cost_s += merged.cost_s

    def compute_neighbourhood_s(self, storages: Ints) -> Floats:
        """Return the sum over the distinct classes of the evicted neighbours of each storage."""
        return np.array([self.compute_cost_around_s(self.list_neighbours(storage)) for storage in storages.tolist()])

    def compute_cost_around_s(self, neighbours: Iterable[int]) -> float:
        """Return the cost of a storage's neighbourhood."""
        return _add_up(self.classes[label].cost_s for label in sorted(self._list_labels(neighbours)))


class CostByRegions(Cost):
    """The cost with the exact neighbourhood: storages reachable through evicted ones, upwards or in both directions."""

    def __init__(self, *, descendants: bool, stale: bool = True) -> None:
        self.descendants, self.stale = descendants, stale

    def compute_neighbourhood_s(self, storages: Ints) -> Floats:
        """Return the sum over all reachable storages; those reachable in both directions count twice, as published."""
        known = self.storages
        total = np.zeros(len(storages))
        for onward in (known.parents, *((known.children,) if self.descendants else ())):
            for i, storage in enumerate(storages.tolist()):
                total[i] += _add_up(known.own_s[self._list_reachable(storage, onward)].tolist())
        return total

    def _list_reachable(self, storage: int, onward: list[dict[int, None]]) -> list[int]:
        """Return the evicted storages that `storage` reaches through evicted ones."""
        gone = self.storages.gone
        seen, stack, found = {storage}, [storage], list[int]()
        while stack:
            for n in onward[stack.pop()]:
                if n not in seen and gone[n]:
                    stack.append(n)
                    found.append(n)
                seen.add(n)
        return found


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

    def weigh(self, storages: Ints, neighbourhood_s: Floats, now_s: float) -> Floats:
        """Return the scores of the rule."""
        known = self.storages
        below = known.size_bytes[storages] / MIB * (now_s - known.touched_s[storages] + 1e-3)
        return divide((neighbourhood_s * BYTES_PER_S + 1e-3) * 1.0001 ** known.again[storages], below)

    def compute_cost_around_s(self, neighbours: Iterable[int]) -> float:
        """Return the sum over the evicted neighbours of their class, or of themselves if they cost more."""
        evicted = [n for n in neighbours if n in self.label]
        return _add_up(max(self.classes[self.label[n]].cost_s, float(self.storages.own_s[n])) for n in evicted)
