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

from dataclasses import asdict, dataclass
from enum import StrEnum

from solvers.policies.deallocation import Deallocation
from solvers.policies.heuristic import Heuristic
from solvers.policies.heuristics import Cost, CostByClasses, CostByRegions, Largest, LeastRecentlyUsed, Random
from solvers.policies.online_result import online_result
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
