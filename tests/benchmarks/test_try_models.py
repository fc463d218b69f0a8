"""Trying models: what is measured is so, what must not be is noticed, and no model ends the run."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import try_models
from benchmarks.models import handwritten
from benchmarks.models.parts import FunctionModule
from benchmarks.runner import Runner, build_whole_step
from benchmarks.storages import LiveStorages
from benchmarks.try_models import (
    AT_ITS_PEAK,
    BACKEND,
    CHECKPOINT,
    CHECKPOINTING,
    COMPILE,
    EAGER,
    ENTRIES,
    FAILED,
    FIRST,
    IN_ARENA,
    MISSING,
    PLANNED,
    RAN,
    REFUSED,
    REMATERIALIZE,
    STUDY,
    Trial,
    TriedRow,
    list_failures,
    try_model,
    try_one,
)
from planner.capture.workload.models import Workload
from planner.measure.steps import get_loss
from planner.solvers import child_process
from tests.support.models.residual_blocks import blocks

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning:torch.*"), pytest.mark.usefixtures("solves_at_once")]

BLANK = TriedRow(source="tests", model="tiny", way=EAGER, status=RAN)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(try_models, "_LEAST_LIMIT_S", 1.0)
    monkeypatch.setattr(try_models, "_SOLVE", {"time_limit_s": 60.0, "tolerance": 0.5})
    monkeypatch.setattr(try_models, "SHARES", (0.5,))


def tried(make: Callable[[], Workload], *ways: str) -> dict[str, TriedRow]:
    return {row.way: row for row in Trial(make, BLANK, ways=ways, repeats=1).run()}


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


def branching(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Its graph has as many ops as its data says."""
    hidden = m.inner(x)
    return hidden[hidden.sum(1) > 0].sum()


AT_HALF = f"{PLANNED} at 50%"
SHARED = tuple(f"{entry} at {share}" for entry in (COMPILE, CHECKPOINT, BACKEND) for share in ("100%", "50%"))


@pytest.mark.parametrize(
    ("ways", "rows"),
    [
        (
            (PLANNED, CHECKPOINTING),
            (f"{AT_HALF}{FIRST}", AT_HALF, CHECKPOINTING, f"{AT_ITS_PEAK}{FIRST}", AT_ITS_PEAK),
        ),
        pytest.param(
            (IN_ARENA,),
            tuple(f"{way}{which}" for way in (PLANNED, IN_ARENA) for which in (FIRST, "")),
            marks=[pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="it compiles the allocator")],
        ),
        (ENTRIES, (*SHARED, f"{REMATERIALIZE} at 50%")),
    ],
    ids=["plans", "arena", "entries"],
)
def test_every_way_to_train_has_a_row_with_bits_and_memory(ways: tuple[str, ...], rows: tuple[str, ...]) -> None:
    found = tried(blocks, *ways)
    assert tuple(found) == (EAGER, *rows)
    assert [(row.status, row.different) for row in found.values()] == [(RAN, 0)] * len(found), found
    assert list(list_failures(list(found.values()))) == []
    for way, row in found.items():
        assert way in (EAGER, CHECKPOINTING) or row.budget_bytes
        if way.startswith((PLANNED, AT_ITS_PEAK)):
            assert row.storages_bytes <= row.peak_bytes <= row.budget_bytes
        if way.startswith((PLANNED, AT_ITS_PEAK, IN_ARENA)):
            assert row.swaps is not None and (row.ratio is None) == way.endswith(FIRST)
        if way == CHECKPOINTING or way in SHARED[1::2]:
            assert row.peak_bytes < found[EAGER].peak_bytes
    if CHECKPOINTING in ways:
        assert found[AT_ITS_PEAK].budget_bytes == found[CHECKPOINTING].peak_bytes
        assert found[AT_ITS_PEAK].other_ratio is not None
    if IN_ARENA in ways:
        arena = found[IN_ARENA]
        assert arena.other_ratio and arena.outside_bytes < 0.1 * arena.arena_bytes
        assert found[PLANNED].arena_bytes is None


def test_refused_model_is_a_row_and_tried_by_the_other_ways() -> None:
    rows = tried(lambda: Workload(Reading(), None, (torch.randn(256, 16),)), COMPILE, REMATERIALIZE)
    assert [rows[way].status for way in ("compile at 100%", "compile at 50%", "rematerialize at 50%")] == [REFUSED, REFUSED, RAN]
    rows = tried(lambda: Workload(FunctionModule(branching, inner=nn.Linear(4, 4)), None, (torch.randn(8, 4),)), PLANNED)
    assert list(rows) == [EAGER, PLANNED]
    assert rows[PLANNED].status == REFUSED
    assert "depends on the data" in str(rows[PLANNED].message)


def test_between_the_passes_a_model_changes_its_buffers() -> None:
    workload = Workload(Centred(), None, (torch.randn(4, 8),))
    runner = Runner.of_eager(workload)
    outcome = runner.train(workload.batch)
    assert outcome.values["buffer model.centre"].abs().sum() > 0
    for measure in (runner.measure_storages_bytes, runner.measure_peak_bytes):
        workload.model.centre.zero_()
        measure(workload.batch)
        assert workload.model.centre.abs().sum() > 0


@pytest.mark.parametrize(
    ("error", "status"),
    [(ModuleNotFoundError("No module named 'timm'"), MISSING), (ValueError("wrong"), FAILED), (SystemError("worse"), FAILED)],
)
def test_model_that_cannot_be_built_is_a_row(error: Exception, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Workload:
        raise error

    monkeypatch.setattr(try_models, "list_sources", lambda: {"tests": {"broken": make}})
    (row,) = try_model(replace(BLANK, model="broken"), ways=(PLANNED,), repeats=1)
    assert (row.status, row.message) == (status, f"{type(error).__name__}: {error}")


def test_a_process_that_dies_or_does_not_end_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = try_one("by hand/mlp", (), ways=(PLANNED,), seconds=0.01, repeats=1)
    assert (row.status, row.message) == (FAILED, "not ended after 0 s")
    monkeypatch.setattr(child_process, "get_executable", lambda: shutil.which("false"))
    (row,) = try_one("by hand/mlp", (), ways=(PLANNED,), seconds=60.0, repeats=1)
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

    def try_one(name: str, known: object, **_: object) -> list[TriedRow]:
        source, model = name.split("/")
        asked.append(name)
        about = {"source": source, "model": model, "way": EAGER, "status": next(statuses)}
        return [TriedRow(**about, storages_bytes=90, peak_bytes=100, different=0)]

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
