"""The reference program in files, in the registry and in the command."""

import subprocess
import sys
from pathlib import Path

import highspy
import pytest

from graphs.errors import BudgetError, OutputError, PlannerError
from graphs.io.formats import write_graph
from graphs.synthetic.small import make_training_chain
from planner.cli.main import main
from planner.plans.plan import read_plan
from solvers.baselines.checkmate import solve, write_model
from solvers.registry import get_solver
from tests.support.graphs.small_graphs import diamond
from tests.support.solvers.answers import ask

ROOT = Path(__file__).parents[3]


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
