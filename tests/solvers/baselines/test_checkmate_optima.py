"""The reference program: known optima, what is in memory when, how a solve ends, and its files, registry and command."""

import heapq
import math
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import highspy
import numpy as np
import pulp
import pytest

from planner.cli.main import main
from planner.graphs.errors import BudgetError, OutputError, PlannerError
from planner.graphs.io.formats import write_graph
from planner.graphs.ir import Graph
from planner.graphs.schedule import keep_everything
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.draft import Draft
from planner.graphs.synthetic.random_graphs import draw_graph, draw_training_step
from planner.graphs.synthetic.small import make_chain, make_skips, make_training_chain
from planner.graphs.synthetic.transformer import TransformerSize, transformer
from planner.plans.plan import read_plan
from planner.solvers import highs, windows
from planner.solvers.baselines import checkmate
from planner.solvers.baselines.checkmate import CheckmateParams, CheckmateProgram, solve, write_model
from planner.solvers.baselines.common.checkmate_program import MEMORY_RANGE
from planner.solvers.baselines.common.pulp_solvers import OUTCOMES
from planner.solvers.clock import WallClock
from planner.solvers.highs.program import Answer, Outcome
from planner.solvers.registry import get_solver
from planner.solvers.result import SolveProgress, Status
from tests.support.budgets import budget_at
from tests.support.graphs.small_graphs import diamond, kept_output, three_at_once, two_outputs
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
    monkeypatch.setattr(import_module("planner.solvers.baselines.common.pulp_solvers"), "HIGHS", "none")
    result = solve(ask(make_training_chain(4), 4, tolerance=1e-6))
    assert (result.status, result.time_s) == (Status.OPTIMAL, expected.time_s)
    assert result.bound_s == pytest.approx(expected.bound_s, rel=1e-5)
    infeasible = solve(ask(three_at_once(), 7))
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


def dropped_beside() -> Graph:
    """a makes x (4) and y (1); u (1) reads x; v (1, workspace 5) reads nothing; d (1) reads y and v. Times 1.

    With 6 bytes v runs alone, so that a runs again for d: beside v its outputs take 5. If its x, which
    nobody reads then, stays for the rest of the stage, d takes 7.
    """
    draft = Draft()
    x, y = draft.add_op("a", [], [4, 1])
    draft.add_op("u", [x], [1])
    (v,) = draft.add_op("v", [], [1], workspace_bytes=5)
    draft.add_op("d", [y, v], [1])
    return draft.build_graph()


def test_unused_outputs_are_freed_at_once() -> None:
    assert [solve(ask(dropped_beside(), budget)).time_s for budget in (6, 7)] == [5, 4]


def second_copy() -> Graph:
    """a makes x (3) and y (1); b (workspace 4) reads y; c reads x and y, d reads y; outputs of 1, times 1.

    With 7 bytes x does not fit beside b (y 1, b 1, workspace 4), so a runs again for c, and makes a second y if
    the first one stays: x 3, y 1, b 1 and the copy 1 are 6.
    """
    draft = Draft()
    x, y = draft.add_op("a", [], [3, 1])
    (b,) = draft.add_op("b", [y], [1], workspace_bytes=4)
    draft.add_op("c", [x, y, b], [1])
    draft.add_op("d", [y], [1])
    return draft.build_graph()


def test_an_output_made_twice_is_there_once_afterwards() -> None:
    model = CheckmateProgram(second_copy(), 7)
    model.build()
    # By hand: y stays, a runs again before c, and the second y is counted once afterwards.
    fixed = {"S_1_1": 1, "S_2_1": 1, "S_3_1": 1, "S_1_0": 0, "S_2_0": 0, "R_2_0": 1, "R_2_1": 0, "R_3_0": 0, "D_2_1": 1}
    for column, name in model.names.items():
        if name in fixed:
            model.lower[column] = model.upper[column] = fixed[name]
    values = highs.solve_program(model.build_milp(), clock=WallClock(60)).values
    assert values is not None
    used = {name: values[column] * 7 / MEMORY_RANGE for column, name in model.names.items() if name.startswith("U_2_")}
    # While a runs: y, b, x and the second y; while c runs: x, y, b and its output.
    assert used == pytest.approx({"U_2_0": 1 + 1 + 3 + 1, "U_2_1": 1 + 1 + 3, "U_2_2": 3 + 1 + 1 + 1})
    assert solve(ask(second_copy(), 7)).time_s == 5


