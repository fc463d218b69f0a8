"""The reference program: known optima, agreement with all schedules and with the exact solver."""

import heapq
from importlib import import_module

import pulp
import pytest

from graphs.ir import Graph
from graphs.schedule import keep_everything
from graphs.simulate import simulate
from graphs.synthetic.random_graphs import draw_graph, draw_training_step
from graphs.synthetic.small import make_chain, make_skips, make_training_chain
from graphs.synthetic.transformer import TransformerSize, transformer
from solvers import windows
from solvers.baselines.checkmate import CheckmateParams, solve
from solvers.result import Status
from tests.support.budgets import budget_at
from tests.support.graphs.small_graphs import diamond, kept_output
from tests.support.marks import slow
from tests.support.solvers.answers import KNOWN_OPTIMA, ask
from tests.support.solvers.brute_force import fastest, may_repeat

TOLERANCE = 1e-3

CBC = pytest.mark.filterwarnings("ignore:PULP_CBC_CMD:DeprecationWarning")


@pytest.mark.parametrize(("graph", "budget", "optimum_s"), [*KNOWN_OPTIMA, (make_training_chain(6), 3, 12 + 5 * 4 // 2)])
def test_known_optima(graph: Graph, budget: int, optimum_s: float) -> None:
    result = solve(ask(graph, budget, tolerance=1e-6))
    assert result.status is Status.OPTIMAL
    assert result.time_s == pytest.approx(optimum_s)
    assert result.bound_s == pytest.approx(optimum_s, rel=1e-5)


@CBC
@pytest.mark.parametrize(
    "graph", [make_chain(1), make_training_chain(4), diamond(), kept_output()], ids=["one", "chain", "diamond", "kept"]
)
def test_another_solver_finds_the_same(graph: Graph) -> None:
    name = next((name for name in ("PULP_CBC_CMD", "COIN_CMD") if name in pulp.listSolvers(onlyAvailable=True)), None)
    if name is None:
        pytest.skip("no CBC, which PuLP 3 has in its wheel, and PuLP 4 with pip install 'pulp[cbc]'")
    budget = simulate(graph, keep_everything(graph)).peak_bytes - 1 if len(graph.ops) > 1 else 1
    highs, cbc = (solve(ask(graph, budget, tolerance=1e-6, params=CheckmateParams(milp_solver=each))) for each in ("HiGHS", name))
    assert (highs.status, cbc.status) == (Status.OPTIMAL, Status.OPTIMAL)
    assert cbc.time_s == pytest.approx(highs.time_s)
    assert cbc.bound_s == pytest.approx(highs.bound_s, rel=1e-5)
    assert (cbc.settings["milp_solver"], "highs" in cbc.versions) == (name, False)


def test_highs_without_callbacks_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = solve(ask(make_training_chain(4), 4, tolerance=1e-6))
    monkeypatch.setattr(import_module("solvers.baselines.common.pulp_solvers"), "HIGHS", "none")
    result = solve(ask(make_training_chain(4), 4, tolerance=1e-6))
    assert (result.status, result.time_s) == (Status.OPTIMAL, expected.time_s)
    assert result.bound_s == pytest.approx(expected.bound_s, rel=1e-5)
    infeasible = solve(ask(diamond(), 7))
    assert (infeasible.status, infeasible.schedule) == (Status.LIMIT, None)
    assert "Checkmate's program is infeasible" in infeasible.message


def fastest_in_stages(graph: Graph, budget_bytes: int) -> float | None:
    """Time of the fastest schedule of the program's class, found without it; None if none fits.

    A state is the stage, the last op executed in it, and which tensors are in memory.
    """
    size = [0 if t.static else t.size_bytes for t in graph.tensors]
    start = (0, -1, frozenset[int]())
    spent = {start: 0.0}
    queue = [(0.0, 0, start)]
    while queue:
        time_s, _, state = heapq.heappop(queue)
        stage, last, live = state
        if stage == len(graph.ops):
            return time_s
        used_bytes = graph.static_bytes + sum(size[t] for t in live)
        after = [(0.0, (stage, last, live - {t})) for t in live - graph.kept]
        for op in graph.ops[last + 1 : stage + 1]:
            reads = {t for t in op.inputs if not graph.tensors[t].static}
            need_bytes = used_bytes + sum(size[t] for t in op.outputs) + op.workspace_bytes
            if reads <= live and need_bytes <= budget_bytes and (op.id == stage or may_repeat(graph, op.id, stage)):
                where = (stage + 1, -1) if op.id == stage else (stage, op.id)
                after.append((op.time_s, (*where, live | set(op.outputs))))
        for more_s, reached in after:
            if time_s + more_s < spent.get(reached, float("inf")):
                spent[reached] = time_s + more_s
                heapq.heappush(queue, (time_s + more_s, len(spent), reached))
    return None


def test_checkmate_equals_brute_force_over_stages() -> None:
    outside = inside = 0
    for seed in range(40):
        graph = draw_graph(seed, 5)
        for share in (0.0, 0.4, 0.8):
            budget = budget_at(graph, share)
            optimum_s, overall_s = fastest_in_stages(graph, budget), fastest(graph, budget)
            result = solve(ask(graph, budget, tolerance=0.0))
            if optimum_s is None:
                assert result.status is Status.LIMIT
            else:
                assert result.status is Status.OPTIMAL
                assert result.time_s == pytest.approx(optimum_s)
                inside += 1
            outside += overall_s != optimum_s
    assert inside > 80
    # Of some graphs every schedule that fits is outside the class, or the fastest is.
    assert outside > 0


@pytest.mark.parametrize(
    ("graph", "share"),
    [
        (draw_training_step(8, 8), 0.5),
        (make_skips(8), 0.2),
        (make_training_chain(12), 0.6),
        *slow(
            (draw_training_step(14, 14), 0.8),
            (draw_training_step(1, 12), 0.4),
            (draw_training_step(2, 20), 0.8),
            (draw_training_step(3, 29), 0.85),
            (transformer(TransformerSize(layers=1)), 0.5),
        ),
    ],
    ids=["17 ops", "skips", "chain", "29 ops", "25 ops", "41 ops", "59 ops", "transformer"],
)
def test_training_steps_agree_with_the_exact_solver(graph: Graph, share: float) -> None:
    request = ask(graph, budget_at(graph, share), tolerance=TOLERANCE, time_limit_s=600.0)
    exact, reference = windows.solve(request), solve(request)
    assert (exact.status, reference.status) == (Status.OPTIMAL, Status.OPTIMAL)
    # What is a bound over all schedules is one over the reference's, too.
    assert exact.bound_s <= reference.time_s * (1 + 1e-9)
    assert reference.time_s == pytest.approx(exact.time_s, rel=TOLERANCE)
