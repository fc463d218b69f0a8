"""A comparison on a terminal: one row per method, the best first, within 100 columns."""

import builtins
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from planner.graphs.io.formats import write_graph
from planner.graphs.synthetic.small import make_training_chain
from planner.solvers.registry import SOLVERS
from planner.studies.compare import compare, parse_methods
from planner.studies.comparison_rows import ComparisonRow
from planner.studies.comparison_screen import METHODS, format_screen
from planner.studies.settings import StudySettings
from tests.support.cli import call

BUDGETS = ("100%", "90%", "80%", "70%", "60%", "50%")
NAMES = ("windows", *(name for name in parse_methods("all") if name != "windows" and not SOLVERS[name].large_programs))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[ComparisonRow]:
    return compare(make_training_chain(8), BUDGETS, NAMES, tmp_path_factory.mktemp("rows"), StudySettings(total_time_limit_s=20))


def lines(rows: Sequence[ComparisonRow], **settings: int) -> list[list[str]]:
    return [line.split("  ") for line in format_screen(rows, **settings).splitlines()]


def test_the_best_methods_fit_a_terminal(rows: list[ComparisonRow]) -> None:
    text = format_screen(rows)
    assert max(map(len, text.splitlines())) <= 100
    assert len(text.splitlines()) == METHODS + 4
    assert f"{METHODS} of {len(NAMES)} methods and 4 of 6 budgets; table.md has all" in text


def test_methods_are_sorted_and_ours_and_the_best_baseline_are_marked(rows: list[ComparisonRow]) -> None:
    every = lines(rows, methods=len(NAMES))[2:-2]
    assert sorted(line[0] for line in every) == sorted(NAMES)
    marked = {line[-1].strip(): line[0] for line in every if line[-1].strip() in ("ours", "best baseline")}
    found = {name: [row.overhead for row in rows if row.method == name and row.overhead is not None] for name in NAMES}
    ranks = [(-len(found[line[0]]), sum(found[line[0]]) / max(1, len(found[line[0]]))) for line in every]
    assert ranks == sorted(ranks)
    assert marked["ours"] == "windows"
    assert marked["best baseline"] == next(line[0] for line in every if line[0] != "windows")


def test_ours_is_shown_where_others_are_better(rows: list[ComparisonRow]) -> None:
    few = [row for row in rows if row.method != "windows" or row.budget == "100%"]
    assert any(line[0] == "windows" for line in lines(few, methods=3))


def test_the_bound_says_where_no_schedule_fits(tmp_path: Path) -> None:
    found = compare(make_training_chain(4), ("100%", "1B"), ("windows",), tmp_path, StudySettings(total_time_limit_s=5))
    (bounds,) = [line for line in lines(found) if line[0] == "bound"]
    assert [cell.strip() for cell in bounds if cell.strip()] == ["bound", "0.00%", "infeasible"]


def test_compare_needs_no_matplotlib(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    graph, folder, imported = tmp_path / "model.json", tmp_path / "out", builtins.__import__
    write_graph(make_training_chain(4), graph)

    def without(name: str, *arguments: Any, **settings: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return imported(name, *arguments, **settings)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setattr("planner.show.views.figures.find_spec", lambda _: None)
    asked = ["compare", graph, "--budgets", "100%,80%", "--methods", "windows,chen-sqrt", "--jobs", "1", "-o", folder]
    said = call(capsys, *asked)
    assert said.code == 0
    assert f"written to {folder}: rows.csv, table.md (figures need matplotlib: pip install 'remat-planner[plots]')" in said.out
    assert sorted(path.name for path in folder.iterdir()) == ["rows.csv", "table.md"]


def test_compare_says_why_a_named_method_does_not_apply(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph, folder = tmp_path / "model.json", tmp_path / "out"
    write_graph(make_training_chain(4), graph)
    said = call(capsys, "compare", graph, "--budgets", "100%", "--methods", "poet", "--jobs", "1", "-o", folder)
    assert said.code == 4
    assert "\npoet: POET does not apply: the graph offers no transfers to the host; solve with the option offload" in said.out