def test_static_tensors_written_in_place_restrict_recomputation() -> None:
    def graph(*, written: bool) -> Graph:
        draft = Draft()
        state = draft.add_static("state", 1)
        (a,) = draft.add_op("a", [state], [4])
        (b,) = draft.add_op("b", [a], [1])
        (c,) = draft.add_op("c", [state], [1], recomputable=False, mutates=(state,) if written else ())
        (d,) = draft.add_op("d", [b, c], [4])
        draft.add_op("e", [a, d], [1])
        return draft.build_graph()

    # 10 bytes hold a, d and e; d runs beside a, b and c with 11, so with 10 a must be dropped and made again.
    assert solve(ask(graph(written=False), 10)).time_s == 6
    assert solve(ask(graph(written=True), 10)).status in (Status.LIMIT, Status.INFEASIBLE)
    assert solve(ask(graph(written=True), 11)).time_s == 5


ROOT = Path(__file__).parents[3]


def test_a_budget_below_the_needs_of_an_op_is_infeasible() -> None:
    result = solve(ask(two_outputs(), 6))
    assert (result.status, result.schedule, result.bound_s) == (Status.INFEASIBLE, None, None)
    assert "budget 6 B is below 7 B" in result.message


def test_an_infeasible_program_is_no_proof_for_other_schedules() -> None:
    result = solve(ask(three_at_once(), 7))
    assert (result.status, result.schedule, result.bound_s) == (Status.LIMIT, None, None)
    assert "each op at most once per stage, in program order" in result.message


def test_a_program_that_is_too_large_is_not_begun(tmp_path: Path) -> None:
    # 800 stages with up to 799 executions and hand-overs each.
    graph = make_chain(800)
    for result in (solve(ask(graph, 2)), get_solver("rounding")(ask(graph, 2))):
        assert result.status is Status.LIMIT
        assert f"has {800 * 799 // 2 + 799 * 798 // 2 + 799:,} variables R and S" in result.message
    with pytest.raises(PlannerError, match="use the solver windows"):
        write_model(graph, 2, tmp_path / "model.lp")


