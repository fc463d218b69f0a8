"""The command: help, usage errors, what it imports; ``doctor``, ``trace``, ``run`` and ``addresses``."""

import csv
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.capture.options import OPTIONS
from planner.capture.workload.models import Workload
from planner.capture.workload.workload import parse_spec
from planner.cli.main import build_parser
from planner.graphs.addresses import check_offsets
from planner.graphs.io.buffers import read_buffers
from planner.graphs.io.formats import read_graph
from planner.graphs.ir import Graph
from planner.measure.run_plan import RunReport
from planner.plans.plan import read_plan
from planner.progress import LineView
from planner.settings.option_settings import OptionSettings
from planner.settings.plan import PlanSettings
from planner.solvers.registry import SOLVERS
from tests.support.budgets import between
from tests.support.cli import PATIENCE_S, ROOT, call, chain, command, refused, run_python, run_report
from tests.support.graphs.buffers import packed_buffers
from tests.support.graphs.imported import public
from tests.support.marks import slow

COMMANDS = ["trace", "advise", "solve", "run", "info", "doctor"]


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


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys) == call(capsys, "--help")


def test_the_solvers_and_options_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    solvers, options = call(capsys, "solvers"), call(capsys, "options")
    assert solvers.code == options.code == 0
    listed = [line.split()[0] for line in solvers.out.splitlines() if line.startswith("  ")]
    assert sorted(listed) == sorted(SOLVERS) == sorted(json.loads(call(capsys, "solvers", "--json").out))
    described = options.out.partition("\n\n")[0]  # behind it is what does not go together
    assert [line.split()[0] for line in described.splitlines()] == list(OPTIONS)
    assert json.loads(call(capsys, "options", "--json").out) == {name: o.description for name, o in OPTIONS.items()}


def test_completion_of_a_shell_knows_commands_and_options() -> None:
    said = command("--print-completion", "bash")
    assert said.returncode == 0 and "--max-overhead" in said.stdout and "max-batch" in said.stdout


def test_help_fits_a_screen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("solve", "run", "info", "show", "curve", "advise", "import", "solvers", "options", "doctor"):
        assert len(call(capsys, name, "--help").out.splitlines()) <= 60, name


def imported_by(*arguments: object, ends: int = 0) -> set[str]:
    code = (
        "import sys; from planner.cli.main import main; c = main(sys.argv[1:]); print(*sys.modules, file=sys.stderr); sys.exit(c)"
    )
    ended = run_python("-c", code, *arguments)
    assert ended.returncode == ends, ended.stderr
    return set(ended.stderr.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        *slow(*([name, "--help"] for name in COMMANDS)),
        ["info", "{graph}"],
        ["solve", "{graph}", "--budget", "60%", "-o", "{folder}/plan.json"],
        *slow(["curve", "{graph}", "--budgets", "3", "--jobs", "1"]),
    ],
    ids=" ".join,
)
def test_commands_without_a_model_do_not_import_torch(arguments: list[str], graph_file: Path) -> None:
    modules = imported_by(*(word.format(graph=graph_file, folder=graph_file.parent) for word in arguments))
    assert "planner.cli.main" in modules
    assert not {"torch", "pandas", "matplotlib"} & modules
    if "--help" in arguments or "--version" in arguments:
        assert not {"numpy", "scipy", "highspy", "rich"} & modules


@pytest.mark.parametrize(
    "arguments",
    [["advise"], *slow(["trace", "-o", "x.json"], ["max-batch", "--budget", "8GB", "--roofline", "h200"], ["doctor"])],
    ids=" ".join,
)
def test_a_missing_file_is_refused_before_torch_is_imported(arguments: list[str]) -> None:
    assert "torch" not in imported_by(*arguments, "none.py:build", ends=1)


def test_the_installed_command_is_the_module() -> None:
    script = Path(sys.executable).with_name("planner")
    ended = subprocess.run([script, "--version"], cwd=ROOT.parent, text=True, capture_output=True, timeout=PATIENCE_S)
    assert (ended.returncode, ended.stdout) == (0, command("--version").stdout)


