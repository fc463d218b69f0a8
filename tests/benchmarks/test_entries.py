"""Models by every entry point: the rows are measured, and what must not be is noticed."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks import entries
from benchmarks.entries import (
    BACKEND,
    CHECKPOINT,
    COMPILE,
    ENTRIES,
    REMATERIALIZE,
    EntryRow,
    list_failures,
    try_entries,
    try_one,
)
from benchmarks.runner import Runner
from benchmarks.try_models import EAGER, MISSING, RAN, REFUSED
from planner.capture.workload.models import Workload
from tests.support.models.residual_blocks import blocks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
BLANK = EntryRow(source="tests", model="tiny", way=EAGER, status=RAN)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "_LEAST_LIMIT_S", 1.0)
    monkeypatch.setattr(entries, "_SOLVE", {"time_limit_s": 60.0, "tolerance": 0.5})


class Centred(nn.Module):
    """Its centre changes between the passes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.layer(x)
        return ((out - self.centre) ** 2).mean(), out

    @torch.no_grad()
    def update_between(self, outputs: list[torch.Tensor]) -> None:
        self.centre.copy_(outputs[-1].mean(0))


class Reading(nn.Module):
    """A graph break divides it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        return (hidden * (2.0 if hidden.sum().item() > 0 else 3.0)).sum()


def test_every_entry_point_has_rows_with_bits_and_memory() -> None:
    rows = {row.way: row for row in try_entries(blocks, BLANK, entries=ENTRIES)}
    shares = [f"{entry} at {share}" for entry in (COMPILE, CHECKPOINT, BACKEND) for share in ("100%", "50%")]
    assert list(rows) == [EAGER, *shares, f"{REMATERIALIZE} at 50%"]
    assert [(row.status, row.different) for row in rows.values()] == [(RAN, 0)] * len(rows), rows
    assert list(list_failures(list(rows.values()))) == []
    assert all(row.budget_bytes for way, row in rows.items() if way != EAGER)
    for way in shares[1::2]:
        assert (rows[way].peak_bytes or 0) < (rows[EAGER].peak_bytes or 0)


def test_model_that_is_refused_by_one_entry_point_is_tried_by_the_others() -> None:
    rows = try_entries(lambda: Workload(Reading(), None, (torch.randn(256, 16),)), BLANK, entries=(COMPILE, REMATERIALIZE))
    statuses = {row.way: row.status for row in rows}
    assert statuses["compile at 100%"] == statuses["compile at 50%"] == REFUSED
    assert statuses["rematerialize at 50%"] == RAN


def test_between_the_passes_a_model_changes_its_buffers() -> None:
    workload = Workload(Centred(), None, (torch.randn(4, 8),))
    runner = Runner.of_eager(workload)
    outcome = runner.train(workload.batch)
    assert outcome.values["buffer model.centre"].abs().sum() > 0  # type: ignore[union-attr]
    for measure in (runner.measure_storages_bytes, runner.measure_peak_bytes):
        workload.model.centre.zero_()
        measure(workload.batch)
        assert workload.model.centre.abs().sum() > 0


def test_entry_points_with_rows_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def run_in_process(trial: Callable[..., object], blank: EntryRow, limit_s: float) -> list[EntryRow]:
        asked.append(tuple(trial.keywords["entries"]))  # type: ignore[attr-defined]
        return []

    monkeypatch.setattr(entries, "run_in_process", run_in_process)
    known = [replace(BLANK, way=f"{COMPILE} at 50%"), replace(BLANK, way=f"{CHECKPOINT} at 50%", status=MISSING)]
    for wanted in ((COMPILE, CHECKPOINT), (COMPILE,)):
        list(try_one("tests/tiny", known, entries=wanted, seconds=60.0))
    assert asked == [(CHECKPOINT,)]
