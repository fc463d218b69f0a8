"""Small graphs with optional ops whose best schedule is known, and the models of the exact solver before them."""

from dataclasses import dataclass

from graphs.ir import Graph
from graphs.schedule import Schedule
from solvers.clock import WallClock
from solvers.highs import solve_program
from solvers.highs.program import Outcome
from solvers.problem import OBJECTIVE_SCALE, problem_of
from solvers.windows.relaxation.discretization import Discretization
from solvers.windows.relaxation.models import build_relaxation

TOLERANCE = 1e-3
SLACK = 1e-6  # what HiGHS's arithmetic may be off by


@dataclass(frozen=True)
class Case:
    """A small graph with optional ops, with round trips or without, a budget, and the best of all its schedules."""

    seed: int
    graph: Graph
    budget_bytes: int
    optimum: tuple[float, Schedule] | None


def check_models(one: Case) -> bool:
    """All rows, in windows of each place, in two, and in one, do not refute what exists.

    Returns:
        Whether something does, and with a window for each place the bound is the optimum.
    """
    problem = problem_of(one.graph, one.budget_bytes)
    every = tuple(sorted(set(problem.places.last)))
    exact = False
    for ends in {every, tuple(sorted({every[len(every) // 2], every[-1]})), every[-1:]}:
        pairs = frozenset((end, x) for end in ends for x in range(end))
        chains = frozenset((end, x, z) for end, z in pairs for x in range(z))
        spans = frozenset((first, last) for last in ends for first in range(last))
        firsts = frozenset(range(problem.ops))
        detail = Discretization(ends, firsts, pairs, chains, spans=spans, places=problem.places.last)
        answer = solve_program(build_relaxation(problem, detail).program, clock=WallClock(60))
        if one.optimum is not None:
            assert answer.outcome is Outcome.OPTIMAL, (one.seed, ends)
            bound_s = one.graph.time_s * (1 + answer.bound / OBJECTIVE_SCALE)
            assert bound_s <= one.optimum[0] * (1 + SLACK) + SLACK, (one.seed, ends)
            exact = exact or (ends == every and bound_s >= one.optimum[0] * (1 - TOLERANCE) - SLACK)
    return exact
