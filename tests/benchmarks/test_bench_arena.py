"""``make bench-arena``: what it measures of one model, and what its table says."""

import pytest

import planner
from benchmarks import arena
from benchmarks.arena import TABLE
from planner.studies.tables import format_markdown
from tests.support.models.steps import make


def test_a_plan_is_measured_with_and_without_an_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(arena.MODELS, "unet", lambda: make("unet"))
    plan = planner.solve(planner.trace(*make("unet"), passes=1), "90%", tolerance=0.05)
    (row,) = arena.measure_plan("unet", "90%", "as it is", plan, 2)
    assert row.identical
    assert row.arena_bytes <= 1.05 * row.peak_bytes
    assert 0 <= row.counted_bytes - row.outside_bytes <= 4  # the gradient of the loss, which autograd makes
    assert min(row.eager_s, row.plan_ratio, row.arena_ratio) > 0
    assert "| unet | 90% | as it is |" in format_markdown([row], TABLE)
