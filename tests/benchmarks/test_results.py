"""The committed comparisons: what they claim is proved, and tables are what their rows say."""

import json
import math
from itertools import product
from pathlib import Path

import pandas as pd
import pytest

from benchmarks import compare, placement
from benchmarks.compare import FOR_SMALL_GRAPHS
from benchmarks.compare_summary import BUDGETS, format_summary
from planner.solvers.registry import SOLVERS
from planner.solvers.result import Reason, Status
from planner.studies.comparison_rows import OPTIMUM, ComparisonRow, RunBy, bound_of, select_simulated
from planner.studies.comparisons import format_tables
from planner.studies.rows import read_rows

FOLDER = Path(__file__).parents[2] / "results" / "compare"
FILES = sorted(FOLDER.glob("*/*/rows.csv"))
# Each proves an optimum over schedules of a class of its own, which the optimum's includes.
EXACT = ("checkmate", "rotor")
FLOATING = 1e-9


def named(path: Path) -> str:
    return str(path.parent.relative_to(FOLDER))


ROWS = {path: read_rows(path, ComparisonRow) for path in FILES}


def found(rows: list[ComparisonRow]) -> list[ComparisonRow]:
    return [row for row in rows if row.time_s is not None]


def test_committed_results_include_every_suite() -> None:
    there = {named(path) for path in FILES}
    models = ("gpt2", "resnet50", "unet", "vit", "mobilenet_v2")
    assert {f"{suite}/{model}" for suite in ("h200", "cpu") for model in models} | {"cpu/gpt2-dropout"} <= there
    assert any(name.startswith("exact/") for name in there)


def test_no_method_is_below_the_bound() -> None:
    for path, rows in ROWS.items():
        checked = found(rows)
        assert checked, path
        for row in checked:
            assert row.peak_bytes <= row.budget_bytes
            # What needs less memory than its budget is not below the bounds of smaller ones that it fits either.
            assert row.time_s >= max(bound_of(rows, row.peak_bytes) or 0.0, row.base_s) * (1 - FLOATING), (path, row.key)


def test_the_optimum_is_above_no_other_exact_method_by_more_than_its_gap() -> None:
    simulations = [(path, select_simulated(rows)) for path, rows in ROWS.items()]
    optima = [(path, rows, row) for path, rows in simulations for row in found(rows) if row.method == OPTIMUM]
    for path, rows, optimum in optima:
        gap = optimum.time_s / optimum.bound_s - 1
        assert (gap <= optimum.tolerance + FLOATING) == (optimum.status == Status.OPTIMAL)
        for row in found(rows):
            if row.method in EXACT and row.budget_bytes == optimum.budget_bytes:
                assert optimum.time_s <= row.time_s * (1 + max(gap, optimum.tolerance) + FLOATING), (path, row.key)


def test_exact_methods_are_compared_where_they_end() -> None:
    rows = [row for path in FILES if path.parent.parent.name == "exact" for row in ROWS[path]]
    assert sum(row.method in EXACT and row.status == Status.OPTIMAL for row in rows) >= 8


def test_why_a_cell_is_empty_is_in_its_row() -> None:
    for path, rows in ROWS.items():
        assert all((row.status == Status.LIMIT) == bool(row.reason) for row in rows if row.run_by != RunBy.TORCH), path
        # On a network of convolutions there is no attention to save.
        if path.parent.name in ("resnet50", "unet", "mobilenet_v2") and path.parent.parent.name != "cpu-offload":
            assert {row.reason for row in rows if row.method == "sac-attention"} == {Reason.INAPPLICABLE}, path


def test_every_method_was_tried_at_every_budget_and_given_time() -> None:
    for path in [path for path in FILES if path.parent.parent.name == "h200"]:
        rows = ROWS[path]
        there, budgets = {(row.method, row.budget) for row in rows}, {row.budget for row in rows}
        assert budgets >= set(BUDGETS)
        tried = {name for name, entry in SOLVERS.items() if not entry.only_transfers} - FOR_SMALL_GRAPHS
        assert {(method, budget) for method in tried for budget in budgets} <= there
        assert not [row.key for row in rows if row.reason == Reason.TIME and row.method not in FOR_SMALL_GRAPHS]


