"""What a heuristic is: it says which tensor a run in ``online`` evicts."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from graphs.ir import Graph, Op

if TYPE_CHECKING:
    from solvers.policies.online import Online

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Heuristic(ABC):
    """Which tensor to evict: that of least score; told what is evicted and made as it happens.

    Attributes:
        keeps_siblings: whether an op that runs again for one output leaves the others in memory as well.
    """

    keeps_siblings = True

    def spares(self, graph: Graph, t: int) -> bool:
        """Whether `t` is never evicted."""
        return False

    def estimate_s(self, graph: Graph, op: Op) -> float:
        """What the heuristic takes `op` to need."""
        return op.time_s

    def begin(self, run: "Online") -> None:
        """A run begins: nothing has been computed."""
        self.run = run

    def evicted(self, t: int) -> None:  # noqa: B027 (not all listen)
        """`t` has left memory."""

    def restored(self, t: int) -> None:  # noqa: B027
        """`t`, which was evicted, is in memory again, or has been banished."""

    @abstractmethod
    def scores(self, candidates: Ints) -> Floats:
        """The score of each of `candidates`, tensor ids."""

    def choose(self, candidates: Ints) -> int:
        """One of `candidates`: of equal scores the one that became evictable last, but of scores of 0 first."""
        scores = self.scores(candidates)
        least = scores.min()
        tied = candidates[scores == least]
        since = self.run.since[tied]
        return int(tied[since.argmin() if least == 0 else since.argmax()])
