"""``make bench-arena-training``: training in an arena takes what was planned, with the bits of eager PyTorch."""

import shutil

import pytest

from benchmarks import arena_training
from benchmarks.arena_training import ArenaTrainingRow
from planner.capture.workload.models import build
from planner.studies.tables import format_markdown

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the allocator is compiled with g++")


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> ArenaTrainingRow:
    monkeypatch.setitem(arena_training.MODELS, "vit", lambda: build("mlp", batch=256, layers=3, width=64, classes=10, dropout=0))
    (row,) = arena_training.measure_training("vit", "adamw, foreach", 1)
    return row


def test_arena_training_takes_the_planned_memory_exactly(row: ArenaTrainingRow) -> None:
    assert row.identical
    assert row.is_predicted
    assert row.plain_bytes <= row.arena_bytes < row.beside_bytes
    assert 0 < row.evaluation_bytes < row.evaluating_bytes <= row.slab_bytes
    assert not list(arena_training.list_failures([row]))
    assert "| vit | adamw, foreach |" in format_markdown([row], arena_training.TABLE)