def test_a_unet_is_checkpointed_by_its_blocks() -> None:
    rows = {row.key[1:]: row for row in read_rows(FOLDER / "h200" / "unet" / "rows.csv", ComparisonRow)}
    row = rows["checkpoint-blocks", "70%"]
    assert json.loads(row.settings) == {"depth": 1}
    assert row.peak_bytes / row.base_peak_bytes < 0.6
    assert row.overhead < 0.3


def test_committed_tables_and_summary_equal_those_of_their_rows() -> None:
    assert [named(path) for path in FILES if (path.parent / "table.md").read_text() != format_tables(ROWS[path])] == []
    figures = [path.parent / name for path in FILES for name in ("overhead.png", "memory.png")]
    assert [path for path in figures if not 0 < path.stat().st_size < 100_000] == []
    assert (FOLDER / "summary.md").read_text() == format_summary(FOLDER)


def test_measured_rows_are_complete_and_equal_eager() -> None:
    for file in [path for path in FILES if path.parent.parent.name == "cpu"]:
        rows = ROWS[file]
        for row in [row for row in rows if row.run_by == RunBy.EXECUTOR and row.time_s is not None]:
            assert row.exactness in ("identical", "rounded"), (file, row.key)
            assert math.isfinite(row.measured_s / row.eager_s)
        names = {row.method for row in rows if row.run_by == RunBy.TORCH}
        assert {"eager", "checkpoint-blocks", "sac", "memory-budget 0.50 aot_eager", "memory-budget 0.50 inductor"} <= names


def test_the_memory_budget_is_shown_to_be_wrong_with_dropout() -> None:
    file = FOLDER / "cpu" / "gpt2-dropout" / "rows.csv"
    wrong = [row.method for row in read_rows(file, ComparisonRow) if row.exactness == "wrong"]
    assert wrong
    assert all(name.startswith("memory-budget 0.") for name in wrong)
    assert "| wrong |" in (file.parent / "table.md").read_text()


def test_cluster_is_refused_for_measured_suites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.main(["--cluster", "tcp://h:1", "--out", str(tmp_path), "--suites", "h200,cpu"])
    assert "cpu measure on this machine" in capsys.readouterr().err


def test_placed_steps_gain_over_the_serial_optimum() -> None:
    rows = list(placement.STUDY.read_kept(FOLDER.parent / "placement"))
    asked = product(placement.MODELS, placement.PAIRS, placement.BUDGETS)
    assert {(row.model, row.pair, row.budget) for row in rows} == set(asked)
    gained = larger = 0
    for model, pair in {(row.model, row.pair) for row in rows}:
        found = {row.method: row for row in rows if (row.model, row.pair, row.budget) == (model, pair, placement.NO_LIMIT)}
        alone, _, serial, overlapped, windows = (found[method] for method in placement.METHODS)
        assert windows.time_s <= alone.time_s * (1 + 1e-9)
        if not overlapped.time_s:  # XEngine's program is too large
            larger += windows.time_s < 0.99 * alone.time_s
            continue
        assert serial.status == "optimal" and serial.serial_s <= alone.time_s * (1 + 1e-6)
        assert overlapped.time_s <= serial.time_s * (1 + 1e-9)
        gained += windows.time_s < 0.99 * serial.serial_s
    assert gained >= 3 and larger >= 1


def test_chunks_make_small_budgets_feasible_and_half_of_reserved_ones_have_plans() -> None:
    rows = pd.read_csv(FOLDER.parent / "options" / "rows.csv").query("model == 'gpt2-medium' and budget == '30%'")
    found = rows.set_index("options")["time_s"]
    assert math.isnan(found["none"]) and found["chunks"] > 0
    reserved = pd.read_csv(FOLDER.parent / "reserved" / "rows.csv")
    assert len(reserved) == 20 * reserved["model"].nunique() >= 80 and reserved["peak_bytes"].notna().mean() >= 0.5
