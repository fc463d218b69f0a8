"""Curves: monotone, judged, the same however they are computed, and interrupted without a trace."""

import json
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphs import synthetic
from graphs.errors import BudgetError, PlannerError
from graphs.io.formats import write_graph
from graphs.ir import Graph
from graphs.simulate import simulate
from planner import options
from planner.cli.main import main
from planner.studies.curve import Curve, curve, evenly, outside_in
from solvers.policies.store_all import store_all
from solvers.registry import SOLVERS, Entry
from solvers.request import Request
from solvers.result import Result, Status

ROOT = Path(__file__).parents[3]
PATIENCE_S = 120.0


def chain_of_six() -> Graph:
    """``training_chain(6)`` with tensors of a kilobyte: a peak of 7000 bytes, a least budget of 3000."""
    graph = synthetic.training_chain(6)
    return replace(graph, tensors=tuple(replace(tensor, size_bytes=1000) for tensor in graph.tensors))


def judged(graph: Graph, found: Curve) -> None:
    """Every row keeps its promises, and from one to the next neither time nor bound rises."""
    for point in found.points:
        if point.schedule is not None:
            simulation = simulate(graph, point.schedule)
            assert (simulation.time_s, simulation.peak_bytes) == (point.time_s, point.peak_bytes)
            assert simulation.peak_bytes <= point.budget_bytes
            assert point.bound_s is not None and point.bound_s <= simulation.time_s * (1 + 1e-9)
    for smaller, larger in zip(found.points, found.points[1:], strict=False):
        assert smaller.budget_bytes < larger.budget_bytes
        if smaller.time_s is not None:
            assert larger.time_s is not None and larger.time_s <= smaller.time_s
        if smaller.bound_s is not None:
            assert larger.bound_s is not None and larger.bound_s <= smaller.bound_s


def test_a_curve_of_known_optima_runs_from_the_least_budget_to_the_peak() -> None:
    graph = chain_of_six()
    found = curve(graph, 5)
    judged(graph, found)
    assert found.complete
    assert found.least is not None and found.least.exact
    # 12 ops; with 3 kB 10 executions more, with 6 kB 1 more, from 7 kB on none.
    assert [point.budget_bytes for point in found.points] == [3000, 4000, 5000, 6000, 7000]
    assert [point.status for point in found.points] == [Status.OPTIMAL] * 5
    assert (found.points[0].time_s, found.points[3].time_s, found.points[4].time_s) == (22, 13, 12)
    assert found.points[4].seconds is None
    assert found.overhead(found.points[3].time_s) == pytest.approx(1 / 12)


def test_processes_find_what_one_process_finds() -> None:
    graph = chain_of_six()
    here, there = curve(graph, 5), curve(graph, 5, jobs=2)
    judged(graph, there)
    assert [(p.budget_bytes, p.status) for p in there.points] == [(p.budget_bytes, p.status) for p in here.points]
    for one, other in zip(here.points, there.points, strict=True):
        assert one.time_s == pytest.approx(other.time_s, rel=2e-3)


