"""The bench of plans over Inductor's kernels: its tables say what the rows say, and a tiny model goes all the way through."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import planner
from benchmarks import compiled
from benchmarks.compiled import MODELS, main, summary, table
from benchmarks.compiled_case import ATEN, IN_ARENA, OURS, PEAK_OF, REFERENCE, CompiledRow, Settings, compare_compiled
from benchmarks.kept_captures import KeptCaptures
from planner.capture.workload.models import build
from planner.studies.baselines import memory_budget
from planner.studies.rows import read_rows

COMMITTED = Path(__file__).parents[2] / "results" / "compiled"
HALF = memory_budget(0.5, "inductor").name
TINY = partial(build, "gpt2", layers=2, width=32, heads=4, vocab=97, seq=24, batch=8)

BLANK = CompiledRow(
    model="net",
    method=REFERENCE,
    budget="",
    measured_peak_bytes=1000,
    time_s=0.02,
    ratio=1.0,
    repeats=3,
    seed=0,
    machine="m",
    commit="c",
    torch="2",
)


def plan(budget: str, budget_bytes: int, ratio: float, *, method: str = OURS) -> CompiledRow:
    taken = {"predicted_peak_bytes": budget_bytes, "measured_peak_bytes": budget_bytes, "gap": 0.001, "bits": "identical"}
    made = {"variant": "keep", "plan_s": 12.0, "compile_s": 9.0}
    return replace(BLANK, method=method, budget=budget, budget_bytes=budget_bytes, ratio=ratio, **taken, **made)  # type: ignore[arg-type]


def none(budget: str, budget_bytes: int, least_bytes: int | None) -> CompiledRow:
    row = replace(plan(budget, budget_bytes, 1.0), predicted_peak_bytes=None, measured_peak_bytes=None, time_s=None, ratio=None)
    return replace(row, bits="", variant="", least_bytes=least_bytes, error="it cannot be")


ROWS = [
    BLANK,
    replace(plan("100%", 1000, 1.2, method=ATEN), variant=""),
    replace(BLANK, method=HALF, measured_peak_bytes=700, ratio=1.1, bits="rounded"),
    plan("100%", 1000, 1.01),
    plan("50%", 500, 1.07),
    none("30%", 300, 420),
    replace(plan(f"{PEAK_OF}{HALF}", 700, 1.04), peer_ratio=0.945),
]


def test_each_method_has_a_line_with_a_cell_for_each_budget() -> None:
    text = table(ROWS)
    assert "| model | torch.compile | kernels | 100% | 50% | 30% |" in text
    assert "| net | 20 ms, 1.00 kB | Inductor's kernels | 1.010x keep | 1.070x keep | infeasible, needs 42.0% |" in text
    assert "| net | 20 ms, 1.00 kB | ATen's ops | 1.200x |  |  |" in text
    assert "| net | 0.50 | 700 B | 70.0% | 1.100x | rounded | 1.040x keep | 0.945x | 0.10% | 12 s | 9 s |" in text


def test_summary_counts_plans_within_budget_and_exact() -> None:
    assert list(summary(ROWS)) == [
        "of 3 plans over Inductor's kernels, 0 take more than their budget",
        "of 3 plans over Inductor's kernels, 3 have a measured peak within 1% of the predicted one, 3 to the byte",
        "of 3 plans over Inductor's kernels, 3 have the loss and gradients of torch.compile to the last bit",
        "at torch.compile's own peak: median 1.010x, worst 1.010x of its time",
        "at the Memory Budget API's peaks: median 0.945x, worst 0.945x of its time",
        "at the Memory Budget API's peaks: 0 without a plan",
        "of 1 runs of the Memory Budget API, 0 fail or compute other gradients",
    ]


def test_plans_in_arenas_are_compared_with_those_without() -> None:
    rows = [*ROWS, plan("100%", 1000, 1.0, method=IN_ARENA), plan("50%", 500, 1.177, method=IN_ARENA)]
    assert "of 2 plans in an arena, 0 take more than their budget" in summary(rows)
    assert "of 2 plans in an arena, 2 have the bits of torch.compile" in summary(rows)
    assert "in an arena, of the time without: median 1.045x, worst 1.100x" in summary(rows)
    assert "| net | 20 ms, 1.00 kB | Inductor's kernels, in an arena | 1.000x keep | 1.177x keep |  |" in table(rows)
    over = [*rows[:-1], replace(rows[-1], measured_peak_bytes=501, bits="rounded")]
    assert "of 2 plans in an arena, 1 take more than their budget (net 50%)" in summary(over)
    assert "of 2 plans in an arena, 1 have the bits of torch.compile (net 50%)" in summary(over)


@pytest.mark.parametrize(
    ("at", "changed", "said"),
    [
        (4, {"measured_peak_bytes": 501}, "1 take more than their budget (net 50%)"),
        (4, {"predicted_peak_bytes": 490}, "2 have a measured peak within 1% of the predicted one, 2 to the byte (net 50%)"),
        (4, {"bits": "rounded"}, "2 have the loss and gradients of torch.compile to the last bit (net 50%)"),
        (3, {"ratio": 1.03}, "worst 1.030x of its time (net 100%)"),
        (6, {"peer_ratio": 1.002}, f"worst 1.002x of its time (net {PEAK_OF}{HALF})"),
        (6, {"measured_peak_bytes": None, "peer_ratio": None}, f"1 without a plan (net {PEAK_OF}{HALF})"),
        (2, {"bits": "wrong"}, f"1 fail or compute other gradients (net {HALF})"),
    ],
)
def test_summary_names_plans_that_miss_a_goal(at: int, changed: dict[str, object], said: str) -> None:
    assert not any(line.endswith(said) for line in summary(ROWS))
    rows = [*ROWS[:at], replace(ROWS[at], **changed), *ROWS[at + 1 :]]  # type: ignore[arg-type]
    assert any(line.endswith(said) for line in summary(rows))


def test_table_shows_the_error_of_a_failed_row() -> None:
    fails = {"measured_peak_bytes": None, "time_s": None, "ratio": None, "error": "RuntimeError: no"}
    budget = replace(ROWS[2], **fails)  # type: ignore[arg-type]
    assert "| net | 0.50 | RuntimeError: no |" in table([*ROWS[:2], budget, *ROWS[3:6]])
    assert "| net | RuntimeError: no | none |" in table([replace(BLANK, **fails), *(replace(r, model="other") for r in ROWS)])  # type: ignore[arg-type]


def test_a_step_is_captured_once_for_all_budgets() -> None:
    torch.manual_seed(0)
    workload = TINY()
    model = KeptCaptures(workload.model)
    seconds = []
    for budget in ("100%", "80%"):
        step = planner.compile(model, *workload[1:], budget=budget, time_limit_s=5.0)
        assert step.plan.eager is not None
        assert step.plan.eager.identical
        seconds.append((model.asked_s, model.kept_s))
    assert len(model.captures) == 1
    (first_s, none_s), (both_s, kept_s) = seconds
    assert none_s == 0
    assert both_s == 2 * first_s > 0
    assert kept_s == first_s


def test_models_that_are_there_are_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = []

    def measure(name: str, known: object, **_: object) -> list[CompiledRow]:
        made.append(name)
        return [replace(row, model=name) for row in ROWS]

    monkeypatch.setattr(compiled, "measure", measure)
    monkeypatch.setattr(compiled, "find_spec", lambda _: None)
    words = ["--device", "cpu", "--out", str(tmp_path), "--models"]
    main([*words, "vit,hf-bert"])
    said = capsys.readouterr()
    assert "hf-bert is left out: transformers is not installed" in said.err
    assert said.out == (tmp_path / "table.md").read_text() == table(read_rows(tmp_path / "rows.csv", CompiledRow))
    main([*words, "gpt2,vit"])
    assert made == ["vit", "gpt2"]
    main([*words, "vit", "--fresh"])
    assert made == ["vit", "gpt2", "vit"]
    rows = read_rows(tmp_path / "rows.csv", CompiledRow)
    assert rows == [replace(row, model=name) for name in ("gpt2", "vit") for row in ROWS]  # in the order of the models


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_tiny_model_goes_all_the_way_through() -> None:
    torch.manual_seed(0)
    settings = Settings(shares=(1.0, 0.7, 0.01), fractions=(0.5,), time_limit_s=5.0, repeats=2)
    seen: list[CompiledRow] = []
    rows = compare_compiled(TINY(), "tiny", settings, on_row=seen.append)
    assert [(row.method, row.budget) for row in rows] == [
        (REFERENCE, ""),
        *((ATEN, budget) for budget in ("100%", "70%", "1%")),
        (HALF, ""),
        *((OURS, budget) for budget in ("100%", "70%", "1%", f"{PEAK_OF}{HALF}")),
        *((IN_ARENA, budget) for budget in ("100%", "70%", "1%")),
    ]
    assert len(seen) == len(rows)
    found = {(row.method, row.budget): row for row in rows}
    assert found[REFERENCE, ""].ratio == 1
    for row in rows:
        if row.budget == "1%":
            assert row.least_bytes is not None
            assert row.budget_bytes is not None
            assert row.least_bytes > row.budget_bytes
            assert row.time_s is None
            continue
        assert row.error == ""
        assert row.time_s is not None
        assert row.repeats == 2
        if row.budget:
            assert row.measured_peak_bytes is not None
            assert row.budget_bytes is not None
            assert row.measured_peak_bytes <= row.budget_bytes
            assert row.misprediction is not None
            assert row.misprediction <= 0.01
            assert row.bits == "identical"
            assert row.plan_s is not None
            assert row.compile_s is not None
            assert 0 < row.compile_s < row.plan_s
        assert (row.peer_ratio is not None) == bool(row.peer)
    assert "| tiny |" in table(rows)


def test_committed_plans_are_exact_and_within_their_budgets() -> None:
    rows = read_rows(COMMITTED / "rows.csv", CompiledRow)
    assert {row.model for row in rows} <= set(MODELS)
    ours = [row for row in rows if row.method == OURS and row.measured_peak_bytes is not None]
    assert ours
    for row in ours:
        assert row.measured_peak_bytes is not None
        assert row.budget_bytes is not None
        assert row.measured_peak_bytes <= row.budget_bytes
        assert row.misprediction is not None
        assert row.misprediction <= 0.01
        assert row.bits == "identical"
