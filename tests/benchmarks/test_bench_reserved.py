"""``make bench-reserved``, ``bench-addresses`` and ``bench-resident``: rows of plans, buffers and processes, and their tables."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from benchmarks import addresses, reserved, resident
from benchmarks.addresses import PUBLIC, TABLE, main, solve_addresses, solve_plans
from benchmarks.reserved import ARENA, BUDGETS, COUNTS, ReservedRow, compute_reserved_with_pool_bytes, plan_row, run
from benchmarks.resident import ResidentRow
from planner.graphs.addresses import Buffer
from planner.graphs.allocators.training import Training, usage_of
from planner.graphs.synthetic.transformer import TransformerSize, transformer
from planner.graphs.units import format_bytes
from planner.studies.rows import KeptRows
from planner.studies.tables import format_markdown
from tests.support.graphs.buffers import packed_buffers
from tests.support.models.steps import make

FOLDER = Path(__file__).parents[2] / "results" / "reserved"


def assert_ordered(row: ReservedRow) -> None:
    """What is in use is not above what is reserved, nor a plan above its budget.

    Blocks in use are those of the default settings, which split less: expandable segments may have room in less than these. A
    step in an arena may reserve less than the least device on which it runs without one has.
    """
    assert row.budget_bytes and row.peak_bytes and row.in_use_bytes and row.reserved_bytes and row.expandable_bytes
    assert row.peak_bytes <= row.in_use_bytes <= row.least_device_bytes
    assert row.peak_bytes <= row.reserved_bytes and (row.counts == ARENA or row.least_device_bytes <= row.reserved_bytes)
    assert row.pool_bytes is None or row.in_use_bytes <= row.pool_bytes
    assert row.peak_bytes <= row.expandable_bytes and row.peak_bytes <= row.bound_bytes <= row.arena_bytes
    counted = {"allocated": row.peak_bytes, "reserved": row.reserved_bytes, "reserved-expandable": row.expandable_bytes}
    assert counted.get(row.counts, row.reserved_bytes) <= row.budget_bytes


@pytest.mark.parametrize("counts", COUNTS)
def test_a_row_has_all_kinds_of_memory_in_order(counts: str) -> None:
    graph = transformer(TransformerSize(layers=2, vocabulary=8192, batch=2, sequence=512))
    row = plan_row("small", replace(graph, provenance={"device": "h200"}), counts, "100%", 2.0)
    assert_ordered(row)
    assert row.allocated_overhead == (0.0 if counts == ARENA else None)


def test_pool_reserves_live_bytes_where_best_fit_leaves_no_gaps() -> None:
    sizes = ((30, 0, 1), (14, 1, 3), (30, 1, 3))
    buffers = tuple(Buffer(str(i), lower, upper, size * 2**20) for i, (size, lower, upper) in enumerate(sizes))
    training = Training((40 * 2**20,), buffers, temporaries=(20 * 2**20,))
    assert usage_of(training).reserved_bytes == (40 + 30 + 30 + 20) * 2**20  # the 14 are in the first 30
    assert compute_reserved_with_pool_bytes(training) == (40 + 44 + 20) * 2**20  # what the optimizer takes is outside


def test_a_pool_is_larger_where_best_fit_leaves_gaps() -> None:
    """The 8 stay above the 20, in whose place the 24 have no room."""
    sizes = ((20, 0, 1), (8, 0, 2), (24, 1, 2))
    buffers = tuple(Buffer(str(i), lower, upper, size * 2**20) for i, (size, lower, upper) in enumerate(sizes))
    assert compute_reserved_with_pool_bytes(Training((), buffers)) == (20 + 8 + 24) * 2**20


def test_a_budget_without_a_plan_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(reserved.MODELS, "tiny", "zoo:gpt2,layers=1,width=32,heads=2,vocab=50,batch=2,seq=16")
    rows = list(run("tiny", (), limit_s=0.3))
    assert [(row.counts, row.budget) for row in rows] == list(product(COUNTS, BUDGETS))
    without = [row for row in rows if row.counts == "reserved" and row.budget == "40%"]
    assert [row.status.startswith("InfeasibleError") for row in without] == [True]
    assert list(run("tiny", rows)) == []


def test_committed_plans_have_all_kinds_of_memory_in_order() -> None:
    rows = list(KeptRows(FOLDER / "rows.csv", ReservedRow))
    assert len({row.model for row in rows}) >= 4 and len(rows) == 20 * len({row.model for row in rows})
    planned = [row for row in rows if row.peak_bytes is not None]
    assert len(planned) >= len(rows) / 2
    for row in planned:
        assert_ordered(row)


def test_a_row_is_between_the_live_bytes_and_best_fit() -> None:
    row = solve_addresses("packed", packed_buffers(40, horizon=20, height=300, seed=2), 300, limit_s=20.0)
    assert row.live_bytes == row.bound_bytes == row.arena_bytes == 300
    assert row.best_fit_bytes >= 300
    assert f"| packed |  | 0 | {row.buffers} |" in format_markdown([row], TABLE)


def test_a_plan_has_an_arena_at_each_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(addresses.MODELS, "tiny", "zoo:gpt2,layers=2,width=32,heads=2,vocab=50,batch=8,seq=32")
    rows = list(solve_plans("tiny", ("100%", "80%"), limit_s=2.0))
    assert [row.budget for row in rows] == ["100%", "80%"]
    assert all(row.arena_bytes is not None and row.bound_bytes <= row.arena_bytes <= row.best_fit_bytes for row in rows)


def test_instances_that_are_not_here_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(addresses, "INSTANCES", tmp_path / "none")
    main(["--models", PUBLIC, "--out", str(tmp_path)])
    assert "the public instances are not here" in capsys.readouterr().out


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> ResidentRow:
    monkeypatch.setitem(resident.MODELS, "unet", lambda: make("unet"))
    (row,) = resident.measure_process("unet", "95%", resident.ARENA)
    return row


def test_a_process_has_its_interpreter_and_its_step_in_memory(row: ResidentRow) -> None:
    assert row.peak_bytes <= row.budget_bytes
    assert row.interpreter_bytes > 100 * 2**20 and row.highest_bytes > row.interpreter_bytes
    assert f"| unet | 95% | arena | {format_bytes(row.budget_bytes)} |" in format_markdown([row], resident.TABLE)
