"""Methods at their best: tuned for each budget, none left out for a reason that is not told."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.compare_summary import format_summary
from graphs.ir import Graph
from graphs.synthetic.small import make_training_chain
from graphs.synthetic.transformer import TransformerSize, transformer
from planner.studies.best_rows import (
    HEURISTICS,
    build_tuned_table,
    explain_none,
    find_best_measured,
    find_best_schedule,
    find_undominated,
    get_kind,
)
from planner.studies.compare import compare
from planner.studies.comparison_rows import ComparisonRow, RunBy
from planner.studies.comparisons import build_simulated_table, format_cell, format_tables
from planner.studies.rows import write_rows
from planner.studies.settings import StudySettings
from solvers.registry import SOLVERS
from solvers.result import Reason

METHODS = ("windows", "checkpoint-blocks", "sac", *HEURISTICS["dtr"], *HEURISTICS["megengine"])


@pytest.fixture(scope="module")
def graph() -> Graph:
    return transformer(TransformerSize(layers=2))


@pytest.fixture(scope="module")
def rows(graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> list[ComparisonRow]:
    return compare(graph, ["70%", "60%", "50%"], METHODS, tmp_path_factory.mktemp("rows"), StudySettings(model="two layers"))


@pytest.fixture
def row(rows: list[ComparisonRow]) -> ComparisonRow:
    return rows[0]


def step(
    row: ComparisonRow, method: str, ratio: float | None, peak: int | None, exactness: str = "identical", reason: str = ""
) -> ComparisonRow:
    """A row of what PyTorch ran."""
    return replace(
        row,
        run_by=str(RunBy.TORCH),
        method=method,
        budget="",
        budget_bytes=None,
        status="ran" if ratio else "error",
        reason=reason,
        time_s=None,
        peak_bytes=None,
        measured_ratio=ratio,
        measured_peak_bytes=peak,
        exactness=exactness if ratio else "",
    )


def test_inapplicable_methods_are_not_reported_as_out_of_memory(rows: list[ComparisonRow]) -> None:
    # A synthetic graph has neither modules nor ops with PyTorch's names.
    for method in ("checkpoint-blocks", "sac"):
        own = [row for row in rows if row.method == method]
        assert len(own) == 3
        for row in own:
            assert (row.status, row.reason) == ("limit", Reason.INAPPLICABLE)
            assert "does not apply" in row.message
            assert format_cell(row) == "does not apply"
    assert format_tables(rows).count("| does not apply |") == 3
    assert "does not apply: the method does not support this model" in format_tables(rows)


def test_methods_above_the_budget_are_out_of_memory(tmp_path: Path) -> None:
    found = compare(make_training_chain(8), ["90%", "30%"], ["keep-everything", "chen-sqrt", "dtr"], tmp_path)
    cells = {row.key[1:]: format_cell(row) for row in found}
    assert cells["keep-everything", "90%"] == cells["keep-everything", "30%"] == cells["dtr", "30%"] == "OOM"


def test_a_row_that_is_not_there_was_not_tried(rows: list[ComparisonRow]) -> None:
    some = [row for row in rows if (row.method, row.budget) != ("dtr", "60%")]
    header, *lines = build_simulated_table(some)
    assert [line[header.index("dtr")] == "not tried" for line in lines] == [False, True, False]
    assert explain_none([]) == "not tried"


def test_every_heuristic_is_of_a_kind(row: ComparisonRow) -> None:
    evicting = ("solvers.baselines.dtr", "solvers.baselines.megengine")
    assert {name for kind in HEURISTICS.values() for name in kind} == {
        name for name, entry in SOLVERS.items() if entry.module in evicting
    }
    assert get_kind(replace(row, run_by="simulator", method="msps")) == "dtr"
    assert get_kind(replace(row, run_by="simulator", method="megengine-static")) == "megengine"
    assert get_kind(replace(row, run_by="torch", method="sac-every-second level 2")) == "sac"
    assert get_kind(replace(row, run_by="torch", method="memory-budget 0.50 inductor")) == "memory-budget inductor"


def test_the_best_heuristic_is_the_fastest_that_fits(rows: list[ComparisonRow]) -> None:
    kind = [row for row in rows if row.method in HEURISTICS["dtr"]]
    budgets = sorted({row.budget_bytes or 0 for row in rows})
    times = []
    for budget in budgets:
        best = find_best_schedule(kind, budget)
        here = [row.time_s for row in kind if row.budget_bytes == budget and row.time_s is not None]
        if best is None:
            assert not here
            continue
        assert best.peak_bytes <= budget
        assert best.time_s <= min(here, default=best.time_s)
        times.append(best.time_s)
    assert times
    assert times == sorted(times, reverse=True)  # with more memory never slower


def test_a_schedule_for_less_memory_serves_where_its_own_kind_fails_with_more(row: ComparisonRow) -> None:
    small = replace(row, method="lru", budget="50%", budget_bytes=50, time_s=2.0, peak_bytes=50)
    large = replace(row, method="lru", budget="70%", budget_bytes=70, time_s=None, peak_bytes=None, reason="thrashing")
    assert find_best_schedule([small, large], 70) is small
    assert find_best_schedule([small, large], 40) is None


def test_the_summary_names_the_best_heuristics(rows: list[ComparisonRow], tmp_path: Path) -> None:
    write_rows(tmp_path / "h200" / "two-layers" / "rows.csv", ComparisonRow, rows)
    lines = [line.strip("| ").split(" | ") for line in format_summary(tmp_path).splitlines() if line.startswith("| ")]
    cells = dict(zip(lines[0], lines[2], strict=True))
    assert (cells["model"], cells["budget"], cells["chen-sqrt"]) == ("two-layers", "70%", "not tried")
    assert cells["checkpoint-blocks"] == cells["sac"] == "does not apply"
    for kind in HEURISTICS:
        own = [row for row in rows if row.method in HEURISTICS[kind]]
        best = find_best_schedule(own, next(row.budget_bytes or 0 for row in rows if row.budget == "70%"))
        assert cells[f"{kind} (best)"].strip("*") == f"{format_cell(best)} ({best.method})"


def test_overheads_equal_in_print_are_all_marked_best(row: ComparisonRow) -> None:
    base = replace(row, base_s=1.0, budget_bytes=10, peak_bytes=10, bound_s=1.0)
    table = build_simulated_table(
        [
            replace(base, method="windows", time_s=1.10001),
            replace(base, method="dtr", time_s=1.10004),
            replace(base, method="lru", time_s=1.1002),
        ]
    )
    assert table[1][1:4] == ("**10.00%**", "**10.00%**", "10.02%")


def test_dominated_methods_of_a_kind_are_left_out(row: ComparisonRow) -> None:
    a = step(row, "sac", 1.2, 80)
    b = step(row, "sac-attention depth 1", 1.3, 60)
    beaten = step(row, "sac every second convolution", 1.3, 80)
    wrong = step(row, "sac matmul", 1.0, 10, "wrong")
    other = step(row, "checkpoint-blocks", 1.4, 90)
    failed = step(row, "checkpoint-blocks level 2", None, None)
    assert find_undominated([a, b, beaten, wrong, other, failed]) == [a, b, wrong, other]
    assert find_undominated([a, replace(a, method="sac level 2")]) == [a]


def test_pytorchs_own_methods_are_tuned_for_each_budget(row: ComparisonRow) -> None:
    optimum = replace(row, run_by=str(RunBy.EXECUTOR), method="windows", measured_ratio=1.2, measured_peak_bytes=60)
    found = [
        replace(optimum, budget="70%", budget_bytes=70),
        replace(
            optimum, budget="50%", budget_bytes=50, measured_ratio=None, measured_peak_bytes=None, reason="", status="infeasible"
        ),
        step(row, "eager", 1.0, 100),
        step(row, "checkpoint-blocks", None, None),
        step(row, "checkpoint-blocks depth 1", 1.3, 65),
        step(row, "sac", 1.1, 90),
        step(row, "sac-every-second depth 1", 1.204, 70),
        step(row, "memory-budget 0.50 aot_eager", 1.1, 40, "wrong"),
        step(row, "sac-attention", None, None, reason="inapplicable"),
        step(row, "auto-sac", None, None),
    ]
    assert find_best_measured(found[5:7], 70) is found[6]
    header, seventy, fifty = build_tuned_table(found)
    assert header == ("budget", "optimal schedule", "checkpoint-blocks", "sac", "memory-budget aot_eager", "auto-sac")
    assert seventy[1:] == (
        "**1.20x**, 60 B",
        "1.30x, 65 B (depth 1)",
        "**1.20x**, 70 B (sac-every-second depth 1)",
        "wrong",
        "does not run",
    )
    # Saving nothing is checkpointing.
    assert build_tuned_table([found[0], found[4], found[5]])[1][2:] == (
        "1.30x, 65 B (depth 1)",
        "1.30x, 65 B (checkpoint-blocks depth 1)",
    )
    assert fifty[1:] == ("infeasible", "OOM", "OOM", "wrong", "does not run")
    inapplicable = build_tuned_table([found[0], found[8]])[1]
    assert inapplicable[2] == "does not apply"
