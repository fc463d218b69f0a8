"""``make bench-offload``: rows of steps that recompute, offload or do both, the largest sizes with each, and their tables."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from benchmarks import command, offload
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
from benchmarks.offload_sizes import CASES, STUDY, TABLE, SizeCase, search
from planner.capture.workload.workload import parse_spec
from planner.graphs.errors import BudgetError
from planner.graphs.synthetic.random_graphs import draw_training_step
from planner.graphs.units import format_ratio
from planner.settings.option_settings import build_option_settings
from planner.studies import sizes
from planner.studies.tables import format_markdown


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


RESULTS = Path(__file__).parents[2] / "results" / "offload"


@pytest.mark.slow
def test_largest_size_with_offload_is_at_least_that_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = SizeCase("zoo:mlp,layers=4,width=32,classes=8", "batch", 64)
    monkeypatch.setitem(CASES, "small", small)
    rows = list(search("small", (), budget="1MB", limit_s=3.0))
    assert [row.method for row in rows] == [*(method for method, _ in sizes.METHODS), "with offload"]
    found = [row.size or 0 for row in rows]
    assert found[-1] >= found[-2] >= found[0] > 0
    assert all((row.overhead or 0.0) <= 0.1 and (row.peak_bytes or 0) <= 10**6 for row in rows if row.size)
    lines = format_markdown(rows, TABLE).splitlines()
    assert len(lines) == 2 + len(rows) and all(row.method in line for row, line in zip(rows, lines[2:], strict=True))
    main = command.Main(replace(STUDY, run=lambda *_: iter(rows)), CASES, out=str(tmp_path))
    assert main(["--models", "small"]) == 0
    assert (tmp_path / "max_batch.md").read_text() == format_markdown(rows, TABLE)
    assert (tmp_path / "max_batch.csv").read_text().count("\n") == 1 + len(rows)


def test_case_sizes_are_divisible_by_their_unit() -> None:
    for case in CASES.values():
        assert int(dict(parse_spec(case.spec).options)[case.varies]) % case.unit == 0
