"""Comparisons with real tensors: every row that is promised, each baseline beside the optimum at its own peak."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from graphs.errors import MismatchError
from planner.capture.workload import workload
from planner.capture.workload.models import Workload
from planner.cli.main import main
from planner.measure.tracing import trace
from planner.settings.plan import PlanSettings
from planner.studies.baselines import (
    Method,
    build_auto_sac,
    build_checkpoint_blocks,
    build_eager,
    build_memory_budget,
    build_sac,
    list_baseline_methods,
    select_policies,
)
from planner.studies.best_rows import HEURISTICS
from planner.studies.compare_measured import compare_measured, load_or_profile
from planner.studies.comparison_rows import OPTIMUM, ComparisonRow, RunBy
from planner.studies.comparisons import (
    build_iso_memory_table,
    describe_iso_memory,
    format_measured,
    format_tables,
    list_iso_memory_pairs,
    write_report,
)
from planner.studies.rows import read_rows, write_rows
from planner.studies.settings import StudySettings
from solvers.baselines.sac import SacRule
from solvers.result import Reason
from tests.support.budgets import between

SPEC = "zoo:mlp,batch=512,layers=6,width=16,classes=4"
METHODS = ("windows", "keep-everything", "dtr")
SETTINGS = StudySettings(model="six layers", repeats=1, time_limit_s=60.0)
STOCK = (build_eager(), build_checkpoint_blocks(), build_memory_budget(0.25), build_auto_sac())


def mlp() -> Workload:
    return workload.load(workload.parse_spec(SPEC))


@cache
def tight() -> int:
    """A budget that some methods meet and keeping everything does not."""
    return between(trace(*mlp(), passes=1))


def measure(
    folder: Path, *, stock: tuple[Method, ...] = (), done: list[str] | None = None, stop_after: int = 10**9
) -> list[ComparisonRow]:
    said = [] if done is None else done
    built = mlp()
    return compare_measured(
        built,
        load_or_profile(built, folder, PlanSettings(name="six layers")),
        [tight()],
        METHODS,
        stock,
        folder,
        SETTINGS,
        on_activity=said.append,
        should_stop=lambda: len(said) >= stop_after,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("measured")


@pytest.fixture(scope="module")
def rows(folder: Path) -> dict[tuple[str, str, str], ComparisonRow]:
    return {row.key: row for row in measure(folder, stock=STOCK)}


def test_every_method_is_measured(rows: dict[tuple[str, str, str], ComparisonRow]) -> None:
    for method in ("windows", "dtr"):
        row = rows[RunBy.EXECUTOR, method, str(tight())]
        assert row.exactness == "identical"
        assert row.measured_peak_bytes <= row.peak_bytes <= row.budget_bytes
        assert row.measured_s is not None and row.eager_s is not None and row.repeats == 1
        assert f"torch {torch.__version__.partition('+')[0]}" in row.versions
    kept = rows[RunBy.EXECUTOR, "keep-everything", str(tight())]
    assert kept.measured_s is kept.measured_peak_bytes is None
    assert "needs" in kept.message


def test_pytorch_methods_are_measured_or_reported_as_errors(rows: dict[tuple[str, str, str], ComparisonRow]) -> None:
    assert rows[RunBy.TORCH, "checkpoint-blocks", ""].exactness == "identical"
    failed = rows[RunBy.TORCH, "auto-sac", ""]
    assert failed.status == "error"
    assert failed.measured_s is None
    assert "Auto-SAC is not available" in failed.message


def test_each_baseline_meets_the_optimum_at_its_own_peak(rows: dict[tuple[str, str, str], ComparisonRow]) -> None:
    baselines = [row for row in rows.values() if row.run_by == RunBy.TORCH and row.status == "ran"]
    baselines.append(rows[RunBy.EXECUTOR, "dtr", str(tight())])
    for baseline in baselines:
        name = baseline.method if baseline.run_by == RunBy.TORCH else f"dtr at {tight()}"
        ours = rows[RunBy.EXECUTOR, OPTIMUM, f"peak of {name}"]
        assert ours.budget_bytes == baseline.measured_peak_bytes
        assert ours.eager_s == baseline.eager_s  # of one round
        assert ours.measured_peak_bytes <= baseline.measured_peak_bytes
    assert len([key for key in rows if key[2].startswith("peak of")]) == len(baselines)


def test_only_undominated_methods_are_paired_with_the_optimum(tmp_path: Path) -> None:
    """Of the heuristics of DTR the fastest, of PyTorch's methods those that no other of their kind beats."""
    built = mlp()
    stock = (
        build_checkpoint_blocks(),
        replace(build_checkpoint_blocks(), name="checkpoint-blocks level 9"),
        build_sac(SacRule.ATTENTION),
    )
    captured = load_or_profile(built, tmp_path, PlanSettings(name="six layers"))
    heuristics = ("windows", "dtr", "lru", "largest")
    found = compare_measured(
        built, captured, [tight()], heuristics, stock, tmp_path, SETTINGS, on_activity=str, should_stop=lambda: False
    )
    rows = {row.key: row for row in found}
    replayed = [row for row in found if row.method in HEURISTICS["dtr"]]
    assert {row.method for row in replayed} == {"dtr", "lru", "largest"}
    times = {row.method: row.time_s for row in replayed if row.time_s is not None}
    met = {row.budget.removeprefix("peak of ") for row in found if row.budget.startswith("peak of ")}
    of_dtr = [name for name in met if name.endswith(f"at {tight()}")]
    assert len(of_dtr) == 1
    assert times[of_dtr[0].split()[0]] == min(times.values())
    # Both take the same memory: of equal ones, or of the slower one, there is no pair, unless beside the optimum it is faster.
    assert met & {"checkpoint-blocks", "checkpoint-blocks level 9"}
    failed = rows[RunBy.TORCH, "sac-attention", ""]
    assert (failed.status, failed.reason) == ("error", Reason.INAPPLICABLE)
    assert "| sac-attention | does not apply: sac-attention saves nothing" in format_tables(found)
    assert "## PyTorch's own, tuned for each budget" in format_tables(found)


