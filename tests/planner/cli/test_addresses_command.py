"""``planner addresses``: what it writes, says and ends with."""

import csv
import json
from pathlib import Path

import pytest

from graphs.addresses import check_offsets
from graphs.io.buffers import read_buffers
from tests.support.cli import call, refused
from tests.support.graphs.buffers import packed_buffers
from tests.support.graphs.imported import public

# As in MiniMalloc's documentation: 12 bytes hold them.
BUFFERS = "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n"


@pytest.fixture
def buffers(tmp_path: Path) -> Path:
    path = tmp_path / "buffers.csv"
    path.write_text(BUFFERS)
    return path


def offsets_in(path: Path) -> list[int]:
    with path.open(newline="") as file:
        return [int(row["offset"]) for row in csv.DictReader(file)]


def test_the_smallest_arena_is_found_and_written(buffers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "offsets.csv"
    said = call(capsys, "addresses", buffers, "-o", output)
    assert (said.code, said.err) == (0, "")
    assert "5 buffers in an arena of 12 bytes" in said.out and "the smallest" in said.out
    check_offsets(read_buffers(output).buffers, offsets_in(output))


def test_addresses_within_a_capacity_are_found_or_proved_not_to_be(buffers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = call(capsys, "addresses", buffers, "--capacity", "1kB", "--json")
    found = json.loads(said.out)
    assert said.code == 0
    assert {
        key: found[key] for key in ("output", "buffers", "status", "capacity_bytes", "height_bytes", "bound_bytes", "gap")
    } == {
        "output": None,
        "buffers": 5,
        "status": "optimal",
        "capacity_bytes": 1000,
        "height_bytes": 12,
        "bound_bytes": 12,
        "gap": 0.0,
    }
    refused(call(capsys, "addresses", buffers, "--capacity", "11"), 3, "5 buffers do not fit 11 bytes", "fewer than 12")
    refused(call(capsys, "addresses", buffers, "--capacity", "3"), 3, "buffer 'b1' alone takes 4")
    said = call(capsys, "addresses", buffers, "--capacity", "11", "--json")
    assert (said.code, json.loads(said.out)["status"]) == (3, "infeasible")


def test_nothing_is_written_where_nothing_fits(buffers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(capsys, "addresses", buffers, "--capacity", "11", "-o", tmp_path / "offsets.csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["buffers.csv"]


def test_a_search_that_ends_too_early_says_the_gap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hard.csv"
    rows = [f"{b.id},{b.lower},{b.upper},{b.size}" for b in packed_buffers(200, horizon=200, height=1000, seed=200, removed=0.1)]
    path.write_text("\n".join(["id,lower,upper,size", *rows]))
    said = call(capsys, "addresses", path, "--capacity", "1000", "--work-limit", "0.2")
    refused(said, 4, "no addresses within 1,000 bytes were found", "no arena has fewer than 1,000")
    said = call(capsys, "addresses", path, "--work-limit", "0.2")
    assert said.code == 0 and "a gap of" in said.out


@pytest.mark.parametrize(
    ("text", "said"),
    [("id,lower,size\n", "there is no column 'upper'"), (BUFFERS + "b6,3,3,4\n", "line 7: buffer 'b6'")],
)
def test_what_is_no_table_of_buffers_is_refused(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "buffers.csv"
    path.write_text(text)
    refused(call(capsys, "addresses", path), 1, said)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["A", "B", "E", "F", "H"])
def test_published_instances_fit_their_capacity(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = public(f"addresses/{name}.1048576.csv")
    output = tmp_path / "offsets.csv"
    said = call(capsys, "addresses", path, "--capacity", "1048576", "--work-limit", "300", "-o", output)
    assert said.code == 0
    check_offsets(read_buffers(output).buffers, offsets_in(output))
