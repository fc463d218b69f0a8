"""What docs/formulation.md says of the rows: all that fits solves them, and the page names every family."""

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from graphs.ir import Graph
from graphs.synthetic.random_graphs import draw_graph
from solvers.clock import WallClock
from solvers.highs import solve_program
from solvers.highs.program import Outcome
from solvers.problem import build_problem
from solvers.windows import relaxation
from solvers.windows.decoding.decode import order_of, try_out
from solvers.windows.decoding.encode import encode_order
from solvers.windows.relaxation.models import build_relaxation
from tests.support.graphs.small_graphs import random_overwriting
from tests.support.marks import slow
from tests.support.solvers.random_orders import everything, random_order, short_form

ROOT = Path(__file__).parents[3]


# In the last an op is executed twice in a window, before and after another: row 9 without D refutes it.
@pytest.mark.parametrize(
    ("make", "seed"),
    [
        *((draw_graph, seed) for seed in (*range(30), 1448)),
        *((random_overwriting, seed) for seed in range(15)),
        *slow(*((draw_graph, seed) for seed in range(30, 100))),
        *slow(*((random_overwriting, seed) for seed in range(15, 40))),
    ],
)
def test_every_schedule_in_short_form_solves_the_relaxation_at_its_budget(make: Callable[[int, int], Graph], seed: int) -> None:
    draw = random.Random(seed)
    graph = make(seed, draw.randint(3, 9))
    n = len(graph.ops)
    roomy = build_problem(graph, 10**9)
    computed = short_form(graph, random_order(draw, roomy))
    trial = try_out(roomy, order_of(roomy, computed))
    problem = build_problem(graph, trial.peak_bytes)
    some = tuple(sorted({*draw.sample(range(n), n // 2), n - 1}))
    for discretization in (everything((n - 1,)), everything(some), everything(some).split(range(n))):
        model = build_relaxation(problem, discretization)
        solution = encode_order(problem, discretization, computed)
        # What the schedule does has a variable; R, Q, S and D are fixed to it, and there are H, U, P and G that fit.
        assert {(k, i) for k, ops in enumerate(solution.recomputed) for i in ops} <= model.recomputed.keys()
        assert {(k, t) for k, handed in enumerate(solution.handed) for t in handed} <= model.handed.keys()
        program = model.program
        for (k, i), column in model.recomputed.items():
            program.lower[column] = program.upper[column] = i in solution.recomputed[k]
        for (k, t), column in model.handed.items():
            program.lower[column] = program.upper[column] = t in solution.handed[k]
        for pair, column in model.twice.items():
            program.lower[column] = program.upper[column] = pair in solution.twice
        answer = solve_program(program, clock=WallClock(60))
        assert answer.outcome is Outcome.OPTIMAL
        assert answer.objective <= problem.convert_to_units(trial.time_s - problem.base_s) + 1e-6


def test_families_of_rows_are_on_the_page() -> None:
    page = (ROOT / "docs" / "formulation.md").read_text()
    named = set(re.findall(r"`(add_\w+)`", page))
    folder = Path(relaxation.__path__[0])
    written = {name for path in folder.glob("*.py") for name in re.findall(r"^def (add_\w+)", path.read_text(), re.MULTILINE)}
    assert named == written
