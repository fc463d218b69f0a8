"""``make bench-resident``: a process that trains, and what its row says."""

import pytest

from benchmarks import resident
from benchmarks.resident import ARENA, ResidentRow
from graphs.units import format_bytes
from planner.studies.tables import format_markdown
from tests.support.models.steps import make


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> ResidentRow:
    monkeypatch.setitem(resident.MODELS, "unet", lambda: make("unet"))
    (row,) = resident.measure_process("unet", "95%", ARENA)
    return row


def test_a_process_has_its_interpreter_and_its_step_in_memory(row: ResidentRow) -> None:
    assert row.peak_bytes <= row.budget_bytes
    assert row.interpreter_bytes > 100 * 2**20 and row.highest_bytes > row.interpreter_bytes
    assert f"| unet | 95% | arena | {format_bytes(row.budget_bytes)} |" in format_markdown([row], resident.TABLE)
