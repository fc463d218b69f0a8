"""Solvers by name. Adding a method is adding one file and one line here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from importlib import import_module
from typing import Any, Protocol

from graphs.errors import PlannerError
from graphs.ir import Graph, check_plain
from solvers.result import Progress, Result
from solvers.tolerance import Tolerance


class Solver(Protocol):
    """A function that finds a schedule of `graph` within `budget_bytes` (static bytes included).

    Keyword arguments: `tolerance` on the gap, relative to the whole step (of one that widens with time, solvers take the
    first value unless their entry says otherwise); `time_limit_s` for the whole solve; `on_progress`, called as the solve
    advances; `should_stop`, polled: once it returns True the solver ends with the best it has.
    """

    def __call__(
        self,
        graph: Graph,
        budget_bytes: int,
        *,
        tolerance: float | Tolerance = 1e-3,
        time_limit_s: float = 3600.0,
        on_progress: Callable[[Progress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Result:
        """Solve."""
        ...


@dataclass(frozen=True, slots=True)
class Entry:
    """A solver's module (imported when asked for), one line about it, and options that its `solve` is called with.

    `widens` says whether it ends by a tolerance that widens as time goes by.
    """

    module: str
    description: str
    options: Mapping[str, object] = field(default_factory=dict)
    widens: bool = False


CHEN = "solvers.policies.chen"
DTR = "solvers.policies.dtr"
MEGENGINE = "solvers.policies.megengine"
SAC = "solvers.policies.sac"

SOLVERS: dict[str, Entry] = {
    "windows": Entry(
        "solvers.windows", "optimal schedule with a proof: windows refined where memory is tight (MILP, HiGHS)", widens=True
    ),
    "store_all": Entry("solvers.policies.store_all", "keep everything: no recomputation"),
    "checkmate": Entry("solvers.checkmate", "the reference: Checkmate's program as published, for small graphs (MILP, PuLP)"),
    "rounding": Entry("solvers.rounding", "Checkmate's linear relaxation, rounded in two phases (PuLP)"),
    "checkpoint_blocks": Entry(
        "solvers.policies.checkpoint_blocks", "recompute each block's forward before its backward, blocks being what fits best"
    ),
    "chen-sqrt": Entry(CHEN, "recompute about sqrt(n) segments (Chen et al.)"),
    "chen-greedy": Entry(CHEN, "recompute segments that end after a number of bytes, searched", {"rule": "chen-greedy"}),
    "griewank": Entry("solvers.policies.griewank", "binomial checkpointing of a chain (revolve)"),
    "rotor": Entry("solvers.policies.rotor", "the optimal schedule of a chain (dynamic programme)"),
    "sac": Entry(SAC, "selective checkpointing: of the lists of matmuls, convolutions and attention the best"),
    "sac-every-second": Entry(
        SAC, "selective checkpointing: save all of these but every second matmul", {"rule": "sac-every-second"}
    ),
    "sac-attention": Entry(SAC, "selective checkpointing: save attention only", {"rule": "sac-attention"}),
    "memory-budget": Entry("solvers.policies.memory_budget", "PyTorch's Memory Budget API: a knapsack over saved bytes"),
    "dtr": Entry(DTR, "DTR online: evict by cost of the equivalence class / (bytes x staleness)"),
    "dtr-full": Entry(DTR, "DTR online, with the exact cost of the evicted neighbourhood", {"rule": "dtr-full"}),
    "dtr-local": Entry(DTR, "DTR online, with a tensor's own cost only", {"rule": "dtr-local"}),
    "lru": Entry(DTR, "online: evict what was read least recently", {"rule": "lru"}),
    "largest": Entry(DTR, "online: evict the largest", {"rule": "largest"}),
    "msps": Entry(DTR, "online: evict by cost with evicted ancestors / bytes (MSPS)", {"rule": "msps"}),
    "dtr-random": Entry(DTR, "online: evict at random", {"rule": "dtr-random"}),
    "megengine": Entry(MEGENGINE, "MegEngine online: DTR with costs by bytes and small tensors spared, settings tried"),
    "megengine-static": Entry(
        MEGENGINE, "MegEngine with the step known: by next use, settings tried", {"rule": "megengine-static"}
    ),
}


def get_solver(name: str) -> Solver:
    """The `solve` function of the solver called `name`, which refuses a graph with choices that solvers do not know.

    Raises:
        PlannerError: no such solver; names those there are.
    """
    if name not in SOLVERS:
        raise PlannerError(f"there is no solver {name!r}: choose one of {', '.join(SOLVERS)}")
    entry = SOLVERS[name]
    function = import_module(entry.module).solve
    solve: Solver = partial(function, **entry.options) if entry.options else function
    return _checked(solve, widens=entry.widens)


def _checked(solve: Solver, *, widens: bool) -> Solver:
    """`solve` for graphs that solvers know, with the first tolerance where it takes one only."""

    @wraps(solve)
    def solve_by_it(graph: Graph, budget_bytes: int, *, tolerance: float | Tolerance = 1e-3, **options: Any) -> Result:
        check_plain(graph)
        return solve(graph, budget_bytes, tolerance=tolerance if widens else Tolerance.of(tolerance).first, **options)

    return solve_by_it
