"""The largest sizes with offload and without, and their table."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import command
from benchmarks.offload_sizes import CASES, STUDY, TABLE, SizeCase, search
from planner.capture.workload.workload import parse_spec
from planner.studies.sizes import METHODS
from planner.studies.tables import format_markdown

RESULTS = Path(__file__).parents[2] / "results" / "offload"


@pytest.mark.slow
def test_largest_size_with_offload_is_at_least_that_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = SizeCase("zoo:mlp,layers=4,width=32,classes=8", "batch", 64)
    monkeypatch.setitem(CASES, "small", small)
    rows = list(search("small", (), budget="1MB", limit_s=3.0))
    assert [row.method for row in rows] == [*(method for method, _ in METHODS), "with offload"]
    sizes = [row.size or 0 for row in rows]
    assert sizes[-1] >= sizes[-2] >= sizes[0] > 0
    assert all((row.overhead or 0.0) <= 0.1 and (row.peak_bytes or 0) <= 10**6 for row in rows if row.size)
    lines = format_markdown(rows, TABLE).splitlines()
    assert len(lines) == 2 + len(rows) and all(row.method in line for row, line in zip(rows, lines[2:], strict=True))
    main = command.Main(replace(STUDY, run=lambda *_: iter(rows)), CASES, out=str(tmp_path))
    assert main(["--models", "small"]) == 0
    assert (tmp_path / "max_batch.md").read_text() == format_markdown(rows, TABLE)
    assert (tmp_path / "max_batch.csv").read_text().count("\n") == 1 + len(rows)


def test_case_sizes_are_divisible_by_their_unit() -> None:
    for case in CASES.values():
        assert int(dict(parse_spec(case.spec).options)[case.varies]) % case.unit == 0