def test_the_size_of_the_program_is_foretold(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(10):
        model = CheckmateProgram(draw_graph(seed, 12), 1000)
        model.build()
        monkeypatch.setattr("planner.solvers.baselines.checkmate.MOST_BINARIES", len(model.R) + len(model.S) - 1)
        assert f"has {len(model.R) + len(model.S)} variables" in str(model.size.find_refusal(math.inf))
        monkeypatch.setattr("planner.solvers.baselines.checkmate.MOST_BINARIES", len(model.R) + len(model.S))
        assert model.size.find_refusal(math.inf) is None


@pytest.mark.parametrize("time_limit_s", [1e-9, 0.02])
def test_time_is_up_before_anything_is_found(time_limit_s: float) -> None:
    graph = draw_training_step(0, 40)
    result = solve(ask(graph, budget_at(graph, 0.1), time_limit_s=time_limit_s))
    assert (result.status, result.bound_s) == (Status.LIMIT, graph.time_s)
    assert "Raise the time limit" in result.message


@pytest.mark.parametrize("after", [1, 30, 60])
def test_a_stop_ends_the_solve(after: int) -> None:
    polls = 0

    def should_stop() -> bool:
        nonlocal polls
        polls += 1
        return polls > after

    graph = draw_training_step(14, 14)
    result = solve(ask(graph, budget_at(graph, 0.2), should_stop=should_stop, tolerance=0.0))
    assert result.status in (Status.LIMIT, Status.FEASIBLE)
    assert result.bound_s >= graph.time_s


def test_progress_tells_bounds_that_hold() -> None:
    told: list[SolveProgress] = []
    graph = draw_training_step(8, 8)
    result = solve(ask(graph, budget_at(graph, 0.3), on_progress=told.append))
    assert result.time_s is not None and result.bound_s is not None
    assert told[0].activity == "writing Checkmate's program"
    assert all(p.bound_s is None or p.bound_s <= result.time_s * (1 + 1e-9) for p in told)
    assert all(p.best_s is None or p.best_s >= result.bound_s * (1 - 1e-9) for p in told)
    assert any(p.best_s is not None for p in told)


def test_an_error_of_the_caller_comes_through() -> None:
    def on_progress(progress: SolveProgress) -> None:
        if progress.activity.startswith("solving"):
            raise RuntimeError("the terminal is gone")

    graph = draw_training_step(8, 8)
    with pytest.raises(RuntimeError, match="the terminal is gone"):
        solve(ask(graph, budget_at(graph, 0.3), on_progress=on_progress))


@pytest.mark.parametrize(("name", "word"), [("GLPK_CMD", "is not installed"), ("magic", "is none that PuLP knows")])
def test_a_solver_that_is_not_there_is_named(name: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulp.listSolvers", lambda onlyAvailable=False: ["HiGHS"] if onlyAvailable else ["HiGHS", "GLPK_CMD"])
    with pytest.raises(PlannerError, match=f"solver '{name}' {word}: choose one of HiGHS"):
        solve(ask(make_chain(2), 2, params=CheckmateParams(milp_solver=name)))


@pytest.mark.parametrize(
    ("value", "words"), [(0.5, "neither 0 nor 1"), (0.0, "1 B over the budget")], ids=["half a binary", "memory ignored"]
)
def test_invalid_solver_answers_are_errors(value: float, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: CheckmateProgram, *rest: object) -> Answer:
        return Answer(Outcome.OPTIMAL, np.full(len(model.cost), value), None, -math.inf, "so they say")

    monkeypatch.setattr(checkmate, "solve_model", run)
    result = solve(ask(make_training_chain(4), 4))
    assert (result.status, result.schedule) == (Status.ERROR, None)
    assert words in result.message


@pytest.mark.parametrize(
    ("outcome", "status"), [(Outcome.FAILED, Status.ERROR), (Outcome.STOPPED, Status.LIMIT), (Outcome.INFEASIBLE, Status.LIMIT)]
)
def test_every_outcome_without_a_solution_has_a_status(outcome: Outcome, status: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkmate, "solve_model", lambda *rest: Answer(outcome, None, None, -math.inf, "its own word"))
    result = solve(ask(make_training_chain(4), 4))
    assert result.status is status
    assert "its own word" in result.message


def test_every_word_of_pulp_has_an_outcome() -> None:
    pulp4 = getattr(pulp, "LpSolveStatus", None)
    words = pulp4.__members__ if pulp4 is not None else pulp.LpSolution.values()
    assert len(words) > 4 and set(words) <= set(OUTCOMES)


@pytest.mark.slow
def test_nothing_is_printed() -> None:
    """In a process of its own: HiGHS prints what it is called once in each."""
    code = (
        "from planner.graphs.synthetic.small import make_training_chain\n"
        "from planner.solvers.baselines.checkmate import solve\n"
        "from tests.support.solvers.answers import ask\n"
        "assert solve(ask(make_training_chain(4), 4)).time_s == 9.0\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize("ending", ["lp", "mps"])
def test_the_written_program_has_the_same_optimum(ending: str, tmp_path: Path) -> None:
    graph = make_training_chain(5)
    write_model(graph, 4, tmp_path / f"model.{ending}")
    engine = highspy.Highs()
    engine.setOptionValue("output_flag", False)
    assert engine.readModel(str(tmp_path / f"model.{ending}")) == highspy.HighsStatus.kOk
    engine.run()
    assert engine.getModelStatus() == highspy.HighsModelStatus.kOptimal
    recomputed_s = engine.getInfo().objective_function_value / 1000 * graph.time_s
    result = solve(ask(graph, 4, tolerance=0.0))
    assert result.time_s > graph.time_s
    assert graph.time_s + recomputed_s == pytest.approx(result.time_s)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"model.{ending}"]


def test_a_program_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match=r"must end in \.lp or \.mps"):
        write_model(diamond(), 9, tmp_path / "model.txt")
    with pytest.raises(OutputError, match="there is no folder"):
        write_model(diamond(), 9, tmp_path / "nowhere" / "model.lp")
    with pytest.raises(BudgetError, match="is below 7 B"):
        write_model(two_outputs(), 5, tmp_path / "model.lp")
    assert list(tmp_path.iterdir()) == []


def test_the_command_solves_and_writes_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph, model = tmp_path / "graph.json", tmp_path / "model.lp"
    write_graph(make_training_chain(4), graph)
    arguments = ["solve", str(graph), "--budget", "4B", "--quiet", "--write-model", str(model), "-o", str(tmp_path / "plan.json")]
    assert main([*arguments, "--solver", "checkmate"]) == 0
    capsys.readouterr()
    plan = read_plan(tmp_path / "plan.json")
    assert (plan.solver, plan.status, plan.time_s) == ("checkmate", "optimal", 9.0)
    assert plan.settings["schedules"] == "each op at most once per stage, in program order"
    assert model.read_text().startswith("\\* checkmate *\\")
    assert main(arguments) == 2
    assert "add --solver checkmate" in capsys.readouterr().err


def test_packages_of_baselines_and_reports_are_not_imported_by_training() -> None:
    imported = "sys, planner.solvers.registry, planner.cli.main, planner.train.compile.compile, planner.train.eager.session"
    code = f"import {imported}; sys.exit(bool({{'pulp', 'scipy', 'jinja2'}} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0
    assert get_solver("checkmate")(ask(make_training_chain(4), 4)).solver == "checkmate"
