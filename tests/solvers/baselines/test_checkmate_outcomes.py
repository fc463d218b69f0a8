"""The reference program: how a solve ends, and what it is in files, in the registry and in the command."""

import math
import subprocess
import sys
from pathlib import Path

import highspy
import numpy as np
import pulp
import pytest

from graphs.errors import BudgetError, OutputError, PlannerError
from graphs.io.formats import write_graph
from graphs.synthetic.random_graphs import draw_graph, draw_training_step
from graphs.synthetic.small import make_chain, make_training_chain
from planner.cli.main import main
from planner.plans.plan import read_plan
from solvers.baselines import checkmate
from solvers.baselines.checkmate import CheckmateParams, CheckmateProgram, solve, write_model
from solvers.baselines.common.pulp_solvers import OUTCOMES
from solvers.highs.program import Answer, Outcome
from solvers.registry import get_solver
from solvers.result import SolveProgress, Status
from tests.support.budgets import budget_at
from tests.support.graphs.small_graphs import diamond
from tests.support.solvers.answers import ask

ROOT = Path(__file__).parents[3]


def test_a_budget_below_the_needs_of_an_op_is_infeasible() -> None:
    result = solve(ask(diamond(), 6))
    assert (result.status, result.schedule, result.bound_s) == (Status.INFEASIBLE, None, None)
    assert "budget 6 B is below 7 B" in result.message


def test_an_infeasible_program_is_no_proof_for_other_schedules() -> None:
    result = solve(ask(diamond(), 7))
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
        monkeypatch.setattr("solvers.baselines.checkmate.MOST_BINARIES", len(model.R) + len(model.S) - 1)
        assert f"has {len(model.R) + len(model.S)} variables" in str(model.size.find_refusal(math.inf))
        monkeypatch.setattr("solvers.baselines.checkmate.MOST_BINARIES", len(model.R) + len(model.S))
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
        "from graphs.synthetic.small import make_training_chain\n"
        "from solvers.baselines.checkmate import solve\n"
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
        write_model(diamond(), 5, tmp_path / "model.lp")
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


def test_pulp_is_imported_only_by_checkmate() -> None:
    code = "import sys, solvers.registry, planner.cli.main, solvers.windows; sys.exit('pulp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0
    assert get_solver("checkmate")(ask(make_training_chain(4), 4)).solver == "checkmate"