@given(seed=st.integers(0, 10**6), ops=st.integers(3, 14))
def test_curves_of_random_graphs_keep_their_promises(seed: int, ops: int) -> None:
    graph = synthetic.random_graph(seed, ops)
    peak_bytes = simulate(graph, store_all(graph)).peak_bytes
    judged(graph, curve(graph, sorted({max(1, peak_bytes * share // 100) for share in (50, 70, 80, 90, 100)}), time_limit_s=5.0))


def scripted(monkeypatch: pytest.MonkeyPatch, answers: Callable[[Graph, int], Result]) -> list[int]:
    """A solver called "scripted"; returns the budgets it is asked for."""
    asked: list[int] = []

    def solve(request: Request) -> Result:
        asked.append(request.budget_bytes)
        return answers(request.graph, request.budget_bytes)

    module = types.ModuleType("scripted")
    module.solve = solve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "scripted", module)
    monkeypatch.setitem(SOLVERS, "scripted", Entry("scripted", "answers as told"))
    return asked


def test_what_one_budget_teaches_holds_at_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(graph: Graph, budget_bytes: int) -> Result:
        if budget_bytes == 4:
            return Result(graph, 4, Status.INFEASIBLE, None, None, "scripted", 1.0, message="said to be too small")
        return Result(graph, budget_bytes, Status.LIMIT, None, 12.5, "scripted", 1.0, message="no time")

    asked = scripted(monkeypatch, answers)
    found = curve(synthetic.training_chain(6), ["2B", 3, 4, 6, "100%"], solver="scripted")
    # Keeping everything settles the peak of 7 before anything is solved; that 4 is too small settles 3.
    assert asked == [2, 4, 6]
    assert found.complete
    limit, infeasible, optimal = Status.LIMIT, Status.INFEASIBLE, Status.OPTIMAL
    assert [point.status for point in found.points] == [infeasible, infeasible, infeasible, limit, optimal]
    assert [point.bound_s for point in found.points] == [None, None, None, 12.5, 12.0]
    assert [point.time_s for point in found.points] == [None, None, None, None, 12.0]


def test_a_schedule_for_less_serves_more(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = synthetic.training_chain(6)
    five = curve(graph, [5]).points[0]

    def answers(graph: Graph, budget_bytes: int) -> Result:
        if budget_bytes == 5:
            return Result(graph, 5, Status.FEASIBLE, five.schedule, 12.0, "scripted", 1.0)
        return Result(graph, budget_bytes, Status.LIMIT, None, 13.0, "scripted", 1.0, message="no time")

    scripted(monkeypatch, answers)
    found = curve(graph, [5, 6], solver="scripted")
    judged(graph, found)
    assert [point.time_s for point in found.points] == [five.time_s, five.time_s]
    assert [point.bound_s for point in found.points] == [13.0, 13.0]


def test_a_solver_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = synthetic.training_chain(6)
    scripted(monkeypatch, lambda g, b: Result(g, b, Status.ERROR, None, None, "scripted", 1.0, message="out of luck"))
    with pytest.raises(PlannerError, match="the solver scripted failed: out of luck"):
        curve(graph, [5], solver="scripted")


def test_a_stopped_curve_keeps_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = synthetic.training_chain(6)
    asked = scripted(monkeypatch, lambda g, b: Result(g, b, Status.LIMIT, None, 12.0, "scripted", 1.0, message="no time"))
    found = curve(graph, [4, 5, 6, 7], solver="scripted", should_stop=lambda: bool(asked))
    assert len(asked) == 1
    assert not found.complete
    assert found.points[-1].status is Status.OPTIMAL
    assert [point.status for point in found.points[:-1]] == [Status.LIMIT] * 3


def test_budgets_are_spread_evenly_and_solved_from_the_ends() -> None:
    assert evenly(3, 9, 4) == (3, 5, 7, 9)
    assert evenly(3, 9, 1) == (3,)
    assert evenly(5, 5, 10) == (5,)
    assert evenly(5, 7, 10) == (5, 6, 7)
    for count in range(12):
        assert sorted(outside_in(count)) == list(range(count))
    assert list(outside_in(5)) == [4, 0, 2, 3, 1]


@pytest.mark.parametrize(("budgets", "error"), [([], BudgetError), (0, BudgetError), (["8"], BudgetError), ([0], BudgetError)])
def test_what_is_no_budget_is_refused(budgets: Any, error: type[PlannerError]) -> None:
    with pytest.raises(error, match="budget"):
        curve(synthetic.training_chain(4), budgets)


def test_the_option_is_a_number_or_a_list() -> None:
    assert options.budgets("10") == 10
    assert options.budgets("90%, 8GB") == ("90%", "8GB")


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.json"
    write_graph(chain_of_six(), path)
    return path


def test_the_command_prints_writes_and_draws(graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, figure = tmp_path / "c.csv", tmp_path / "c.png"
    arguments = ["curve", str(graph_file), "--budgets", "4", "--jobs", "1", "-o", str(table), "--plot", str(figure)]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[0].split() == ["budget", "%", "of", "peak", "overhead", "bound", "gap", "seconds", "status"]
    assert out.count("optimal") == 4
    assert "least feasible budget" in out
    assert figure.read_bytes().startswith(b"\x89PNG")
    rows = pd.read_csv(table, dtype={"budget_bytes": int, "overhead": float, "status": str})
    assert list(rows["status"]) == ["optimal"] * 4
    assert main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["complete"]
    assert [point["budget_bytes"] for point in data["points"]] == list(rows["budget_bytes"])
    assert rows["overhead"].iloc[0] == pytest.approx(data["points"][0]["overhead"], abs=2e-3)
    assert rows["overhead"].iloc[-1] == 0


def test_no_budget_that_anything_fits_is_exit_code_3(graph_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curve", str(graph_file), "--budgets", "1B,2B"]) == 3
    assert capsys.readouterr().out.count("infeasible") == 2


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["--budgets", "8"], 0, "least feasible"),
        (["--budgets", "0"], 2, "'0' is not a whole number"),
        (["--budgets", "8GB,9"], 2, "has no unit"),
        (["--jobs", "0"], 2, "--jobs"),
        (["--plot", "{folder}/c.sing"], 1, "does not end in a format of figures"),
        (["--plot", "{folder}/none/c.png"], 1, "there is no folder"),
        (["-o", "{folder}/none/c.csv"], 1, "there is no folder"),
    ],
)
def test_options_are_refused_in_one_line(
    arguments: list[str], code: int, word: str, graph_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["curve", str(graph_file), "--jobs", "1", *(a.format(folder=graph_file.parent) for a in arguments)]) == code
    out, err = capsys.readouterr()
    assert word in (err if code else out)
    assert err.count("\n") == (1 if code else 0)
    assert sorted(graph_file.parent.iterdir()) == [graph_file]


def test_the_command_imports_no_torch(graph_file: Path) -> None:
    code = (
        "import sys; from planner.cli.main import main; c = main(sys.argv[1:]); print(*sys.modules, file=sys.stderr); sys.exit(c)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, "curve", graph_file, "--budgets", "3", "--jobs", "1"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == 0, ended.stderr
    assert not {"torch", "pandas", "matplotlib"} & set(ended.stderr.split())


ENDLESS = """
import os, time
from pathlib import Path
from solvers.policies import store_all

FOLDER = Path(__file__).parent

def solve(request):
    (FOLDER / f"{os.getpid()}.started").touch()
    while not request.interrupted():
        time.sleep(0.01)
    return store_all.solve(request)
"""

WITH_ENDLESS_SOLVER = """
import sys
folder, *arguments = sys.argv[1:]
sys.path.insert(0, folder)
from solvers.registry import SOLVERS, Entry
SOLVERS["endless"] = Entry("endless", "never ends by itself")
if __name__ == "__main__":
    from planner.cli.main import main
    sys.exit(main(arguments))
"""


def waiting(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not Path(f"/proc/{pid}/stat").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


@pytest.mark.parametrize("signals", ["one", "many"])
def test_an_interrupted_curve_answers_and_leaves_no_process(signals: str, graph_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "solver"
    folder.mkdir()
    (folder / "endless.py").write_text(ENDLESS)
    (folder / "run.py").write_text(WITH_ENDLESS_SOLVER)
    process = subprocess.Popen(
        [sys.executable, folder / "run.py", folder, "curve", graph_file, "--solver", "endless", "--budgets", "70%,80%,90%,100%"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    waiting(lambda: len(list(folder.glob("*.started"))) == 2 or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    pids = [int(path.stem) for path in folder.glob("*.started")]
    # As a terminal does: to the whole group.
    while process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        if signals == "one":
            break
        time.sleep(0.02)
    out, err = process.communicate(timeout=PATIENCE_S)
    if signals == "one":
        assert process.returncode == 0, err
        assert "stopped before every budget had its turn" in out
        assert out.count("optimal") == 1
        assert err.startswith("planner: interrupted: ending with")
        assert err.count("\n") == 1
    else:
        # At the second the process ends at once, unless it had ended already.
        assert process.returncode in (0, 130)
        assert "Traceback" not in err
    waiting(lambda: not any(map(alive, pids)))
