"""``make bench-placement``: rows of either device alone, the serial optimum and devices side by side, and their table."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import placement
from benchmarks.placement import (
    BUDGETS,
    MEASURED,
    METHODS,
    MODELLED,
    MODELS,
    NO_LIMIT,
    PAIRS,
    STUDY,
    Pair,
    build_chain,
    compare,
    format_table,
    pair_of,
)
from planner.capture.workload.models import Workload
from planner.graphs.options.surroundings import OtherDevice
from planner.graphs.synthetic.small import make_training_chain

FOLDER = Path(__file__).parents[2] / "results" / "placement"


@pytest.mark.slow
def test_both_devices_are_no_worse_than_the_main_one() -> None:
    main = make_training_chain(3)
    pair = Pair(main, OtherDevice("other", tuple(0.5 + op.id % 2 for op in main.ops), 4.0))
    budgets = (NO_LIMIT, "75%")
    rows = [row for budget in budgets for row in compare("chain", MODELLED, build_chain(), pair, budget, limit_s=2.0)]
    assert [(row.budget, row.method) for row in rows] == [(b, method) for b in budgets for method in METHODS]
    alone, second, serial, overlapped = rows[:4]
    assert alone.time_s == 6.0 and second.time_s == 6.0
    assert overlapped.time_s <= serial.time_s <= serial.serial_s <= alone.time_s
    assert serial.placed and serial.copied and serial.status == "optimal"
    lines = format_table(rows).splitlines()
    assert len(lines) == 4 and all(budget in line for budget, line in zip(budgets, lines[2:], strict=True))


def test_a_pair_is_one_step_with_two_times() -> None:
    torch.manual_seed(0)
    pair = pair_of(build_chain(), MODELLED)
    assert pair.main.fingerprint == pair.other.fingerprint and pair.main.time_s != pair.other.time_s
    assert pair.captured is None and pair.second.bytes_per_s > 0


@pytest.mark.slow
def test_schedules_on_threads_are_executed() -> None:
    before = torch.get_num_threads()
    step = Workload(torch.nn.Linear(4, 4), torch.nn.MSELoss(), (torch.randn(2, 4), torch.randn(2, 4)))
    name = next(iter(MEASURED))
    pair = pair_of(step, name)
    quick = replace(pair.second, times_s=tuple(s and 1e-9 for s in pair.second.times_s), bytes_per_s=1e12, latency_s=0.0)
    rows = list(compare("linear", name, step, replace(pair, second=quick), NO_LIMIT, limit_s=2.0))
    assert torch.get_num_threads() == before
    for row in rows[2:]:
        assert row.placed and row.executed_s > 0 and row.kept_s > 0
        assert row.executed_other_bytes == row.predicted_other_bytes > 0
        assert row.executed_peak_bytes <= row.peak_bytes
    assert all(row.executed_s is None for row in rows[:2])


def test_bench_placement_command_writes_rows_and_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(placement.MODELS, "small", build_chain)
    monkeypatch.setattr(placement, "LIMIT_S", 1.0)
    monkeypatch.setattr(placement, "PAIRS", PAIRS[:1])
    monkeypatch.setattr(placement, "BUDGETS", BUDGETS[:1])
    placement.main(["--models", "small", "--out", str(tmp_path)])
    assert (tmp_path / "rows.csv").read_text().count("\n") == 1 + len(METHODS)
    assert METHODS[-1] in (tmp_path / "table.md").read_text()


def test_committed_rows_are_consistent_and_complete() -> None:
    rows = list(STUDY.read_kept(FOLDER))
    assert {(row.model, row.pair, row.budget) for row in rows} == {(m, p, b) for m in MODELS for p in PAIRS for b in BUDGETS}
    gained = larger = 0
    for model, pair in {(row.model, row.pair) for row in rows}:
        found = {row.method: row for row in rows if (row.model, row.pair, row.budget) == (model, pair, NO_LIMIT)}
        alone, _, serial, overlapped, windows = (found[method] for method in METHODS)
        assert windows.time_s <= alone.time_s * (1 + 1e-9)
        if not overlapped.time_s:  # XEngine's program is too large
            larger += windows.time_s < 0.99 * alone.time_s
            continue
        assert serial.status == "optimal" and serial.serial_s <= alone.time_s * (1 + 1e-6)
        assert overlapped.time_s <= serial.time_s * (1 + 1e-9)
        gained += windows.time_s < 0.99 * serial.serial_s
    assert gained >= 3 and larger >= 1
