"""``make bench-addresses``: rows of buffers, public instances where they are at hand, and their table."""

from pathlib import Path

import pytest

from benchmarks import addresses
from benchmarks.addresses import PUBLIC, TABLE, main, solve_addresses, solve_plans
from planner.studies.tables import format_markdown
from tests.support.graphs.buffers import packed_buffers


def test_a_row_is_between_the_live_bytes_and_best_fit() -> None:
    row = solve_addresses("packed", packed_buffers(40, horizon=20, height=300, seed=2), 300, limit_s=20.0)
    assert row.live_bytes == row.bound_bytes == row.arena_bytes == 300
    assert row.best_fit_bytes >= 300
    assert f"| packed |  | 0 | {row.buffers} |" in format_markdown([row], TABLE)


def test_a_plan_has_an_arena_at_each_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(addresses.MODELS, "tiny", "zoo:gpt2,layers=2,width=32,heads=2,vocab=50,batch=8,seq=32")
    rows = list(solve_plans("tiny", ("100%", "80%"), limit_s=2.0))
    assert [row.budget for row in rows] == ["100%", "80%"]
    assert all(row.arena_bytes is not None and row.bound_bytes <= row.arena_bytes <= row.best_fit_bytes for row in rows)


def test_instances_that_are_not_here_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(addresses, "INSTANCES", tmp_path / "none")
    main(["--models", PUBLIC, "--out", str(tmp_path)])
    assert "the public instances are not here" in capsys.readouterr().out
