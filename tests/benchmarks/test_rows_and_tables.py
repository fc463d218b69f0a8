"""Every benchmark's rows and tables: tables follow from rows, committed rows keep their promises, bad rows are named."""

import csv
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from benchmarks.__main__ import list_benchmarks
from planner.studies.experiment import Study
from tests.support.promises import PROMISES, find_broken

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="some benchmarks measure memory as on Linux")

RESULTS = Path(__file__).parents[2] / "results"
NAMES = (
    *("addresses", "arena_training", "compiled", "compression", "eager", "host"),
    *("first_step", "offload", "operators", "options", "placement", "predicted_peaks"),
    *("reserved", "resident", "sharded", "solve"),
)
# Benchmarks by their folders of results, with further arguments.
FOLDERS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in NAMES},
    "gpu/arena": ("gpu.plans",),
    "gpu/eager": ("eager",),
    "gpu/plans": ("gpu.plans",),
    "gpu/ways": ("gpu.plans",),
    "executor": ("host",),
    **dict.fromkeys(("models", "entries", "arena_models"), ("try_models",)),
    "offload/max_batch": ("offload_sizes",),
    "options/ablation": ("options", "--ablation"),
}
# Budgets that cannot be met, graphs that took more than theirs, and sums of gradients at graph breaks (LoKr).
WITH_FAILURES = ("entries", "gpu/plans", "gpu/ways")


def make_tables(folder: str, out: Path) -> int:
    """Make the tables and figures of the rows in `out` by the benchmark of `folder`; return its exit code."""
    module, *words = FOLDERS[folder]
    main = import_module(f"benchmarks.{module}").main
    return int(main([*words, "--tables-only", "--out", str(out)]))


@pytest.mark.parametrize("folder", FOLDERS)
def test_committed_tables_follow_from_committed_rows(folder: str, tmp_path: Path) -> None:
    out = shutil.copytree(RESULTS / folder.removesuffix("/max_batch").removesuffix("/ablation"), tmp_path / "results")
    pages = {page: page.read_text() for page in out.rglob("*.md")}
    assert pages
    assert make_tables(folder, out) == (folder in WITH_FAILURES)
    assert {page: page.read_text() for page in pages} == pages


def test_make_names_benchmarks_that_there_are() -> None:
    makefile = (RESULTS.parent / "Makefile").read_text()
    assert set(re.findall(r"-m benchmarks ([\w.]+)", makefile)) <= list_benchmarks().keys()


@pytest.mark.parametrize(("folder", "promise"), [(folder, promise) for folder, own in PROMISES.items() for promise in own])
def test_committed_rows_keep_their_promises(folder: str, promise: str) -> None:
    count, broken = find_broken(pd.read_csv(RESULTS / folder / "rows.csv"), promise)
    assert count
    assert broken == []


# Where benchmarks list their cases: all have committed rows.
CASES = {
    "compression": "compression.CASES",
    "first_step": "first_step_cases.CASES",
    "offload": "offload.MODELS",
    "placement": "placement.MODELS",
}


@pytest.mark.parametrize("folder", CASES)
def test_every_case_has_committed_rows(folder: str) -> None:
    module, name = CASES[folder].split(".")
    cases = getattr(import_module(f"benchmarks.{module}"), name)
    assert set(pd.read_csv(RESULTS / folder / "rows.csv")["model"]) == set(cases)


@dataclass(frozen=True, slots=True)
class BadRow:
    """A committed row that is changed, and the line that then appears in the output.

    Attributes:
        folder: of the results.
        row: cells that the row is known by.
        cells: that are changed: new texts, or what is added to the number that is in another column.
        line: a part of the output, which is not there before the change.
    """

    folder: str
    row: Mapping[str, str]
    cells: Mapping[str, str | tuple[str, float]]
    line: str


