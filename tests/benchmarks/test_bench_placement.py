"""``make bench-placement``: rows of either device alone, the serial optimum and devices side by side, and their table."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import placement
from benchmarks.placement import BUDGETS, COLUMNS, METHODS, MODELS, NO_LIMIT, PAIRS, chain, compare, pair_of, table
from graphs.synthetic.small import training_chain
from planner.studies.rows import read_csv

FOLDER = Path(__file__).parents[2] / "results" / "placement"


def test_both_devices_are_no_worse_than_the_main_one() -> None:
    main = training_chain(3)
    other = replace(main, ops=tuple(replace(op, time_s=0.5 + op.id % 2) for op in main.ops))
    rows = list(compare("chain", "modelled", (main, other, 4.0), [NO_LIMIT, "75%"], limit_s=10.0))
    assert [(row["budget"], row["method"]) for row in rows] == [(b, method) for b in (NO_LIMIT, "75%") for method in METHODS]
    assert all(row.keys() == set(COLUMNS) for row in rows)
    alone, second, serial, overlapped = rows[:4]
    assert alone["time_s"] == 6.0 and second["time_s"] == 6.0
    assert overlapped["time_s"] <= serial["time_s"] <= serial["serial_s"] <= alone["time_s"]  # type: ignore[operator]
    assert serial["placed"] and serial["copied"] and serial["status"] == "optimal"
    lines = table(rows).splitlines()
    assert len(lines) == 4 and all(budget in line for budget, line in zip((NO_LIMIT, "75%"), lines[2:], strict=True))


def test_a_pair_is_one_step_with_two_times() -> None:
    torch.manual_seed(0)
    main, other, bytes_per_s = pair_of(chain(), "modelled")
    assert main.fingerprint == other.fingerprint and main.time_s != other.time_s and bytes_per_s > 0


def test_threads_are_as_they_were_once_both_are_measured() -> None:
    before = torch.get_num_threads()
    step = torch.nn.Linear(4, 4), torch.nn.MSELoss(), (torch.randn(2, 4), torch.randn(2, 4))
    main, other, _ = pair_of(step, "measured")
    assert (main.provenance["threads"], other.provenance["threads"]) == (1, 2)
    assert torch.get_num_threads() == before and main.fingerprint == other.fingerprint


def test_the_command_writes_as_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "MODELS", {"small": chain})
    monkeypatch.setattr(placement, "LIMIT_S", 1.0)
    monkeypatch.setattr(placement, "PAIRS", PAIRS[:1])
    monkeypatch.setattr(placement, "BUDGETS", BUDGETS[:1])
    placement.main(["--models", "small", "--out", str(tmp_path)])
    assert (tmp_path / "rows.csv").read_text().count("\n") == 1 + len(METHODS)
    assert METHODS[-1] in (tmp_path / "table.md").read_text()


def test_the_committed_rows_say_what_the_table_does() -> None:
    rows = read_csv(FOLDER / "rows.csv", COLUMNS)
    assert {(row["model"], row["pair"], row["budget"]) for row in rows} == {
        (m, p, b) for m in MODELS for p in PAIRS for b in BUDGETS
    }
    gained = 0
    for row in rows:
        assert not row["peak_bytes"] or int(row["peak_bytes"]) <= int(row["budget_bytes"])
        assert not row["bound_s"] or float(row["bound_s"]) <= float(row["time_s"]) * (1 + 1e-9)
        assert not row["serial_s"] or row["method"] == METHODS[3] or float(row["time_s"]) <= float(row["serial_s"]) * (1 + 1e-9)
    for model, pair in {(row["model"], row["pair"]) for row in rows}:
        found = {row["method"]: row for row in rows if (row["model"], row["pair"], row["budget"]) == (model, pair, NO_LIMIT)}
        serial, overlapped = found[METHODS[2]], found[METHODS[3]]
        assert serial["status"] == "optimal" and float(serial["serial_s"]) <= float(found[METHODS[0]]["time_s"]) * (1 + 1e-6)
        assert float(overlapped["time_s"]) <= float(serial["time_s"]) * (1 + 1e-9)
        gained += float(overlapped["time_s"]) < 0.99 * float(serial["serial_s"])
    assert gained >= 3
    lines = (FOLDER / "table.md").read_text().splitlines()
    assert len(lines) == 2 + len(rows) // len(METHODS)
