"""``make bench-offload``: rows of what recomputes, offloads or does both, of what others do, and their table."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from benchmarks import offload
from benchmarks.offload import (
    BOTH,
    METHODS,
    MODELS,
    OFFLOAD,
    OURS,
    RECOMPUTE,
    SUITES,
    OffloadCase,
    OffloadRow,
    Suite,
    compute_budget_bytes,
    find_below_bound,
    format_table,
    solve,
)
from graphs.errors import BudgetError
from graphs.synthetic.random_graphs import draw_training_step
from graphs.units import format_ratio
from planner.capture.workload.workload import parse_spec
from planner.settings.option_settings import build_option_settings


def case(*budgets: str) -> OffloadCase:
    options = build_option_settings(["offload"], "2GB/s", "1GB")
    return OffloadCase("suite", "step", partial(draw_training_step, 5, 20), options, budgets, limit_s=1.0)


@pytest.fixture(scope="module")
def rows() -> list[OffloadRow]:
    return list(solve(case("60%", "1%"), ()))


def test_both_are_no_worse_than_either_and_rows_say_how_each_ended(rows: list[OffloadRow]) -> None:
    assert [(row.budget, row.method) for row in rows] == [(budget, way) for budget in ("60%", "1%") for way in METHODS]
    found = {row.method: row for row in rows[: len(METHODS)]}
    recomputing, offloading, both = (found[way] for way in OURS)
    assert recomputing.overhead is not None and offloading.overhead is not None
    assert 0 < both.overhead <= min(recomputing.overhead, offloading.overhead)
    assert offloading.recomputed == recomputing.copied == recomputing.host_bytes == 0
    assert recomputing.recomputed and offloading.copied and offloading.host_bytes
    assert found["poet"].status != "error"
    assert not find_below_bound(rows)
    assert {row.status for row in rows if row.budget == "1%" and row.method in (RECOMPUTE, BOTH)} == {"infeasible"}
    text = format_table(rows)
    assert format_ratio(both.overhead) in text and all(method in text for method in METHODS)
    assert "Slower than either alone: 0." in text and "Methods below the bound: 0." in text


def test_known_rows_are_not_solved_again(rows: list[OffloadRow]) -> None:
    known = [row for row in rows if (row.budget, row.method) != ("60%", RECOMPUTE)]
    assert [row.method for row in solve(case("60%", "1%"), known)] == [RECOMPUTE]


def test_a_schedule_below_the_bound_is_named(rows: list[OffloadRow]) -> None:
    found = {row.method: row for row in rows if row.budget == "60%"}
    wrong = replace(found[RECOMPUTE], time_s=0.9 * (found[BOTH].bound_s or 0.0))
    assert find_below_bound([wrong, found[BOTH]]) == [wrong]
    assert "Slower than either alone: 1." in format_table([wrong, found[OFFLOAD], found[BOTH]])


def test_budgets_lie_between_the_least_and_the_peak() -> None:
    assert compute_budget_bytes("least + 25%", 1000, 2000) == 1250
    assert compute_budget_bytes("60%", 1000, 2000) == 1200
    for wrong in ("least + 25", "25", "least"):
        with pytest.raises(BudgetError):
            compute_budget_bytes(wrong, 1000, 2000)


def test_bench_offload_command_writes_rows_and_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "MODELS", {"small": "zoo:mlp"})
    monkeypatch.setattr(offload, "SUITES", {"little": Suite("h200", "50GB/s", {"small": ("90%",)})})
    offload.main(["--models", "small", "--suites", "little", "--out", str(tmp_path)])
    assert (tmp_path / "rows.csv").read_text().count("\n") == 1 + len(METHODS)
    assert "both" in (tmp_path / "table.md").read_text()


def test_its_models_can_be_read() -> None:
    assert all(parse_spec(spec) for spec in MODELS.values())
    assert all(set(suite.budgets) <= set(MODELS) for suite in SUITES.values())
