"""The bench of the eager runtime: what it measures is so, and the committed table is what its rows say."""

from functools import partial
from pathlib import Path

import pytest

from benchmarks import eager
from benchmarks.eager import NEAR, PLANNED, PLENTY, EagerRow, main
from planner.settings.plan import PlanSettings
from planner.studies.rows import read_rows
from planner.train.eager import step_plans
from tests.support.eager.solves import SolvedWhenWaitedFor


def test_bench_eager_runs_a_small_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "SHARES", (0.7,))
    monkeypatch.setattr(step_plans, "BackgroundSolve", SolvedWhenWaitedFor)
    monkeypatch.setattr(step_plans, "PlanSettings", partial(PlanSettings, work_limit=0.5))
    assert main(["--models", "tree", "--steps", "1", "--ways", f"lru,{PLANNED}", "--out", str(tmp_path)]) == 0
    plenty, near, tight, planned = read_rows(tmp_path / "rows.csv", EagerRow)
    assert (plenty.share, plenty.evictions, plenty.recomputed_ops, plenty.exact) == (PLENTY, 0, 0, True)
    assert (near.share, near.evictions, near.exact) == (NEAR, 0, True)
    assert (tight.share, tight.heuristic, tight.exact) == ("70%", "lru", True)
    assert tight.evictions and tight.recomputed_ops
    assert (planned.heuristic, planned.exact) == (PLANNED, True)
    assert planned.plan_ratio >= planned.bound_ratio >= 1
    assert tight.peak_bytes <= tight.budget_bytes < plenty.eager_peak_bytes