def test_a_comparison_names_the_least_feasible_budget(
    graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budgets = ["--budgets", "10%,100%", "--methods", "windows", "--jobs", "1"]
    said = call(capsys, "compare", graph_file, *budgets, "-o", tmp_path / "out")
    assert said.code == 0
    assert any(line.startswith("windows: budget ") and "the least any schedule" in line for line in said.out.splitlines())


MODELS = """
import torch
from torch import nn


class Doubled(nn.Module):
    def __init__(self, of_batch: bool):
        super().__init__()
        self.layer, self.of_batch = nn.Linear(4, 4), of_batch

    def forward(self, x):
        hidden = self.layer(x)
        return 2 * hidden if (x if self.of_batch else hidden).sum() > 0 else hidden


def build(of_batch: bool):
    return Doubled(of_batch), nn.functional.mse_loss, (torch.ones(3, 4), torch.ones(3, 4))


def fails():
    raise RuntimeError("no weights")
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    return path


def test_installation_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    said = call(capsys, "doctor")
    assert (said.code, said.err) == (0, "")
    assert f"torch          {torch.__version__}" in said.out and "GB/s to host memory" in said.out
    assert said.out.endswith("no problem found\n")


def test_a_model_with_one_graph_is_measured_by_its_ops(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = call(capsys, "doctor", f"{models}:build,of_batch=true")
    assert said.code == 0 and "one graph of" in said.out  # a branch on the batch is no graph break


def test_graph_breaks_are_listed_with_their_lines(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = call(capsys, "doctor", f"{models}:build,of_batch=false", "--json")
    data = json.loads(said.out)
    assert said.code == 1
    (broken,) = (fact for fact in data["facts"] if fact["name"] == "graph break 1")
    assert f"{models}:13: " in broken["value"]
    assert len(data["problems"]) == 1 and "planner.checkpoint(" in data["problems"][0]


def test_a_model_that_cannot_be_built_is_a_problem(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = call(capsys, "doctor", f"{models}:fails")
    assert said.code == 1 and "problem: fails of" in said.out and "no weights" in said.out


# As in MiniMalloc's documentation: 12 bytes hold them.
BUFFERS = "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n"


@pytest.fixture
def buffers(tmp_path: Path) -> Path:
    path = tmp_path / "buffers.csv"
    path.write_text(BUFFERS)
    return path


def offsets_in(path: Path) -> list[int]:
    with path.open(newline="") as file:
        return [int(row["offset"]) for row in csv.DictReader(file)]


def test_the_smallest_arena_is_found_and_written(buffers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "offsets.csv"
    said = call(capsys, "addresses", buffers, "-o", output)
    assert (said.code, said.err) == (0, "")
    assert "5 buffers in an arena of 12 bytes" in said.out and "the smallest" in said.out
    check_offsets(read_buffers(output).buffers, offsets_in(output))


def test_addresses_within_a_capacity_are_found_or_proved_not_to_be(buffers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = call(capsys, "addresses", buffers, "--capacity", "1kB", "--json")
    found = json.loads(said.out)
    assert said.code == 0
    assert {
        key: found[key] for key in ("output", "buffers", "status", "capacity_bytes", "height_bytes", "bound_bytes", "gap")
    } == {
        "output": None,
        "buffers": 5,
        "status": "optimal",
        "capacity_bytes": 1000,
        "height_bytes": 12,
        "bound_bytes": 12,
        "gap": 0.0,
    }
    refused(call(capsys, "addresses", buffers, "--capacity", "11"), 3, "5 buffers do not fit 11 bytes", "fewer than 12")
    refused(call(capsys, "addresses", buffers, "--capacity", "3"), 3, "buffer 'b1' alone takes 4")
    said = call(capsys, "addresses", buffers, "--capacity", "11", "--json")
    assert (said.code, json.loads(said.out)["status"]) == (3, "infeasible")


def test_nothing_is_written_where_nothing_fits(buffers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(capsys, "addresses", buffers, "--capacity", "11", "-o", tmp_path / "offsets.csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["buffers.csv"]


def test_a_search_that_ends_too_early_says_the_gap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hard.csv"
    rows = [f"{b.id},{b.lower},{b.upper},{b.size}" for b in packed_buffers(200, horizon=200, height=1000, seed=200, removed=0.1)]
    path.write_text("\n".join(["id,lower,upper,size", *rows]))
    said = call(capsys, "addresses", path, "--capacity", "1000", "--work-limit", "0.2")
    refused(said, 4, "no addresses within 1,000 bytes were found", "no arena has fewer than 1,000")
    said = call(capsys, "addresses", path, "--work-limit", "0.2")
    assert said.code == 0 and "a gap of" in said.out


@pytest.mark.parametrize(
    ("text", "said"),
    [("id,lower,size\n", "there is no column 'upper'"), (BUFFERS + "b6,3,3,4\n", "line 7: buffer 'b6'")],
)
def test_what_is_no_table_of_buffers_is_refused(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "buffers.csv"
    path.write_text(text)
    refused(call(capsys, "addresses", path), 1, said)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["A", "B", "E", "F", "H"])
def test_published_instances_fit_their_capacity(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = public(f"addresses/{name}.1048576.csv")
    output = tmp_path / "offsets.csv"
    said = call(capsys, "addresses", path, "--capacity", "1048576", "--work-limit", "300", "-o", output)
    assert said.code == 0
    check_offsets(read_buffers(output).buffers, offsets_in(output))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """In place of the modules that trace and run, one that notes what it is asked for."""
    import planner

    module = types.ModuleType("asked")
    module.calls = []

    def trace_workload(workload: Workload, settings: PlanSettings, on_progress: LineView) -> Graph:
        module.calls.append((len(workload), settings))
        return chain()

    def run(plan: object, *workload: object, on_progress: LineView, **options: object) -> RunReport:
        module.calls.append((len(workload), options))
        differences = () if options["seed"] == 0 else ("gradient of 'w'",)
        arena = {"arena_bytes": 1920, "outside_arena_bytes": 60} if options["arena"] else {}
        return run_report(identical=not differences, differences=differences, **arena)

    module.trace_workload, module.run = trace_workload, run
    for name in ("tracing", "run_plan"):
        monkeypatch.setitem(sys.modules, f"planner.measure.{name}", module)
        monkeypatch.setattr(planner.measure, name, module, raising=False)
    return module


TINY = "zoo:mlp,batch=2,layers=1,width=4,classes=3"


def test_trace_passes_its_options_on(asked: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.json"
    how = ("--optimizer", "adamw", "--accumulate", "--roofline", "h200", "--options", "chunks")
    said = call(capsys, "trace", TINY, "-o", path, *how)
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith(f"{path}: 12 ops and 0 optional ones, 13 tensors, step time 12 ms")
    assert read_graph(path) == chain()
    given = PlanSettings(optimizer="adamw", accumulate=True, roofline="h200", name=TINY, options=OptionSettings(("chunks",)))
    assert asked.calls == [(3, given)]
    data = json.loads(call(capsys, "trace", TINY, "-o", path, "--json", "--measure-link", "--passes", "3").out)
    assert data["ops"] == 12
    assert data["output"] == str(path)
    assert asked.calls[1][1] == PlanSettings(measure_link=True, passes=3, name=TINY)


def test_run_reports_and_has_a_code_for_gradients_that_differ(
    asked: Any, graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_file = tmp_path / "plan.json"
    assert call(capsys, "solve", graph_file, "--budget", "100%", "-o", plan_file).code == 0
    same = call(capsys, "run", plan_file, "--model", TINY, "--repeats", "2")
    assert (same.err, same.code) == ("", 0)
    for words in (
        "1.99 kB   1.98 kB",
        "11 ms     12 ms",
        "1.1000    1.2000",
        "within the budget of 2.00 kB",
        "identical to keeping",
    ):
        assert words in same.out
    assert asked.calls == [(3, {"repeats": 2, "seed": 0, "arena": None})]
    other = call(capsys, "run", plan_file, "--model", TINY, "--seed", "1")
    assert other.code == 6
    assert "DIFFERENT from keeping everything:\n  gradient of 'w'" in other.out
    in_arena = call(capsys, "run", plan_file, "--model", TINY, "--arena")
    assert "arena: 1.92 kB, 60 B outside" in in_arena.out
    data = json.loads(call(capsys, "run", plan_file, "--model", TINY, "--json").out)
    assert (data["identical"], data["measured_peak_bytes"], data["differences"]) == (True, 1980, [])


@pytest.mark.parametrize(
    "model",
    [f"{ROOT}/examples/own_model.py:build,batch=256,width=32,depth=3", *slow("zoo:mlp,batch=256,layers=6,width=32,classes=16")],
)
def test_from_a_model_to_a_measured_step(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph_file, plan_file = tmp_path / "model.json", tmp_path / "plan.json"
    assert call(capsys, "trace", model, "-o", graph_file, "--passes", "2").code == 0
    assert call(capsys, "info", graph_file).code == 0
    assert read_graph(graph_file).provenance["model"] == str(parse_spec(model))
    budget = f"{between(read_graph(graph_file))}B"
    assert call(capsys, "solve", graph_file, "--budget", budget, "-o", plan_file).code == 0
    ran = call(capsys, "run", plan_file, "--repeats", "2", "--json")
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
    assert call(capsys, "solve", graph_file, "--budget", "98%").code == 3