def test_wrong_gradients_are_shown_and_never_best(rows: dict[tuple[str, str, str], ComparisonRow]) -> None:
    wrong = rows[RunBy.TORCH, "memory-budget 0.25 aot_eager", ""]
    assert wrong.exactness == "wrong"
    assert format_measured(wrong) == "wrong"
    fast = replace(wrong, measured_ratio=1e-9, run_by=RunBy.EXECUTOR, method="wrong", budget=str(tight()), budget_bytes=10**9)
    text = format_tables([*rows.values(), fast])
    assert "**wrong**" not in text
    cells = {line[0]: line for line in build_iso_memory_table(list_iso_memory_pairs(list(rows.values())))}
    assert cells[wrong.method][1] == "wrong"
    assert "**" in cells[wrong.method][5]


def test_where_the_optimum_is_slower_is_said(rows: dict[tuple[str, str, str], ComparisonRow]) -> None:
    found = list(rows.values())
    slow = [replace(row, measured_ratio=9.0 if row.method == OPTIMUM else 1.0) for row in found]
    said = describe_iso_memory(list_iso_memory_pairs(slow))
    assert "checkpoint-blocks (" in said and "eager (" in said
    assert "memory-budget" not in said  # faster, but wrong
    fast = [replace(row, measured_ratio=0.1 if row.method == OPTIMUM else 1.0) for row in found]
    assert describe_iso_memory(list_iso_memory_pairs(fast)) == "Nowhere was the optimal schedule slower."


def test_rows_that_are_known_are_not_measured_again(rows: dict[tuple[str, str, str], ComparisonRow], folder: Path) -> None:
    write_rows(
        folder / "rows.csv",
        ComparisonRow,
        [replace(row, message="marked") for row in rows.values() if row.method != "checkpoint-blocks"],
    )
    said: list[str] = []
    again = {row.key: row for row in measure(folder, stock=STOCK, done=said)}
    assert again.keys() == rows.keys()
    assert {key for key, row in again.items() if row.message != "marked"} == {
        (RunBy.TORCH, "checkpoint-blocks", ""),
        (RunBy.EXECUTOR, OPTIMUM, "peak of checkpoint-blocks"),
    }
    assert not any("dtr" in text for text in said)
    assert len({row.base_s for row in again.values()}) == 1  # times of ops are not measured again


