"""The benchmark of first steps: it measures what it says, resumes, and marks what is over its limits."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import first_step
from benchmarks.first_step import by_model, failures, main, table
from benchmarks.first_step_cases import CASES
from benchmarks.first_step_run import (
    CHECKPOINTING,
    EAGER,
    FAILED,
    LARGE_PAGES,
    OUT_OF_MEMORY,
    PLANNED,
    RAN,
    REFUSED,
    UNCAPPED,
    WAYS,
    FirstStepRow,
    capture_timer,
    digest,
    message_of,
    status_of,
)
from benchmarks.process_memory import DataWatch, reset_highest_rss, status_bytes
from graphs.errors import InfeasibleError, OutOfMemoryError
from planner.studies.blocks import InapplicableError
from planner.studies.rows import read_rows
from tests.support import first_step_tiny
from tests.support.models.steps import mutated

linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is capped and measured as on Linux")

COMMITTED = Path(__file__).parents[2] / "results" / "first_step"
MB = 10**6


def rows_of(model: str) -> list[FirstStepRow]:
    """Made-up rows of a model that meets both limits exactly."""
    about = {"eager_peak_bytes": 1000 * MB, "static_bytes": 100 * MB, "eager_growth_bytes": 1100 * MB, "planning_steps": 3}
    versions = {"machine": "a machine", "commit": "abc", "torch": "2.13", "transformers": "5", "steps": 5, "seed": 0}
    uncapped = replace(
        FirstStepRow(model=model, way=UNCAPPED, status=RAN, digest="d", step_s=2.0, training_rss_bytes=1400 * MB),
        **about,
        **versions,
    )
    planned = replace(
        uncapped,
        way=PLANNED,
        budget_bytes=600 * MB,
        room_bytes=800 * MB,
        torch_rss_bytes=200 * MB,
        dynamo_rss_bytes=300 * MB,
        ready_rss_bytes=350 * MB,
        planning_rss_bytes=700 * MB,
        training_rss_bytes=840 * MB,
        step_s=2.5,
        capture_s=4.0,
        compile_s=9.0,
        first_step_s=12.0,
        first_overhead=0.2,
        first_gap=0.05,
        last_overhead=0.1,
        measured_peak_bytes=590 * MB,
        swaps="step 3 after 5.0 s: 8.0% faster, found during training",
    )
    eager = replace(
        uncapped, way=EAGER, status=OUT_OF_MEMORY, message="RuntimeError: can't allocate memory", digest="", step_s=None
    )
    large_pages = replace(planned, way=LARGE_PAGES, step_s=2.2)
    return [uncapped, planned, large_pages, eager, replace(uncapped, way=CHECKPOINTING, step_s=2.6)]


def changed(way: str, **values: object) -> list[FirstStepRow]:
    return [replace(row, **values) if row.way == way else row for row in rows_of("a")]  # type: ignore[arg-type]


def use_tiny(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(first_step, "CASES", first_step_tiny.TINY)
    patch.setattr(first_step, "one_thread", lambda: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of the tiny model, in processes of its own."""
    path = tmp_path_factory.mktemp("first_step")
    with pytest.MonkeyPatch.context() as patch:
        use_tiny(patch)
        assert main(["--out", str(path)]) == 0
    return path


@pytest.mark.slow
@linux
def test_a_model_is_planned_and_trained_under_a_cap_that_eager_does_not_fit(folder: Path) -> None:
    rows = read_rows(folder / "rows.csv", FirstStepRow)
    (trained,) = by_model(rows)
    uncapped, planned, large_pages = trained.uncapped, trained.planned, trained.large_pages
    assert [(row.model, row.way) for row in rows] == [(first_step_tiny.NAME, way) for way in WAYS]
    assert uncapped.status == planned.status == large_pages.status == RAN
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
        assert row.ready_rss_bytes is not None and row.training_rss_bytes is not None and row.eager_peak_bytes is not None
        assert row.torch_rss_bytes is not None and row.dynamo_rss_bytes is not None
        assert row.torch_rss_bytes < row.dynamo_rss_bytes < row.ready_rss_bytes < row.training_rss_bytes
    assert (uncapped.training_rss_bytes or 0) - (uncapped.ready_rss_bytes or 0) > 0.8 * growth_bytes
    assert (planned.training_rss_bytes or 0) - (planned.ready_rss_bytes or 0) < room_bytes
    assert 0 < (planned.capture_s or 0) < (planned.compile_s or 0) < (planned.first_step_s or 0)
    assert planned.first_overhead is not None and planned.first_overhead > 0
    assert planned.machine and planned.commit and planned.torch == torch.__version__


