"""Dynamic tensor rematerialization (DTR, Kirisame et al., ICLR 2021) and the heuristics it was compared with.

The run itself is in ``common/online.py``, the choice of the evicted tensor in ``planner.solvers.online.heuristics``.

Feasibility is not monotone in the budget. A failure proves nothing.
"""

from dataclasses import asdict, dataclass

from planner.solvers.baselines.common.online import solve_online
from planner.solvers.online.heuristics import DtrRule, make_heuristic
from planner.solvers.online.ledger import Deallocation
from planner.solvers.request import Request
from planner.solvers.result import Result


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


def solve(request: Request, *, rule: str = DtrRule.DTR) -> Result:
    """Return the schedule of the run; LIMIT if it runs out of memory or thrashes.

    Args:
        request: its parameters are ``DtrParams``.
        rule: the choice of the evicted tensor; see ``DtrRule``.

    Raises:
        ValueError: no such rule.
    """
    params = request.get_params(DtrParams())
    return solve_online(
        request,
        str(rule),
        [(make_heuristic(DtrRule(rule), params.seed), {})],
        deallocation=params.deallocation,
        thrash_factor=params.thrash_factor,
        settings={"rule": str(rule), **asdict(params)},
    )
