"""``make bench-offload``: rows of three ways to win memory, and their table."""

from pathlib import Path

import pytest

from benchmarks import offload
from benchmarks.offload import COLUMNS, METHODS, MODELS, compare, table
from graphs.synthetic.random_graphs import random_training_step
from planner.models.workload import parse_spec
from planner.studies.rows import read_csv


def test_both_are_no_worse_than_either_and_rows_say_how_each_ended() -> None:
    rows = list(compare("step", random_training_step(5, 30), ["60%", "1%"], limit_s=5.0))
    assert [(row["budget"], row["method"]) for row in rows] == [(budget, way) for budget in ("60%", "1%") for way in METHODS]
    assert all(row.keys() <= set(COLUMNS) for row in rows)
    recomputing, offloading, both = rows[:3]
    assert both["overhead"] <= recomputing["overhead"]  # type: ignore[operator]
    assert both["bound"] <= both["overhead"]  # type: ignore[operator]
    assert offloading["recomputed"] == recomputing["copied"] == 0 < min(recomputing["recomputed"], offloading["copied"])  # type: ignore[type-var]
    assert recomputing["host_bytes"] == 0 < offloading["host_bytes"]  # type: ignore[operator]
    assert {row["status"] for row in rows[3:]} == {"infeasible"}
    lines = table(rows).splitlines()
    assert len(lines) == 2 + len(rows)
    assert all(way in line for line, way in zip(lines[2:], (*METHODS, *METHODS), strict=True))


def test_the_command_writes_as_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "MODELS", {"small": ("zoo:mlp", ("90%",))})
    offload.main(["--models", "small", "--out", str(tmp_path)])
    assert (tmp_path / "rows.csv").read_text().count("\n") == 1 + len(METHODS)
    assert "both" in (tmp_path / "table.md").read_text()


def test_its_models_can_be_traced() -> None:
    for spec, budgets in MODELS.values():
        assert parse_spec(spec) and len(budgets) == 2


def test_the_committed_rows_say_what_the_table_does() -> None:
    folder = Path(__file__).parents[2] / "results" / "offload"
    rows = read_csv(folder / "rows.csv", COLUMNS)
    assert {(row["model"], row["budget"]) for row in rows} == {
        (name, b) for name, (_, budgets) in MODELS.items() for b in budgets
    }
    solved = {(row["model"], row["budget"], row["method"]): float(row["overhead"]) for row in rows}
    for row in rows:
        assert float(row["bound"]) <= float(row["overhead"]) + 1e-6
        assert int(row["peak_bytes"]) <= int(row["budget_bytes"])
        assert solved[row["model"], row["budget"], "both"] <= float(row["overhead"])
        assert f"{100 * float(row['overhead']):.2f}%" in (folder / "table.md").read_text()