@pytest.mark.slow
@linux
def test_rows_that_are_there_are_not_made_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_tiny(monkeypatch)
    before = read_rows(folder / "rows.csv", FirstStepRow)
    monkeypatch.setattr(first_step, "train_in_process", lambda *_: pytest.fail("a row is made again"))
    assert main(["--out", str(folder)]) == 0
    assert read_rows(folder / "rows.csv", FirstStepRow) == before
    assert capsys.readouterr().out == (folder / "table.md").read_text() == table(before)


@linux
def test_only_missing_rows_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, str]] = []

    def train_in_process(model: str, way: str, about: object) -> FirstStepRow:
        made.append((model, way))
        return next(row for row in rows_of(model) if row.way == way)

    monkeypatch.setattr(first_step, "train_in_process", train_in_process)
    monkeypatch.setattr(first_step, "environment", dict)
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
    monkeypatch.setattr(first_step, "environment", dict)
    for _ in range(2):
        assert main(["--models", "hf-t5", "--out", str(tmp_path)]) == 1
    assert made == [UNCAPPED, UNCAPPED]


def test_limits_that_are_met_exactly_are_met() -> None:
    (trained,) = by_model(rows_of("a"))
    assert (trained.allowed_rss_bytes, trained.allowed_first_step_s) == (840 * MB, 12.0)
    assert table(rows_of("a")).count("| met |") == 2


@pytest.mark.parametrize(
    ("values", "marked"),
    [
        ({"training_rss_bytes": 850 * MB}, "missed by 10.00 MB"),
        ({"first_step_s": 13.5}, "missed by 1.5 s"),
        ({"digest": "e"}, "| yes | NO |"),
        ({"status": REFUSED, "message": "no schedule fits"}, "| NO: refused | NO |"),
    ],
)
def test_missed_limits_are_marked_in_the_table(values: dict[str, object], marked: str) -> None:
    assert marked not in table(rows_of("a"))
    assert marked in table(changed(PLANNED, **values))


def test_the_table_says_how_each_way_trained() -> None:
    lines = table([*rows_of("a"), *rows_of("b")])
    assert (
        "| a | 800.00 MB | 1.10 GB | 2 s | 2.5 s (1.25x) | 2.2 s (1.10x) | +20.00% (5.00%) | +10.00% (unknown) | 590.00 MB | "
        "step 3 after" in lines
    )
    assert "| out of memory | 2.6 s (1.30x) |" in lines
    assert "| b | 1.00 GB | 600.00 MB (60%) | yes | yes | 840.00 MB | 840.00 MB | met | 4 s | 12 s | 12 s (3) | met |" in lines
    assert "Not trained" not in lines  # eager PyTorch is expected to run out of memory
    assert "torch 2.13, transformers 5; commit abc" in lines


def test_reasons_are_in_the_table() -> None:
    lines = table(changed(CHECKPOINTING, status=REFUSED, message="Net has no blocks"))
    assert "- a, checkpointing: refused: Net has no blocks" in lines
    assert table([]) == table(rows_of("a")[:2]) == "No model has all of its rows.\n"


def test_failures_report_wrong_results_and_out_of_memory() -> None:
    assert failures(rows_of("a")) == []
    assert failures(changed(PLANNED, training_rss_bytes=900 * MB)) == []
    (line,) = failures(changed(PLANNED, digest="e"))
    assert line == "a: losses, parameters, buffers or random state are not those of eager PyTorch"
    (line,) = failures(changed(PLANNED, status=OUT_OF_MEMORY, message="out of memory in the forward pass", digest=""))
    assert line == "a: planned: out of memory: out of memory in the forward pass"
    (line,) = failures(changed(UNCAPPED, status=FAILED, message="exit code -9")[:1])
    assert line == "a: eager PyTorch without a cap: failed: exit code -9"


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
    assert status_of(error) == status
    assert message_of(error).startswith(line)


def test_digests_are_of_all_bits() -> None:
    assert digest([1.0, 2.0], "s") == digest([1.0, 2.0], "s")
    assert len({digest(losses, state) for losses in ([1.0], [1.0 + 2**-52], [-0.0], [0.0]) for state in ("s", "t")}) == 8


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
    assert status_bytes("VmHWM") < status_bytes("VmRSS") + 32 * 2**20
    before_rss, before_data = status_bytes("VmRSS"), status_bytes("VmData")
    with DataWatch() as watch:
        take()
    assert status_bytes("VmHWM") > before_rss + 48 * 2**20
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


@pytest.mark.skipif(not COMMITTED.exists(), reason="the benchmark has not been run")
def test_the_committed_rows_keep_every_promise() -> None:
    rows = read_rows(COMMITTED / "rows.csv", FirstStepRow)
    assert failures(rows) == []
    assert [trained.model for trained in by_model(rows)] == list(CASES)
    assert all(trained.eager.status == OUT_OF_MEMORY for trained in by_model(rows))
