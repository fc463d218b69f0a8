"""Committed tables are what the committed rows say, byte for byte."""

import shutil
import sys
from importlib import import_module
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "results"
NAMES = (
    *("addresses", "arena", "arena_models", "arena_training", "compiled", "compression", "eager", "entries", "executor"),
    *("first_step", "offload", "operators", "options", "placement", "predicted_peaks", "reserved", "resident", "solve"),
)
# Benchmarks by their folders of results, with further arguments.
FOLDERS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in NAMES},
    "gpu/arena": ("gpu.plans",),
    "gpu/eager": ("eager",),
    "gpu/plans": ("gpu.plans",),
    "gpu/ways": ("gpu.plans",),
    "models": ("try_models",),
    "offload/max_batch": ("offload_sizes",),
    "training": ("training", "--device", "cpu"),
}
WITH_FAILURES = ("entries", "gpu/plans", "gpu/ways")  # budgets that cannot be met, and graphs that took more than theirs


@pytest.mark.skipif(sys.platform != "linux", reason="some benchmarks measure memory as on Linux")
@pytest.mark.parametrize("folder", FOLDERS)
def test_committed_tables_follow_from_committed_rows(folder: str, tmp_path: Path) -> None:
    module, *words = FOLDERS[folder]
    name = folder.removesuffix("/max_batch")
    out = shutil.copytree(RESULTS / name, tmp_path / "results")
    pages = {page: page.read_text() for page in out.rglob("*.md")}
    assert pages
    code = import_module(f"benchmarks.{module}").main([*words, "--tables-only", "--out", str(out)])
    assert code == (folder in WITH_FAILURES)
    assert {page: page.read_text() for page in pages} == pages
