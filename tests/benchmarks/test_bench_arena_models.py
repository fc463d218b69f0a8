"""Models in an arena and without: the rows are measured, and failures are named."""

import shutil

import pytest

from benchmarks import arena_models
from benchmarks.arena_models import EAGER, IN_ARENA, PLANNED, ArenaModelRow, compare_plans, list_failures
from benchmarks.try_models import RAN, REFUSED
from graphs.errors import PlannerError
from tests.support.models.residual_blocks import blocks

BLANK = ArenaModelRow(source="tests", model="tiny", way=EAGER, status=RAN, different=0)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the allocator is compiled with g++")
@pytest.mark.usefixtures("solves_at_once")
def test_a_model_in_an_arena_and_without() -> None:
    rows = {row.way: row for row in compare_plans(blocks, BLANK, repeats=1)}
    assert list(rows) == [EAGER, PLANNED, IN_ARENA]
    assert all(row.status == RAN and row.different == 0 and row.ratio for row in rows.values())
    arena = rows[IN_ARENA]
    assert arena.counted_bytes < 0.1 * arena.arena_bytes
    assert rows[PLANNED].arena_bytes is None
    assert list(list_failures(list(rows.values()))) == []


def test_a_refused_plan_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **how: object) -> None:
        raise PlannerError(f"not with arena={how['arena']}")

    monkeypatch.setattr(arena_models.planner, "compile", refuse)
    monkeypatch.setattr(arena_models, "_LEAST_LIMIT_S", 0.5)
    found = {row.way: (row.status, row.message) for row in compare_plans(blocks, BLANK, repeats=1)}
    assert found[PLANNED] == (REFUSED, "not with arena=False")
    assert found[IN_ARENA] == (REFUSED, "not with arena=True")
