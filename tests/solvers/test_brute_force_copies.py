"""The exact solver with transfers to the host, against all schedules of small graphs on three streams."""

import random

import pytest

from graphs.options import remove_options
from graphs.options.surroundings import Link, Surroundings
from graphs.schedule import keep_everything
from graphs.simulate import simulate
from graphs.synthetic.random_graphs import draw_graph, draw_overwriting
from planner.capture.options import apply_options
from solvers.bounds import bound_least_budget
from solvers.clock import WallClock
from solvers.highs import solve_program
from solvers.highs.program import Outcome
from solvers.problem import OBJECTIVE_SCALE, build_problem
from solvers.windows.relaxation.discretization import Discretization
from solvers.windows.relaxation.models import build_relaxation
from tests.support.solvers.answers import SLACK, Case, check_answers, check_optimum
from tests.support.solvers.brute_force import fastest
from tests.support.solvers.brute_force_transfers import fastest_with_copies

SEEDS = [
    range(50, 60),
    *(pytest.param(range(first, first + 25), marks=pytest.mark.slow) for first in range(0, 150, 25)),
    *(pytest.param(range(first, first + 100), marks=pytest.mark.slow) for first in range(1000, 4000, 100)),
]


def case(seed: int, most_ops: int) -> Case | None:
    """None where a graph offers nothing to copy, or has too many schedules to try."""
    draw = random.Random(seed)
    program = draw_graph(draw.randint(0, 10**6), draw.randint(3, most_ops))
    if draw.random() < 0.5:
        program = draw_overwriting(program, draw)
    host_bytes = draw.choice((None, None, draw.randint(3, 20)))
    rates = (1.0, 2.0, 4.0)
    link = Link(draw.choice(rates), draw.choice(rates), draw.choice((0.0, 0.0, 0.5)))
    graph = apply_options(program, ("offload",), Surroundings(link, host_bytes))
    offloads = build_problem(graph, 1).offloads
    least = bound_least_budget(graph).budget_bytes
    peak = simulate(program, keep_everything(program)).peak_bytes
    budget = max(1, least - (draw.random() < 0.2) + round((peak - least) * draw.random() ** 2))
    try:
        optimum = fastest_with_copies(graph, budget, most=100_000)
    except TimeoutError:
        return None
    return Case(seed, graph, budget, optimum) if offloads else None


def cases(seeds: range, most_ops: int) -> list[Case]:
    return [found for seed in seeds if (found := case(seed, most_ops)) is not None]


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_solve_with_offload_agrees_with_brute_force(seeds: range) -> None:
    found = cases(seeds, most_ops=4)
    assert len(found) > len(seeds) / 2
    feasible, met, copied = check_answers(found)
    # Of these graphs most are solved, and for some of them copies are what does it. In the others something goes to the host
    # and comes back at once, for only then may it be written over.
    assert met >= 0.8 * feasible
    assert copied > 0


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_relaxation_with_offload_never_exceeds_the_brute_force_optimum(seeds: range) -> None:
    """Rows 1 to 13 with everything in them. HiGHS copes with nearly all of them, and has a bound for the others too."""
    failed = 0
    for one in cases(seeds, most_ops=5):
        problem, n = build_problem(one.graph, one.budget_bytes), len(one.graph.program)
        for ends in {tuple(range(n)), tuple(sorted({n // 2, n - 1})), (n - 1,)}:
            pairs = frozenset((end, x) for end in ends for x in range(end))
            precedences = frozenset((end, x, z) for end, z in pairs for x in range(z))
            merged = frozenset((first, last) for last in ends for first in range(last))
            discretization = Discretization(ends, frozenset(range(n)), pairs, precedences, merged=merged)
            answer = solve_program(build_relaxation(problem, discretization).program, clock=WallClock(60))
            if one.optimum is not None:
                assert answer.outcome in (Outcome.OPTIMAL, Outcome.FAILED), (one.seed, ends)
                failed += answer.outcome is Outcome.FAILED
                assert one.graph.time_s * (1 + answer.bound / OBJECTIVE_SCALE) <= one.optimum[0] * (1 + SLACK) + SLACK
    assert failed <= 1


def test_the_best_of_all_schedules_is_one() -> None:
    """The judge of all others agrees with the brute force, which has clocks of its own."""
    judged = 0
    for one in cases(range(40), most_ops=4):
        if one.optimum is None:
            continue
        check_optimum(one)
        without = fastest(remove_options(one.graph), one.budget_bytes)
        assert without is None or one.optimum[0] <= without * (1 + SLACK)
        judged += 1
    assert judged > 20
