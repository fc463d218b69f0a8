"""Tables in CSV files: what was committed is read and written back to the byte, and what is damaged is refused."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from graphs.errors import OutputError
from planner.studies import comparison_rows
from planner.studies.rows import read_csv, read_rows, write_csv, write_rows

RESULTS = Path(__file__).parents[3] / "results"


@dataclass(frozen=True, slots=True)
class Row:
    """What a column may be."""

    name: str
    count: int | None
    seconds: float
    ended: bool


COLUMNS = ("name", "count", "seconds", "ended")


def find_changed(paths: list[Path], write_again: Callable[[Path, Path], None], again: Path) -> list[str]:
    """Return the `paths` that `write_again`, from a path to the file `again`, does not write back to the byte."""
    changed = []
    for path in paths:
        write_again(path, again)
        if again.read_bytes() != path.read_bytes():
            changed.append(str(path.relative_to(RESULTS)))
    return changed


def copy_table(path: Path, again: Path) -> None:
    columns = path.read_text().split("\n", 1)[0].split(",")
    rows = read_csv(path, columns)
    assert rows, path
    write_csv(again, columns, rows)


def copy_comparison(path: Path, again: Path) -> None:
    write_rows(again, comparison_rows.ComparisonRow, read_rows(path, comparison_rows.ComparisonRow))


def test_committed_tables_are_written_back_to_the_byte(tmp_path: Path) -> None:
    assert find_changed(sorted(RESULTS.rglob("*.csv")), copy_table, tmp_path / "again.csv") == []
    compared = sorted((RESULTS / "compare").rglob("*.csv"))
    assert find_changed(compared, copy_comparison, tmp_path / "again.csv") == []


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows = [
        Row('a, "b"\n ', 2**60 + 1, 0.1 + 0.2, True),
        Row("NA", None, 1e-300, False),
        Row("", 0, 5e-324, True),
        Row("007", -1, 1.7976931348623157e308, False),
        Row("größe", 3, 1 / 3, True),
    ]
    write_csv(tmp_path / "rows.csv", COLUMNS, map(asdict, rows))
    assert read_rows(tmp_path / "rows.csv", Row) == rows
    assert read_rows(tmp_path / "none.csv", Row) == []
    write_csv(tmp_path / "none.csv", COLUMNS, [])
    assert read_rows(tmp_path / "none.csv", Row) == []
    assert (tmp_path / "none.csv").read_text() == "name,count,seconds,ended\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is damaged"),
        (b"\xff\xfe", "is damaged"),
        (b"x" * 200_000 + b"\n", "is damaged"),
        (b"name,count\na,1\n", "has other columns"),
        (b"name,count,ended,seconds\na,1,True,2.0\n", "has other columns"),
        (b"name,count,seconds,ended\na,1,2.0\n", "row 1 has fewer cells"),
        (b"name,count,seconds,ended\na,1,2.0,True\na,1,2.0,True,5\n", "Expected 4 fields in line 3, saw 5"),
        (b"name,count,seconds,ended\na,1,2.0,True,5\n", "Expected 4 fields in line 2, saw 5"),
        (b'name,count,seconds,ended\na,1,2.0,"True\n', "is damaged"),
        (b"name,count,seconds,ended\na,1.5,2.0,True\n", r"Expected `int \| null`, got `str` - at `\$\[0\].count`"),
        (b"name,count,seconds,ended\na,1,,True\n", r"Expected `float`, got `null` - at `\$\[0\].seconds`"),
    ],
)
def test_a_damaged_table_is_refused_and_stays(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    with pytest.raises(OutputError, match=rf"rows.csv .*{said}.*(delete it)$") as caught:
        read_rows(path, Row)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == content
