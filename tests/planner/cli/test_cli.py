"""The command: what it prints where, its exit codes, and what it leaves behind when interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from graphs.errors import PlannerError
from graphs.io.formats import read_graph, read_plan, write_graph
from graphs.ir import Graph, Op, Phase, Tensor
from graphs.simulate import simulate
from planner.cli.main import build_parser
from planner.models.workload import parse_spec
from tests.support.budgets import between
from tests.support.command import FakeReport, call, refused

ROOT = Path(__file__).parents[3]
PATIENCE_S = 120.0
COMMANDS = ["trace", "solve", "run", "info"]


def chain() -> Graph:
    """Six ops forward and six backward, each of which reads what its counterpart has read."""
    tensors, ops = [Tensor(0, "x", 1000, ())], []
    for i in range(12):
        forward = i < 6
        inputs = (i,) if forward else (i, 11 - i)
        tensors.append(Tensor(i + 1, f"t{i}", 1000, (i,)))
        ops.append(Op(i, f"op{i}", "example", inputs, (i + 1,), 0.001, phase=Phase.FORWARD if forward else Phase.BACKWARD))
    return Graph(tuple(ops), tuple(tensors), frozenset({12}), {"model": "chain", "device": "cpu"})


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.json"
    write_graph(chain(), path)
    return path


def command(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "planner", *map(str, arguments)],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=PATIENCE_S,
        **options,
    )


# --- help, usage, imports -------------------------------------------------------------------------


def test_every_command_has_help_with_an_example_that_parses(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        said = call(capsys, name, "--help")
        assert said.code == 0
        examples = [line.split() for line in said.out.splitlines() if line.startswith(f"  planner {name} ")]
        assert examples
        for words in examples:
            assert build_parser().parse_args(words[1:]).command == name
    overview = call(capsys, "--help")
    assert overview.code == 0
    assert all(f"    {name} " in overview.out for name in COMMANDS)


def test_the_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    said = call(capsys, "--version")
    assert said.code == 0
    assert f'version = "{said.out.split()[1]}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "name a command"),
        (["sing"], "sing"),
        (["solve"], "--budget"),
        (["solve", "model.json"], "--budget"),
        (["solve", "model.json", "--budget", "8"], "has no unit: write 8GB"),
        (["solve", "model.json", "--budget", "8GB", "--solver", "magic"], "windows"),
        (["solve", "model.json", "--budget", "8GB", "--time-limit", "soon"], "'soon' is not a time above 0"),
        (["solve", "model.json", "--budget", "8GB", "--tolerance", "-x"], "expected one argument"),
        (["solve", "model.json", "--budget", "8GB", "--tolerance", "-1"], "'-1' is not a fraction"),
        (["trace", "zoo:mlp"], "-o/--output"),
        (["trace", "mlp", "-o", "x"], "zoo:NAME or path/to/file.py:function"),
        (["trace", "zoo:mlp", "-o", "x", "--device", "tpu"], "tpu"),
        (["trace", "zoo:mlp", "-o", "x", "--device", "cuda", "--roofline", "h200"], "not allowed with"),
        (["trace", "zoo:mlp", "-o", "x", "--passes", "0"], "'0' is not a whole number"),
        (["run", "plan.json"], "--model"),
        (["info"], "FILE"),
    ],
)
def test_usage_errors_are_one_line_that_names_the_help(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(call(capsys, *arguments), 2, word, "--help)")


def imported_by(*arguments: object) -> set[str]:
    code = (
        "import sys; from planner.cli.main import main; c = main(sys.argv[1:]); print(*sys.modules, file=sys.stderr); sys.exit(c)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, text=True, capture_output=True, timeout=PATIENCE_S
    )
    assert ended.returncode == 0, ended.stderr
    return set(ended.stderr.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        *([name, "--help"] for name in COMMANDS),
        ["info", "{graph}"],
        ["solve", "{graph}", "--budget", "60%", "-o", "{folder}/plan.json"],
    ],
    ids=" ".join,
)
def test_what_needs_no_model_imports_no_torch(arguments: list[str], graph_file: Path) -> None:
    modules = imported_by(*(word.format(graph=graph_file, folder=graph_file.parent) for word in arguments))
    assert "planner.cli.main" in modules
    assert not {"torch", "pandas", "matplotlib"} & modules
    if "--help" in arguments or "--version" in arguments:
        assert not {"numpy", "scipy", "highspy", "rich"} & modules


# --- info -----------------------------------------------------------------------------------------


def test_info_shows_a_graph(graph_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = call(capsys, "info", graph_file)
    assert (said.code, said.err) == (0, "")
    for words in (
        "model",
        "chain",
        "forward 6 ms, backward 6 ms",
        "static memory  1.00 kB",
        "without recomputation",
        "least budget",
    ):
        assert words in said.out
    data = json.loads(call(capsys, "info", graph_file, "--json").out)
    graph = chain()
    assert data["holds"] == "graph"
    assert data["ops"] == 12
    assert data["fingerprint"] == graph.fingerprint
    assert data["static_bytes_by_kind"] == {"activation": 1000}
    assert data["least_budget_op"] in {op.name for op in graph.ops}
    assert len(data["largest_ops"]) == len(data["largest_tensors"]) == 10
    assert data["largest_ops"][0]["total_bytes"] == 3000


def test_info_shows_a_plan(graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_file = tmp_path / "plan.json"
    assert call(capsys, "solve", graph_file, "--budget", "60%", "-o", plan_file).code == 0
    said = call(capsys, "info", plan_file)
    assert (said.code, said.err) == (0, "")
    assert "chain" in said.out
    assert "windows" in said.out
    data = json.loads(call(capsys, "info", plan_file, "--json").out)
    assert data["holds"] == "plan"
    assert data["graph"]["fingerprint"] == chain().fingerprint
    assert data["steps"] == len(read_plan(plan_file).schedule.steps)


def test_names_cannot_drive_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    op = Op(0, "a\x1b[31m\nb", "t", (), (0,), 1.0, module="m\r")
    path = tmp_path / "model.json"
    write_graph(Graph((op,), (Tensor(0, "t\x07", 5, (0,)),), frozenset(), {"model": "x\ty"}), path)
    said = call(capsys, "info", path)
    assert said.code == 0
    assert all(line.isprintable() for line in said.out.splitlines())


# --- solve ----------------------------------------------------------------------------------------


def test_solve_writes_a_plan_that_fits(graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_file = tmp_path / "plan.json"
    said = call(capsys, "solve", graph_file, "--budget", "70%", "-o", plan_file)
    assert (said.code, said.err) == (0, "")
    for words in (
        "budget",
        "70.00% of the",
        "predicted peak",
        "overhead",
        "bound",
        "gap",
        "%, tolerance 0.1%",
        "optimal, by windows",
        f"written to {plan_file}",
    ):
        assert words in said.out
    plan, graph = read_plan(plan_file), read_graph(graph_file)
    simulation = simulate(graph, plan.schedule)
    assert plan.graph.fingerprint == graph.fingerprint
    assert plan.budget_bytes == int(0.7 * plan.graph.store_all_peak_bytes)
    assert simulation.peak_bytes == plan.peak_bytes <= plan.budget_bytes
    assert simulation.time_s == plan.time_s
    assert simulation.recomputed > 0
    assert plan.settings["tolerance"] == 0.001


def test_solve_prints_json_and_writes_only_on_request(graph_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = call(capsys, "solve", graph_file, "--budget", "100%", "--solver", "store_all", "--json", "--quiet")
    assert (said.code, said.err) == (0, "")
    data = json.loads(said.out)
    assert (data["status"], data["output"], data["recomputed"]) == ("optimal", None, 0)
    assert data["overhead"] == pytest.approx(0, abs=1e-12)
    assert data["gap"] == pytest.approx(0, abs=1e-12)
    assert data["predicted_peak_bytes"] == data["budget_bytes"]
    assert list(graph_file.parent.iterdir()) == [graph_file]


def test_solve_says_when_nothing_fits(graph_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(call(capsys, "solve", graph_file, "--budget", "2kB"), 3, "budget 2.00 kB is below", "op 'op", "Raise --budget")
    limit = call(capsys, "solve", graph_file, "--budget", "90%", "--solver", "store_all")
    refused(limit, 4, "keeping everything needs")
    assert list(graph_file.parent.iterdir()) == [graph_file]


def test_solve_refuses_before_it_starts(graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = graph_file.read_text()
    for output, word in [
        (graph_file, "is the graph itself"),
        (tmp_path, "is a folder"),
        (tmp_path / "none" / "plan.json", "there is no folder"),
    ]:
        refused(call(capsys, "solve", graph_file, "--budget", "1B", "-o", output), 1, str(output), word)
    assert graph_file.read_text() == before
    assert list(tmp_path.iterdir()) == [graph_file]


@pytest.mark.parametrize("name", ["info", "solve"])
def test_a_broken_file_is_one_line(name: str, graph_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph_file.write_text(graph_file.read_text()[:300])
    more = ["--budget", "60%"] if name == "solve" else []
    refused(call(capsys, name, graph_file, *more), 1, f"{graph_file}: the file is cut short")
    refused(call(capsys, name, graph_file.parent / "none.json", *more), 1, "there is no such file")


def test_solve_wants_a_graph_and_run_a_plan(graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_file = tmp_path / "plan.json"
    assert call(capsys, "solve", graph_file, "--budget", "100%", "-o", plan_file).code == 0
    refused(call(capsys, "solve", plan_file, "--budget", "60%"), 1, "holds a plan, but a graph is expected")
    refused(call(capsys, "run", graph_file, "--model", "zoo:mlp"), 1, "holds a graph, but a plan is expected")


def test_a_message_of_many_lines_is_printed_in_one(
    graph_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PlannerError("one\ntwo")

    monkeypatch.setattr("planner.solving.solve", fail)
    refused(call(capsys, "solve", graph_file, "--budget", "60%"), 1, "one two")


# --- trace and run --------------------------------------------------------------------------------


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """In place of the module that traces and runs, one that notes what it is asked for."""
    import planner

    module = types.ModuleType("planner.api")
    module.calls = []  # type: ignore[attr-defined]

    def trace(*workload: object, **options: object) -> Graph:
        module.calls.append((len(workload), options))
        return chain()

    def run(plan: object, *workload: object, **options: object) -> FakeReport:
        module.calls.append((len(workload), options))
        return FakeReport(identical=options["seed"] == 0, differences=() if options["seed"] == 0 else ("gradient of 'w'",))

    module.trace, module.run = trace, run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "planner.api", module)
    monkeypatch.setattr(planner, "api", module, raising=False)
    return module


TINY = "zoo:mlp,batch=2,layers=1,width=4,classes=3"


def test_trace_passes_its_options_on(api: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.json"
    said = call(capsys, "trace", TINY, "-o", path, "--optimizer", "adamw", "--accumulate", "--roofline", "h200", "--passes", "3")
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith(f"{path}: 12 ops, 13 tensors, step time 12 ms")
    assert read_graph(path) == chain()
    assert api.calls == [
        (3, {"optimizer": "adamw", "accumulate": True, "roofline": "h200", "passes": 3, "name": TINY}),
    ]
    data = json.loads(call(capsys, "trace", TINY, "-o", path, "--json").out)
    assert data["ops"] == 12
    assert data["output"] == str(path)
    assert api.calls[1][1] == {"optimizer": "none", "accumulate": False, "roofline": None, "passes": 5, "name": TINY}


def test_trace_refuses_before_it_builds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(call(capsys, "trace", "zoo:none", "-o", tmp_path / "none" / "model.json"), 1, "there is no folder")
    refused(call(capsys, "trace", "zoo:none", "-o", tmp_path / "model.json"), 1, "'none'", "gpt2")
    refused(call(capsys, "trace", "none.py:build", "-o", tmp_path / "model.json"), 1, "none.py is not there")
    assert list(tmp_path.iterdir()) == []


def test_run_reports_and_has_a_code_for_gradients_that_differ(
    api: Any, graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_file = tmp_path / "plan.json"
    assert call(capsys, "solve", graph_file, "--budget", "100%", "-o", plan_file).code == 0
    same = call(capsys, "run", plan_file, "--model", TINY, "--repeats", "2")
    assert (same.code, same.err) == (0, "")
    for words in (
        "1.99 kB   1.98 kB",
        "11 ms     12 ms",
        "1.1000    1.2000",
        "within the budget of 2.00 kB",
        "identical to keeping",
    ):
        assert words in same.out
    assert api.calls == [(3, {"repeats": 2, "seed": 0})]
    other = call(capsys, "run", plan_file, "--model", TINY, "--seed", "1")
    assert other.code == 6
    assert "DIFFERENT from keeping everything:\n  gradient of 'w'" in other.out
    data = json.loads(call(capsys, "run", plan_file, "--model", TINY, "--json").out)
    assert (data["identical"], data["measured_peak_bytes"], data["differences"]) == (True, 1980, [])


@pytest.mark.parametrize(
    "model", [f"{ROOT}/examples/own_model.py:build,batch=256,width=32,depth=3", "zoo:mlp,batch=256,layers=6,width=32,classes=16"]
)
def test_from_a_model_to_a_measured_step(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph_file, plan_file = tmp_path / "model.json", tmp_path / "plan.json"
    assert call(capsys, "trace", model, "-o", graph_file, "--passes", "2").code == 0
    assert call(capsys, "info", graph_file).code == 0
    assert read_graph(graph_file).provenance["model"] == str(parse_spec(model))
    budget = f"{between(read_graph(graph_file))}B"
    assert call(capsys, "solve", graph_file, "--budget", budget, "-o", plan_file).code == 0
    ran = call(capsys, "run", plan_file, "--model", model, "--repeats", "2", "--json")
    assert ran.code == 0, ran.err
    data = json.loads(ran.out)
    assert data["identical"]
    assert data["measured_peak_bytes"] <= data["budget_bytes"]
    assert read_plan(plan_file).overhead > 0
    other = model.replace("batch=256", "batch=128")
    refused(call(capsys, "run", plan_file, "--model", other), 1, "the plan is for another graph", "128")


def test_a_model_of_any_size_is_traced_for_a_device_that_is_not_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph_file = tmp_path / "model.json"
    model = "zoo:mlp,layers=2,width=200000,batch=4096,classes=8"
    assert call(capsys, "trace", model, "-o", graph_file, "--roofline", "h200", "--optimizer", "adamw").code == 0
    graph = read_graph(graph_file)
    assert graph.static_bytes > 900 * 10**9  # two layers of 160 GB, and twice that for AdamW
    assert graph.static_bytes_by_kind["optimizer_state"] == 2 * graph.static_bytes_by_kind["parameter"]
    assert graph.time_s > 0
    assert call(capsys, "solve", graph_file, "--budget", "99%").code == 3


# --- interruptions, pipes -------------------------------------------------------------------------

WITH_ENDLESS_SOLVER = """
import sys, time, types
from pathlib import Path
from planner.cli.main import main
from solvers.policies import store_all
from solvers.registry import SOLVERS, Entry

