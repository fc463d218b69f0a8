"""The bench of plans over Inductor's kernels: its tables say what the rows say, and a tiny model goes all the way through."""

from functools import partial
from pathlib import Path

import pytest
import torch

import planner
from benchmarks import compiled
from benchmarks.compiled import format_table, main
from benchmarks.compiled_case import ATEN, IN_ARENA, OURS, PEAK_OF, REFERENCE, CompiledRow, Settings, compare_compiled
from benchmarks.kept_captures import KeptCaptures
from planner.capture.workload.models import build
from planner.studies.baselines import build_memory_budget

HALF = build_memory_budget(0.5, "inductor").name
TINY = partial(build, "gpt2", layers=2, width=32, heads=4, vocab=97, seq=24, batch=8)


def test_a_step_is_captured_once_for_all_budgets() -> None:
    torch.manual_seed(0)
    workload = TINY()
    model = KeptCaptures(workload.model)
    seconds = []
    for budget in ("100%", "80%"):
        step = planner.compile(model, *workload[1:], budget=budget, time_limit_s=5.0)
        assert step.plan.eager.identical
        seconds.append((model.asked_s, model.kept_s))
    assert len(model.captures) == 1
    (first_s, none_s), (both_s, kept_s) = seconds
    assert none_s == 0
    assert both_s == 2 * first_s > 0
    assert kept_s == first_s


def test_models_of_a_missing_library_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiled, "find_spec", lambda _: None)
    assert main(["--device", "cpu", "--out", str(tmp_path), "--models", "hf-bert"]) == 0
    assert "hf-bert is left out: transformers is not installed" in capsys.readouterr().err


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
            assert row.least_bytes > row.budget_bytes
            assert row.time_s is None
            continue
        assert row.error == ""
        assert row.time_s is not None
        assert row.repeats == 2
        if row.budget:
            assert row.measured_peak_bytes <= row.budget_bytes
            assert row.misprediction <= 0.01
            assert row.bits == "identical"
            assert 0 < row.compile_s < row.plan_s
        assert (row.peer_ratio is not None) == bool(row.peer)
    assert "| tiny |" in format_table(rows)