@pytest.mark.slow
def test_a_stopped_comparison_keeps_nothing_half_done(tmp_path: Path) -> None:
    assert measure(tmp_path, stop_after=1) == []
    found = measure(tmp_path)
    assert {row.method for row in found} == set(METHODS)


def test_times_of_another_graph_are_refused(folder: Path, rows: dict[tuple[str, str, str], ComparisonRow]) -> None:
    other = workload.load(workload.parse_spec(SPEC.replace("batch=512", "batch=500")))
    with pytest.raises(MismatchError, match="another graph"):
        load_or_profile(other, folder, PlanSettings())


def test_tables_and_figures_are_made_of_the_csv(
    rows: dict[tuple[str, str, str], ComparisonRow], folder: Path, tmp_path: Path
) -> None:
    text = format_tables(list(rows.values()))
    assert "## Measured" in text and "## At equal peak" in text
    assert "| auto-sac | does not run: Auto-SAC is not available" in text
    write_rows(tmp_path / "rows.csv", ComparisonRow, list(rows.values()))
    write_report(read_rows(tmp_path / "rows.csv", ComparisonRow), tmp_path)
    assert (tmp_path / "table.md").read_text() == text
    assert {file.name for file in tmp_path.iterdir()} == {"rows.csv", "table.md", "overhead.png", "memory.png", "measured.png"}


@pytest.mark.slow
def test_with_copies_to_the_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--options", "offload", "--link", "1000GB/s", "--host-budget", "1GB", "--repeats", "1", "--passes", "1"]
    methods = ("windows", "keep-everything", "save-on-cpu", "offload-activations")
    words = ["--measure", "--budgets", "75%,100%", "--methods", ",".join(methods), "--jobs", "1", "--quiet", *asked]
    assert main(["compare", SPEC, *words, "-o", str(tmp_path)]) == 0
    assert " on the host" in capsys.readouterr().out
    rows = {row.key: row for row in read_rows(tmp_path / "rows.csv", ComparisonRow)}
    for name in methods[2:]:
        row = rows[RunBy.TORCH, name, ""]
        assert row.exactness == "identical" and (row.measured_host_bytes or 0) > 0
        assert (row.measured_peak_bytes or 0) < (rows[RunBy.TORCH, "eager", ""].measured_peak_bytes or 0)
    ours = rows[RunBy.EXECUTOR, "windows", "75%"]
    assert ours.exactness == "identical" and (ours.measured_peak_bytes or 0) <= (ours.peak_bytes or 0) <= (ours.budget_bytes or 0)
    assert (ours.measured_host_bytes or 0) > 0
    imitated = rows[RunBy.EXECUTOR, "save-on-cpu", "100%"]
    assert imitated.exactness == "identical" and (imitated.measured_host_bytes or 0) > 0
    assert rows[RunBy.EXECUTOR, "keep-everything", "100%"].measured_host_bytes == 0  # it has no copies, and runs without them
    assert rows[RunBy.TORCH, "eager", ""].measured_host_bytes == 0


def test_options_of_the_step_are_traced_and_measured(tmp_path: Path) -> None:
    asked = ("--options", "in-place", "--methods", "windows", "--budgets", "90%", "--repeats", "1", "--passes", "1")
    assert main(["compare", SPEC, "--measure", *asked, "--jobs", "1", "--quiet", "-o", str(tmp_path)]) == 0
    rows = {row.key: row for row in read_rows(tmp_path / "rows.csv", ComparisonRow)}
    assert rows[RunBy.EXECUTOR, "windows", "90%"].exactness == "identical"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("model.json",), "is a graph"),
        (("zoo:mlp", "--roofline", "h200"), "nothing is run"),
        (("zoo:mlp", "--memory", "reserved"), "peaks in allocated bytes"),
    ],
)
def test_only_models_that_run_are_measured(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *words, "--measure", "-o", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_with_methods_named_only_pytorchs_own_of_these_names_run() -> None:
    methods = list_baseline_methods(nn.Sequential(nn.Linear(2, 2)))
    names = [method.name for method in select_policies(methods, ("windows", "sac", "memory-budget"))]
    assert names[:2] == ["eager", "sac"]
    assert names[-1] == "auto-sac"
    assert {name.split()[0] for name in names} == {"eager", "sac", "memory-budget", "auto-sac"}
    assert [method.name for method in select_policies(methods, ("windows", "dtr"))] == ["eager"]
