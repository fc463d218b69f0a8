"""Trying models: what is measured is so, what must not be is noticed, and no model ends the run."""

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import try_models
from benchmarks.models import handwritten
from benchmarks.runner import build_whole_step
from benchmarks.storages import LiveStorages
from benchmarks.try_models import (
    AT_ITS_PEAK,
    CHECKPOINTING,
    EAGER,
    FAILED,
    FIRST,
    MISSING,
    PLANNED,
    RAN,
    REFUSED,
    STUDY,
    Trial,
    TriedRow,
    iterate_rows,
    try_one,
)
from planner.capture.workload.models import Workload
from planner.measure.steps import get_loss
from tests.support.models.residual_blocks import blocks

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning:torch.*"), pytest.mark.usefixtures("solves_at_once")]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(try_models, "_LEAST_LIMIT_S", 1.0)
    monkeypatch.setattr(try_models, "_SOLVE_LIMIT_S", 60.0)
    monkeypatch.setattr(try_models, "_TOLERANCE", 0.5)
    monkeypatch.setattr(try_models, "SHARES", (0.5,))


def tried(make: Callable[[], Workload]) -> dict[str, TriedRow]:
    row = TriedRow(source="tests", model="tiny", way=EAGER, status=RAN)
    return {row.way: row for row in Trial(make, row, repeats=1).run()}


class Branching(nn.Module):
    """Its graph has as many ops as its data says."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        return hidden[hidden.sum(1) > 0].sum()


def test_every_way_to_train_is_a_row() -> None:
    rows = tried(blocks)
    at_shares = [f"{PLANNED} at {share:.0%}" for share in try_models.SHARES]
    both = [f"{way}{which}" for way in (*at_shares, AT_ITS_PEAK) for which in (FIRST, "")]
    assert list(rows) == [EAGER, *both[:-2], CHECKPOINTING, *both[-2:]]
    assert {row.status for row in rows.values()} == {RAN}
    assert {row.different for row in rows.values()} == {0}
    for row in [rows[way] for way in both]:
        assert row.storages_bytes is not None and row.peak_bytes is not None and row.budget_bytes is not None
        assert row.storages_bytes <= row.peak_bytes <= row.budget_bytes
        assert row.swaps is not None and (row.ratio is None) == row.way.endswith(FIRST)
    for row in [rows[way] for way in (*at_shares, AT_ITS_PEAK)]:
        assert row.ratio is not None and row.ratio > 0
    assert rows[AT_ITS_PEAK].budget_bytes == rows[CHECKPOINTING].peak_bytes
    assert rows[AT_ITS_PEAK].ratio_of_checkpointing is not None
    assert (rows[CHECKPOINTING].peak_bytes or 0) < (rows[EAGER].peak_bytes or 0)


def test_refused_model_is_a_row() -> None:
    rows = tried(lambda: Workload(Branching(), None, (torch.randn(8, 4),)))
    assert list(rows) == [EAGER, PLANNED]
    assert rows[PLANNED].status == REFUSED
    assert "depends on the data" in str(rows[PLANNED].message)


@pytest.mark.parametrize(
    ("error", "status"),
    [(ModuleNotFoundError("No module named 'timm'"), MISSING), (ValueError("wrong"), FAILED), (SystemError("worse"), FAILED)],
)
def test_model_that_cannot_be_built_is_a_row(error: Exception, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Workload:
        raise error

    monkeypatch.setattr(try_models, "list_sources", lambda: {"tests": {"broken": make}})
    blank = TriedRow(source="tests", model="broken", way=EAGER, status=RAN)
    (row,) = iterate_rows(partial(try_models.try_model, repeats=1), blank)
    assert (row.status, row.message) == (status, f"{type(error).__name__}: {error}")


def test_a_process_that_dies_or_does_not_end_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(try_models, "_LIMIT_S", 0.01)
    (row,) = try_one("by hand/mlp", (), repeats=1)
    assert (row.status, row.message) == (FAILED, "not ended after 0 s")
    monkeypatch.setattr(try_models, "_LIMIT_S", 60.0)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    (row,) = try_one("by hand/mlp", (), repeats=1)
    assert (row.status, row.message) == (FAILED, "exit code 1: it said nothing")


def test_storages_count_from_their_first_op_until_they_are_freed() -> None:
    x = torch.zeros(1000)
    with LiveStorages([x, x.view(10, 100)]) as storages:
        assert storages.live_bytes == 4000
        y = x + 1
        view = y.view(10, 100)[2:]
        del y
        assert storages.live_bytes == 8000
        del view
        assert storages.live_bytes == 4000
        weight = torch.ones(1000, requires_grad=True)
        (weight.exp().sin()).sum().backward()
        assert storages.live_bytes == 12000  # with the gradient
    assert storages.peak_bytes > 16000


def test_models_that_are_in_the_csv_are_not_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []
    statuses = iter((RAN, MISSING, RAN, RAN, RAN))

    def try_one(name: str, known: object, *, repeats: int) -> list[TriedRow]:
        source, model = name.split("/")
        asked.append(name)
        about = {"source": source, "model": model, "way": EAGER, "status": next(statuses)}
        return [TriedRow(**about, storages_bytes=90, peak_bytes=100, different=0)]  # type: ignore[arg-type]

    main = replace(try_models.main, study=replace(STUDY, run=try_one), out=str(tmp_path))
    names = ["by hand/mlp", "timm/vit"]
    words = ["--models", ",".join(names)]
    for more, expected in (([], names), ([], ["timm/vit"]), ([], []), (["--fresh"], names)):
        asked.clear()
        assert main([*words, *more]) == 0
        assert asked == expected


@pytest.mark.parametrize("make", handwritten.MODELS.values(), ids=handwritten.MODELS)
def test_every_handwritten_model_has_a_loss(make: Callable[[], Workload]) -> None:
    torch.manual_seed(0)
    workload = make()
    loss = get_loss(build_whole_step(workload)(*workload.batch))
    loss.backward()
    assert loss.isfinite() and any(p.grad is not None for p in workload.model.parameters())
