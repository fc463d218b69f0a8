"""``make bench-addresses``: rows of buffers, public instances where they are at hand, and their table."""

from pathlib import Path

import pytest

from benchmarks import addresses
from benchmarks.addresses import COLUMNS, PUBLIC, main, plan_rows, row, table
from planner.studies.rows import read_csv
from tests.support.buffers import packed_buffers

FOLDER = Path(__file__).parents[2] / "results" / "addresses"


def test_a_row_is_between_the_live_bytes_and_best_fit() -> None:
    found = {"name": "packed", "budget": None, **row(packed_buffers(40, horizon=20, height=300, seed=2), 300, limit_s=20.0)}
    assert found.keys() == set(COLUMNS)
    assert found["live_bytes"] == found["bound_bytes"] == found["arena_bytes"] == 300
    assert found["best_fit_bytes"] >= 300  # type: ignore[operator]
    assert f"| packed |  | 0 | {found['buffers']} |" in table([found])


def test_a_plan_has_an_arena_at_each_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(addresses.MODELS, "tiny", "zoo:gpt2,layers=2,width=32,heads=2,vocab=50,batch=8,seq=32")
    rows = list(plan_rows("tiny", ("100%", "80%"), limit_s=2.0))
    assert [found["budget"] for found in rows] == ["100%", "80%"]
    assert all(found["bound_bytes"] <= found["arena_bytes"] <= found["best_fit_bytes"] for found in rows)  # type: ignore[operator]


def test_instances_that_are_not_here_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(addresses, "INSTANCES", tmp_path / "none")
    main(["--models", PUBLIC, "--out", str(tmp_path)])
    assert "the public instances are not here" in capsys.readouterr().out


def test_the_committed_rows_are_those_of_the_committed_table() -> None:
    rows = read_csv(FOLDER / "rows.csv", COLUMNS)
    assert {found["name"] for found in rows} >= set(addresses.MODELS) - {"tiny"}
    for found in rows:
        assert int(found["bound_bytes"]) <= int(found["arena_bytes"]) <= int(found["best_fit_bytes"])
        assert (found["status"] == "optimal") == (found["bound_bytes"] == found["arena_bytes"])
    numbers = {"live_bytes", "best_fit_bytes", "arena_bytes", "bound_bytes"}
    typed = [{key: int(value) if key in numbers else value for key, value in found.items()} for found in rows]
    assert (FOLDER / "table.md").read_text() == table(typed)
