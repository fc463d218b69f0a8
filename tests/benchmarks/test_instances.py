"""The public instances: their recorded solutions are valid, by a checker that shares no code with the judge."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.instances.check import NotValidError, check
from benchmarks.instances.make import FOLDER, SYNTHETIC, TRACED, build_document, encode_steps, generate_graphs, main
from benchmarks.instances.read import list_names, read
from planner.graphs.schedule import keep_everything
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.random_graphs import draw_training_step
from tests.support.models.steps import random_schedule


def test_all_instances_exist() -> None:
    assert set(list_names()) == {*TRACED, *SYNTHETIC}
    assert sum((FOLDER / f"{name}.json.gz").stat().st_size for name in list_names()) < 2_000_000


@pytest.mark.parametrize("name", list_names())
def test_recorded_solutions_are_valid(name: str) -> None:
    instance = read(FOLDER / f"{name}.json.gz")
    assert [known.budget_bytes for known in instance.known] == sorted((k.budget_bytes for k in instance.known), reverse=True)
    for known in instance.known:
        peak_bytes, time_s = check(instance, known.steps)
        assert peak_bytes <= known.budget_bytes
        assert time_s == known.time_s >= known.bound_s >= sum(op.time_s for op in instance.ops) * (1 - 1e-9)
        assert not known.proved or time_s <= known.bound_s * (1 + 1e-4)


@pytest.mark.parametrize("name", SYNTHETIC)
def test_synthetic_instances_are_reproducible(name: str) -> None:
    ((_, graph),) = generate_graphs([name])
    with gzip.open(FOLDER / f"{name}.json.gz", "rt") as file:
        committed = json.load(file)
    assert json.loads(json.dumps(build_document(name, graph, committed["known"]))) == committed


@pytest.mark.parametrize("seed", range(20))
def test_checker_agrees_with_the_judge(seed: int, tmp_path: Path) -> None:
    graph = draw_training_step(seed, 12)
    (tmp_path / "x.json.gz").write_bytes(gzip.compress(json.dumps(build_document("x", graph, [])).encode()))
    instance = read(tmp_path / "x.json.gz")
    for schedule in (keep_everything(graph), random_schedule(graph, seed)):
        simulation = simulate(graph, schedule)
        assert check(instance, encode_steps(schedule)) == (simulation.peak_bytes, simulation.time_s)


def test_invalid_solutions_raise() -> None:
    ((_, graph),) = generate_graphs(["chain-50"])
    instance = read(FOLDER / "chain-50.json.gz")
    steps = encode_steps(keep_everything(graph))
    last = next(i for i in reversed(range(len(steps))) if steps[i] >= 0)
    wrong = {
        "reads what is not in memory": steps[1:],
        "is never executed": steps[:last],
        "frees what is not in memory": [~0, *steps],
        "is no op": [len(graph.ops), *steps],
    }
    for said, solution in wrong.items():
        with pytest.raises(NotValidError, match=said):
            check(instance, solution)


def test_reader_and_checker_need_no_package(tmp_path: Path) -> None:
    for name in ("read.py", "check.py"):
        (tmp_path / name).write_text((FOLDER / name).read_text())
    known = read(FOLDER / "chain-50.json.gz").known[0]
    (tmp_path / "solution.json").write_text(json.dumps({"steps": known.steps}))
    command = [sys.executable, "-S", tmp_path / "check.py", FOLDER / "chain-50.json.gz", tmp_path / "solution.json"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.endswith(f", {known.time_s!r} s\n") or f"{known.time_s!r} s" in ended.stdout


@pytest.mark.slow
def test_existing_instances_are_not_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--names", "chain-50", "--out", str(tmp_path), "--time-limit", "5"]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("chain-50: 100 ops, gaps 0.000%")
    assert main(words) == 0
    assert capsys.readouterr().out == ""
