"""The benchmark of first steps: it measures what it says, resumes, and marks what is over its limits."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import first_step
from benchmarks.first_step import group_by_model, main
from benchmarks.first_step_cases import CASES
from benchmarks.first_step_run import (
    FAILED,
    OUT_OF_MEMORY,
    PLANNED,
    RAN,
    REFUSED,
    UNCAPPED,
    WAYS,
    FirstStepRow,
    capture_timer,
    compute_digest,
    format_message,
    get_status,
)
from benchmarks.process_memory import DataWatch, read_status_bytes, reset_highest_rss
from planner.graphs.errors import InfeasibleError, OutOfMemoryError
from planner.studies.blocks import InapplicableError
from planner.studies.rows import read_rows
from tests.support import first_step_tiny
from tests.support.models.steps import mutated

linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is capped and measured as on Linux")

COMMITTED = Path(__file__).parents[2] / "results" / "first_step"


def use_tiny(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(first_step, "CASES", first_step_tiny.TINY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of the tiny model, in processes of its own."""
    path = tmp_path_factory.mktemp("first_step")
    with pytest.MonkeyPatch.context() as patch:
        use_tiny(patch)
        assert replace(main, models=first_step_tiny.TINY)(["--out", str(path)]) == 0
    return path


@pytest.mark.slow
@linux
def test_a_model_is_planned_and_trained_under_a_cap_that_eager_does_not_fit(folder: Path) -> None:
    rows = read_rows(folder / "rows.csv", FirstStepRow)
    (trained,) = group_by_model(rows)
    uncapped, planned = trained.uncapped, trained.planned
    assert [(row.model, row.way) for row in rows] == [(first_step_tiny.NAME, way) for way in WAYS]
    assert uncapped.status == planned.status == RAN
    assert trained.eager.status == OUT_OF_MEMORY
    assert trained.same_bits
    assert trained.checkpointing.digest in ("", uncapped.digest)
    sizes = (
        planned.static_bytes,
        planned.budget_bytes,
        planned.room_bytes,
        planned.eager_growth_bytes,
        planned.measured_peak_bytes,
    )
    static_bytes, budget_bytes, room_bytes, growth_bytes, peak_bytes = (size or 0 for size in sizes)
    assert static_bytes < peak_bytes <= budget_bytes
    assert budget_bytes - static_bytes < room_bytes < growth_bytes
    for row in (uncapped, planned):
        assert row.eager_peak_bytes is not None
        assert row.ready_rss_bytes < row.training_rss_bytes
    assert (uncapped.training_rss_bytes or 0) - (uncapped.ready_rss_bytes or 0) > 0.8 * growth_bytes
    assert (planned.training_rss_bytes or 0) - (planned.ready_rss_bytes or 0) < room_bytes
    assert 0 < (planned.capture_s or 0) < (planned.compile_s or 0) < (planned.first_step_s or 0)
    assert 0 < (planned.passes_s or 0) < (planned.step_s or 0)
    assert planned.predicted_s > 0 and planned.first_overhead > 0
    assert static_bytes < (planned.interpreter_bytes or 0) < (planned.training_rss_bytes or 0)
    assert planned.machine and planned.commit and planned.torch == torch.__version__


@linux
def test_only_missing_rows_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, str]] = []
    committed = {(row.model, row.way): row for row in read_rows(COMMITTED / "rows.csv", FirstStepRow)}

    def train_in_process(model: str, way: str, about: object) -> FirstStepRow:
        made.append((model, way))
        return committed[model, way]

    monkeypatch.setattr(first_step, "train_in_process", train_in_process)
    words = ["--models", "vit,gpt2", "--out", str(tmp_path)]
    assert main(words) == 0
    assert made == [(model, way) for model in ("vit", "gpt2") for way in WAYS]
    assert [row.model for row in read_rows(tmp_path / "rows.csv", FirstStepRow)] == ["gpt2"] * len(WAYS) + ["vit"] * len(WAYS)
    made.clear()
    lines = (tmp_path / "rows.csv").read_text().splitlines(keepends=True)
    (tmp_path / "rows.csv").write_text("".join(line for line in lines if not line.startswith("gpt2,planned,")))
    assert main(words) == 0
    assert made == [("gpt2", PLANNED)]
    made.clear()
    assert main([*words[2:], "--models", "vit", "--fresh"]) == 0
    assert made == [("vit", way) for way in WAYS]


@linux
def test_a_model_that_eager_cannot_train_is_a_failure_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def train_in_process(model: str, way: str, about: object) -> FirstStepRow:
        made.append(way)
        return FirstStepRow(model=model, way=way, status=FAILED, message="ModuleNotFoundError: No module named 'transformers'")

    monkeypatch.setattr(first_step, "train_in_process", train_in_process)
    for _ in range(2):
        assert main(["--models", "hf-t5", "--out", str(tmp_path)]) == 1
    assert made == [UNCAPPED, UNCAPPED]


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you\nmore"), OUT_OF_MEMORY, "RuntimeError: Default"),
        (MemoryError(), OUT_OF_MEMORY, "MemoryError"),
        (OutOfMemoryError("out of memory in the forward pass", asked_bytes=1), OUT_OF_MEMORY, "out of memory in"),
        (InfeasibleError("no schedule"), REFUSED, "no schedule"),
        (KeyError("x"), FAILED, "KeyError: 'x'"),
    ],
)
def test_errors_are_told_apart(error: Exception, status: str, line: str) -> None:
    assert get_status(error) == status
    assert format_message(error).startswith(line)


def test_digests_are_of_all_bits() -> None:
    assert compute_digest([1.0, 2.0], "s") == compute_digest([1.0, 2.0], "s")
    assert len({compute_digest(losses, state) for losses in ([1.0], [1.0 + 2**-52], [-0.0], [0.0]) for state in ("s", "t")}) == 8


def test_captures_are_timed() -> None:
    import planner

    model, loss_fn, batch = mutated()
    times: list[float] = []
    planner.compile(model, loss_fn, batch, budget="100%", compare_eager=False, wait=0, on_progress=capture_timer(times))
    assert len(times) == 1 and times[0] > 0


@linux
def test_the_highest_sizes_are_those_since_they_were_reset() -> None:
    def take() -> None:
        torch.ones(16 * 2**20).sum()  # 64 MiB, which go back to the system

    take()
    reset_highest_rss()
    assert read_status_bytes("VmHWM") < read_status_bytes("VmRSS") + 32 * 2**20
    before_rss, before_data = read_status_bytes("VmRSS"), read_status_bytes("VmData")
    with DataWatch() as watch:
        take()
    assert read_status_bytes("VmHWM") > before_rss + 48 * 2**20
    assert before_data + 48 * 2**20 < watch.highest_bytes < before_data + 128 * 2**20


@pytest.mark.parametrize("name", [name for name in CASES if name != "lstm"])
def test_every_model_is_built_and_can_be_checkpointed(name: str) -> None:
    case = CASES[name]
    workload = case.recipe.make()
    assert sum(p.numel() for p in workload.model.parameters()) > 10**6
    assert callable(case.checkpointing(workload))


def test_layers_of_an_lstm_are_one_module_that_has_no_blocks() -> None:
    case = CASES["lstm"]
    with pytest.raises(InapplicableError, match="no blocks"):
        case.checkpointing(case.recipe.make())
