"""The largest sizes with offload and without, and their table."""

from pathlib import Path

import pytest

from benchmarks import offload_sizes
from benchmarks.offload_sizes import CASES, COLUMNS, Case, rows_of, table
from planner.studies.sizes import METHODS
from planner.workload.workload import parse_spec


@pytest.mark.slow
def test_offload_fits_no_less_and_rows_say_at_what_price(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("zoo:mlp,layers=4,width=32,classes=8", "batch", 64)
    rows = list(rows_of("small", case, budget="1MB", limit_s=3.0))
    assert [row["method"] for row in rows] == [*(method for method, _ in METHODS), "with offload"]
    assert all(row.keys() == set(COLUMNS) for row in rows)
    sizes = [row["size"] for row in rows]
    assert sizes[-1] >= sizes[-2] >= sizes[0] > 0  # type: ignore[operator]
    assert all(row["overhead"] <= 0.1 and row["peak_bytes"] <= 10**6 for row in rows if row["size"])  # type: ignore[operator]
    lines = table(rows).splitlines()
    assert len(lines) == 2 + len(rows) and all(str(row["method"]) in line for row, line in zip(rows, lines[2:], strict=True))
    monkeypatch.setattr(offload_sizes, "CASES", {"small": case})
    monkeypatch.setattr(offload_sizes, "rows_of", lambda *_: iter(rows))
    offload_sizes.main(["--models", "small", "--out", str(tmp_path)])
    assert (tmp_path / "max_batch.md").read_text() == table(rows)
    assert (tmp_path / "max_batch.csv").read_text().count("\n") == 1 + len(rows)


def test_its_cases_vary_what_their_models_give() -> None:
    for case in CASES.values():
        assert int(dict(parse_spec(case.spec).options)[case.varies]) % case.unit == 0
