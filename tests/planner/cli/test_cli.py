"""The command: help, usage errors, and what it imports."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from planner.capture.options import OPTIONS
from planner.cli.main import build_parser
from solvers.registry import SOLVERS
from tests.support.cli import PATIENCE_S, ROOT, call, command, run_python
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


def imported_by(*arguments: object) -> set[str]:
    code = (
        "import sys; from planner.cli.main import main; c = main(sys.argv[1:]); print(*sys.modules, file=sys.stderr); sys.exit(c)"
    )
    ended = run_python("-c", code, *arguments)
    assert ended.returncode == 0, ended.stderr
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