marker, listens, *arguments = sys.argv[1:]

def solve(request):
    Path(marker).touch()
    while not (listens == "listens" and request.interrupted()):
        time.sleep(0.01)
    return store_all.solve(request)

module = types.ModuleType("endless")
module.solve = solve
sys.modules["endless"] = module
SOLVERS["endless"] = Entry("endless", "never ends by itself")
sys.exit(main(arguments))
"""


def start(marker: Path, *arguments: object) -> "subprocess.Popen[str]":
    """A process, once it has made the file `marker`."""
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + PATIENCE_S
    while not marker.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"it did not start: {process.communicate()}")
        time.sleep(0.01)
    return process


def test_an_interrupted_solve_answers_with_what_it_has(graph_file: Path, tmp_path: Path) -> None:
    marker, plan_file = tmp_path / "started", tmp_path / "plan.json"
    process = start(
        marker,
        *("-c", WITH_ENDLESS_SOLVER, marker, "listens"),
        *("solve", graph_file, "--budget", "100%", "--solver", "endless", "-o", plan_file),
    )
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert f"written to {plan_file}" in out
    assert err == "planner: interrupted: ending with the best schedule found so far; Ctrl-C again to quit at once\n"
    simulate(chain(), read_plan(plan_file).schedule)


def test_an_interrupted_solve_without_an_answer_says_so(graph_file: Path, tmp_path: Path) -> None:
    marker, plan_file = tmp_path / "started", tmp_path / "plan.json"
    process = start(
        marker,
        *("-c", WITH_ENDLESS_SOLVER, marker, "listens"),
        *("solve", graph_file, "--budget", "60%", "--solver", "endless", "-o", plan_file, "--quiet"),
    )
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (4, "")
    assert err.startswith("planner: error: keeping everything needs")
    assert not plan_file.exists()


def test_a_second_interrupt_quits_at_once(graph_file: Path, tmp_path: Path) -> None:
    marker, plan_file = tmp_path / "started", tmp_path / "plan.json"
    process = start(
        marker,
        *("-c", WITH_ENDLESS_SOLVER, marker, "deaf"),
        *("solve", graph_file, "--budget", "100%", "--solver", "endless", "-o", plan_file),
    )
    deadline = time.monotonic() + PATIENCE_S
    # Two signals at the same moment may arrive as one.
    while process.poll() is None and time.monotonic() < deadline:
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (130, "", "")
    assert sorted(tmp_path.iterdir()) == [graph_file, marker]


def test_an_interrupted_trace_leaves_nothing(tmp_path: Path) -> None:
    marker, model, folder = tmp_path / "started", tmp_path / "own.py", tmp_path / "out"
    folder.mkdir()
    model.write_text(f"import pathlib, time\ndef build():\n    pathlib.Path({str(marker)!r}).touch()\n    time.sleep(1000)\n")
    process = start(marker, "-m", "planner", "trace", f"{model}:build", "-o", folder / "model.json")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (130, "", "")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--help"], ["info", "{graph}"], ["info", "{graph}", "--json"]], ids=" ".join)
def test_a_reader_that_leaves_is_no_error(arguments: list[str], graph_file: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(
        [sys.executable, "-m", "planner", *(word.format(graph=graph_file) for word in arguments)],
        cwd=ROOT,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
    )
    os.close(write)
    # argparse finds that out by itself, and goes.
    assert (ended.returncode, ended.stderr) == (0 if arguments == ["--help"] else 1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full on this system")
def test_a_full_disk_under_the_output_is_one_line(graph_file: Path) -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "planner", "info", graph_file],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
        )
    assert (ended.returncode, ended.stderr) == (1, "planner: error: the output: No space left on device\n")


def test_a_process_without_streams_still_works(graph_file: Path, tmp_path: Path) -> None:
    plan_file = tmp_path / "plan.json"
    line = '"$0" -m planner solve "$1" --budget 100% -o "$2" >&- 2>&-'
    ended = subprocess.run(["sh", "-c", line, sys.executable, graph_file, plan_file], cwd=ROOT, timeout=PATIENCE_S)
    assert ended.returncode == 0
    assert read_plan(plan_file).graph.ops == 12


def test_the_installed_command_is_the_module() -> None:
    script = Path(sys.executable).with_name("planner")
    ended = subprocess.run([script, "--version"], cwd=ROOT.parent, text=True, capture_output=True, timeout=PATIENCE_S)
    assert (ended.returncode, ended.stdout) == (0, command("--version").stdout)