ARENA = {"model": "mlp", "way": "in an arena"}
ADAMW = {"model": "vit", "optimizer": "adamw"}
AT_ALL, AT_HALF = ({"model": "gpt2", "method": "planner inductor", "budget": budget} for budget in ("100%", "50%"))
AT_PEER = AT_HALF | {"budget": "peak of memory-budget 0.50 inductor"}
PEER = {"model": "gpt2", "method": "memory-budget 0.50 inductor"}
IN_ARENA = AT_HALF | {"method": "planner inductor in an arena"}
CURVE = {"model": "gpt2", "bits": "8", "step": "0"}
PLANNED, TRIED = {"model": "gpt2", "way": "planned"}, {"model": "mlp", "way": "planned at 50%"}
ON_GPU = {"model": "resnet50", "way": "recompute", "share": "70%"}
BOTH = {"suite": "h200", "model": "unet", "budget": "least + 75%", "method": "both"}
ALONE = BOTH | {"method": "recompute only"}
CHUNKS = {"model": "gpt2-medium", "options": "chunks", "budget": "70%"}
CHUNKS_LEAST = CHUNKS | {"budget": "least"}
REFERENCE = {"graph": "random-1-10", "solver": "checkmate", "run": "1"}

BAD_ROWS = (
    BadRow("arena_models", ARENA, {"peak_bytes": ("budget_bytes", 1)}, "by hand/mlp, in an arena: took "),
    BadRow("arena_models", ARENA, {"different": "3"}, "by hand/mlp, in an arena: 3 results are not eager's"),
    BadRow("arena_models", ARENA, {"status": "failed", "message": "no"}, "by hand/mlp, in an arena: no"),
    BadRow("arena_training", ADAMW, {"identical": "False"}, "vit, adamw: other bits than eager PyTorch's"),
    BadRow("arena_training", ADAMW, {"predicted_bytes": ("predicted_bytes", 32)}, " were planned"),
    BadRow("arena_training", ADAMW, {"resident_bytes": ("budget_bytes", 1)}, " bytes while a batch is evaluated between steps"),
    BadRow("compiled", AT_HALF, {"measured_peak_bytes": ("budget_bytes", 1)}, " 1 take more than their budget (gpt2 50%)"),
    BadRow("compiled", AT_HALF, {"predicted_peak_bytes": "1"}, " to the byte (gpt2 50%)"),
    BadRow("compiled", AT_HALF, {"bits": "rounded"}, " to the last bit (gpt2 50%)"),
    BadRow("compiled", AT_ALL, {"ratio": "1.03"}, " worst 1.030x of its time (gpt2 100%)"),
    BadRow("compiled", AT_PEER, {"peer_ratio": "9.5"}, " worst 9.500x of its time ("),
    BadRow("compiled", AT_PEER, {"measured_peak_bytes": "", "peer_ratio": ""}, "1 without a plan (gpt2 peak of "),
    BadRow("compiled", PEER, {"bits": "wrong"}, "compute other gradients (gpt2 memory-budget 0.50 inductor)"),
    BadRow("compiled", PEER, {"ratio": "", "error": "RuntimeError: no"}, "| gpt2 | 0.50 | RuntimeError: no |"),
    BadRow("compiled", IN_ARENA, {"bits": "rounded"}, " have the bits of torch.compile (gpt2 50%)"),
    BadRow("compiled", AT_HALF, {"ratio": "", "least_bytes": "21577736"}, "infeasible, needs 100.0%"),
    BadRow("compression", CURVE, {"loss": ("loss", 1)}, "gpt2, 8 bits: the loss of the first step is "),
    BadRow("compression", CURVE | {"step": "1"}, {"loss": "inf"}, "gpt2, 8 bits: the loss of step 1 is "),
    BadRow("entries", {"model": "pinn", "way": "backend at 50%"}, {"different": "2"}, "pinn, backend at 50%: 2 results are not"),
    BadRow("entries", {"model": "pinn", "way": "backend at 50%"}, {"status": "failed", "message": "no"}, "backend at 50%: no"),
    BadRow("first_step", PLANNED, {"digest": "e"}, "gpt2: losses, parameters, buffers or random state are not those of eager"),
    BadRow("first_step", PLANNED, {"status": "out of memory", "message": "no"}, "gpt2: planned: out of memory: no"),
    BadRow(
        "first_step",
        PLANNED,
        {"training_rss_bytes": f"{3 * 10**9}", "interpreter_bytes": f"{10**9}", "arena_bytes": "1"},
        "| +7.3%: missed |",
    ),
    BadRow("first_step", PLANNED, {"passes_s": "9", "predicted_s": "10"}, "| 0.90: missed |"),
    BadRow("first_step", PLANNED, {"step_s": "20"}, "| 2.09: missed |"),
    BadRow("first_step", PLANNED, {"first_step_s": "46"}, "| 46.0 s: missed | 28 s (3) |"),
    BadRow("first_step", PLANNED | {"way": "uncapped"}, {"status": "failed"}, "gpt2: eager PyTorch without a cap: failed"),
    BadRow("gpu/plans", ON_GPU, {"requested_bytes": ("budget_bytes", 1)}, " B of tensors, 1 B over the budget"),
    BadRow("gpu/plans", ON_GPU, {"bits": "False"}, "resnet50 recompute 70%: other bits than eager PyTorch"),
    BadRow(
        "gpu/plans", ON_GPU | {"way": "reserved"}, {"reserved_bytes": ("budget_bytes", 1)}, "resnet50 reserved 70%: reserved "
    ),
    BadRow("models", TRIED, {"different": "2"}, "by hand/mlp, planned at 50%: 2 results are not eager's"),
    BadRow("models", TRIED, {"peak_bytes": ("budget_bytes", 1)}, "by hand/mlp, planned at 50%: took "),
    BadRow("models", TRIED, {"storages_bytes": ("budget_bytes", 1)}, "by hand/mlp, planned at 50%: took "),
    BadRow("models", TRIED, {"status": "failed", "message": "no"}, "by hand/mlp, planned at 50%: no"),
    BadRow("offload", BOTH, {"time_s": "1.0"}, "Slower than either alone: 1."),
    BadRow("offload", ALONE, {"time_s": "0.1"}, "Methods below the bound: 1."),
    BadRow("options", CHUNKS, {"time_s": ("time_s", 1)}, "by over 0.1%: 1 (chunks at 70%, "),
    BadRow("options", CHUNKS, {"time_s": "", "status": "limit"}, "by over 0.1%: 1 (chunks at 70%, limit, than none, "),
    BadRow("options", CHUNKS, {"status": "infeasible", "time_s": ""}, "Schedules below a bound: 1."),
    BadRow("options", CHUNKS, {"bound_s": ("bound_s", 1)}, "Schedules below a bound: 2."),
    BadRow("options", CHUNKS_LEAST, {"budget_bytes": "6000000000"}, "by over 0.1%: 1 (chunks at least, 6,000,000,000 B"),
    BadRow("options", CHUNKS_LEAST, {"proved_bytes": "6000000000"}, "Schedules below a bound: 2."),
    BadRow("options", CHUNKS, {"limit": "59 s"}, "59 s (chunks)"),
    BadRow("resident", {"model": "gpt2", "way": "arena"}, {"highest_bytes": ("highest_bytes", 10**9)}, " too much"),
    BadRow("solve", REFERENCE, {"time_s": ("time_s", 1)}, "costs agree in 6 of 7"),
    BadRow("solve", REFERENCE, {"status": "limit"}, "The reference solved 6 of 7 within its limit"),
)


@pytest.mark.parametrize("bad", BAD_ROWS, ids=lambda bad: f"{bad.folder}-{','.join(bad.cells)}")
def test_bad_rows_are_named(
    bad: BadRow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Study, "draw_figures", lambda *_: None)
    with (RESULTS / bad.folder / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    row = next(row for row in rows if bad.row.items() <= row.items())
    for offers in (RESULTS / bad.folder).glob("offers.csv"):
        shutil.copy(offers, tmp_path)
    alike = [other for other in rows if other.get("model") == row.get("model")]

    def print_tables() -> str:
        pd.DataFrame(alike).to_csv(tmp_path / "rows.csv", index=False)
        make_tables(bad.folder, tmp_path)
        printed = capsys.readouterr()
        return str(printed.out + printed.err)

    assert bad.line not in print_tables()
    row.update({name: change_cell(row, change) for name, change in bad.cells.items()})
    assert bad.line in print_tables()


def change_cell(row: Mapping[str, Any], change: str | tuple[str, float]) -> str:
    if isinstance(change, str):
        return change
    column, difference = change
    number = float(row[column]) + difference
    return str(number if "." in row[column] else int(number))
