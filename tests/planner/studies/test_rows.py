"""The experiment engine: what is run, kept, read and refused, and what is made of it."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

from benchmarks import command
from benchmarks.command import Main, Setting, build_parser, carry_out
from planner.graphs.errors import OutputError, PlannerError
from planner.studies import comparison_rows
from planner.studies.experiment import Study
from planner.studies.rows import (
    Made,
    declare_column,
    declare_key,
    declare_value,
    find_missing_keys,
    list_columns,
    list_key_columns,
    order_by,
    read_csv,
    read_rows,
    write_csv,
    write_rows,
)
from planner.studies.tables import (
    ALL,
    Column,
    build_lines,
    describe_provenance,
    format_bullets,
    format_markdown,
    format_values,
    group_by,
    group_side_by_side,
    join_markdown,
)

RESULTS = Path(__file__).parents[3] / "results"


@dataclass(frozen=True, slots=True)
class Plain:
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
        Plain('a, "b"\n ', 2**60 + 1, 0.1 + 0.2, True),
        Plain("NA", None, 1e-300, False),
        Plain("", 0, 5e-324, True),
        Plain("007", -1, 1.7976931348623157e308, False),
        Plain("größe", 3, 1 / 3, True),
    ]
    write_csv(tmp_path / "rows.csv", COLUMNS, map(asdict, rows))
    assert read_rows(tmp_path / "rows.csv", Plain) == rows
    assert read_rows(tmp_path / "none.csv", Plain) == []
    write_csv(tmp_path / "none.csv", COLUMNS, [])
    assert read_rows(tmp_path / "none.csv", Plain) == []
    assert (tmp_path / "none.csv").read_text() == "name,count,seconds,ended\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is damaged"),
        (b"\xff\xfe", "is damaged"),
        (b"x" * 200_000 + b"\n", "is damaged"),
        (b"name,count\na,1\n", "has other columns"),
        (b"name,count,ended,seconds\na,1,True,2.0\n", "has other columns"),
        (b"name,count,seconds,ended\na,1,2.0\n", "row 1 has 3 cells for 4 columns"),
        (b"name,count,seconds,ended\na,1,2.0,True\na,1,2.0,True,5\n", "row 2 has 5 cells for 4 columns"),
        (b"name,count,seconds,ended\na,1,2.0,True,5\n", "row 1 has 5 cells for 4 columns"),
        (b'name,count,seconds,ended\na,1,2.0,"True\n', "is damaged"),
        (b"name,count,seconds,ended\na,1.5,2.0,True\n", r"Expected `int \| null`, got `str` - at `\$\[0\].count`"),
        (b"name,count,seconds,ended\na,1,,True\n", r"Expected `float`, got `null` - at `\$\[0\].seconds`"),
    ],
)
def test_a_damaged_table_is_refused_and_stays(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    with pytest.raises(OutputError, match=rf"rows.csv .*{said}.*(delete it)$") as caught:
        read_rows(path, Plain)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == content


@dataclass(frozen=True, slots=True, kw_only=True)
class Base(Made):
    """What rows share."""

    seconds: float = declare_column("that it took", summary="median")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Base):
    """A part of a case."""

    case: str = declare_key("its name")
    part: int = declare_key(summary="max")
    peak_bytes: int | None = declare_value()


def row(case: str, part: int, *, seconds: float = 1.0, peak_bytes: int | None = None) -> Row:
    return Row(case=case, part=part, seconds=seconds, peak_bytes=peak_bytes, machine="m", commit="c", torch="t")


class Runs:
    """Runs cases of three parts, and remembers which were made."""

    def __init__(self) -> None:
        self.made: list[tuple[str, int]] = []
        self.ends_at: tuple[str, int] | None = None

    def __call__(self, case: str, known: Sequence[Row]) -> Iterator[Row]:
        there = {row.part for row in known}
        for part in range(3):
            if part not in there:
                if (case, part) == self.ends_at:
                    raise PlannerError("it ended")
                self.made.append((case, part))
                yield row(case, part)


def page(rows: Sequence[Row]) -> str:
    return format_markdown(rows, ("case", "part"))


NAMES = ("b", "a")


def carried_out(runs: Runs, folder: Path, *words: str, **changed: object) -> tuple[int, Study[str, Row]]:
    study = replace(Study(Row, runs, order=order_by(case=NAMES), pages={"table.md": page}), **changed)
    arguments = build_parser("It runs.", Row, models=NAMES, out="results").parse_args(["--out", str(folder), *words])
    return carry_out(study, arguments, {(name,): name for name in arguments.models}), study


def test_cases_with_rows_are_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = Runs()
    assert carried_out(runs, tmp_path, "--models", "a")[0] == 0
    assert carried_out(runs, tmp_path)[0] == 0
    assert runs.made == [(case, part) for case in ("a", "b") for part in range(3)]
    rows = read_rows(tmp_path / "rows.csv", Row)
    assert [(row.case, row.part) for row in rows] == [(case, part) for case in NAMES for part in range(3)]
    assert capsys.readouterr().out.endswith((tmp_path / "table.md").read_text()) and (tmp_path / "table.md").read_text() == page(
        rows
    )
    runs.made.clear()
    carried_out(runs, tmp_path, "--models", "b", "--fresh")
    assert {case for case, _ in runs.made} == {"b"}


@pytest.mark.parametrize(("whole", "kept"), [(True, 0), (False, 2)])
def test_rows_written_before_an_error_are_kept(
    whole: bool, kept: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs()
    runs.ends_at = "b", 2
    assert carried_out(runs, tmp_path, whole=whole)[0] == 2
    assert "error: it ended" in capsys.readouterr().err
    assert len(read_rows(tmp_path / "rows.csv", Row)) == kept
    runs.made.clear()
    runs.ends_at = None
    carried_out(runs, tmp_path, "--models", "b", whole=whole)
    assert runs.made == [("b", part) for part in range(kept, 3)]


def test_cases_are_run_again_depending_on_their_rows(tmp_path: Path) -> None:
    runs = Runs()
    for _ in range(2):
        carried_out(runs, tmp_path, "--models", "a", again=lambda rows: rows[0].seconds == 1)
    assert runs.made == [("a", part) for part in range(3)]  # what is known is left to the function


def test_tables_are_made_without_running(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = Runs()
    assert carried_out(runs, tmp_path, "--tables-only")[0] == 0
    assert not runs.made and capsys.readouterr().out == "" and not (tmp_path / "table.md").exists()
    carried_out(runs, tmp_path)
    (tmp_path / "table.md").write_text("")
    drawn: list[Path] = []
    carried_out(Runs(), tmp_path, "--tables-only", "--fresh", figures={"f.png": lambda rows, path: drawn.append(path)})
    assert (tmp_path / "table.md").read_text() == page(read_rows(tmp_path / "rows.csv", Row))
    assert drawn == [tmp_path / "f.png"]


def test_failures_are_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = carried_out(Runs(), tmp_path, failures=lambda rows: [f"{row.case} is bad" for row in rows if row.part == 2])
    assert code == 1
    assert capsys.readouterr().err == "b is bad\na is bad\n"


def test_a_csv_of_other_columns_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.csv").write_text("x\n1\n")
    assert carried_out(Runs(), tmp_path)[0] == 2
    assert "has other columns" in capsys.readouterr().err


def test_help_explains_the_columns_and_names_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    parser: argparse.ArgumentParser = build_parser("It runs.", Row, models=NAMES, out="results")
    assert "  seconds: that it took" in parser.format_help() and "  case: its name" in parser.format_help()
    with pytest.raises(SystemExit):
        parser.parse_args(["--models", "c"])
    assert "there is no model 'c': choose from b, a" in capsys.readouterr().err


def test_keys_come_first_and_provenance_last() -> None:
    assert list_columns(Row) == ("case", "part", "seconds", "peak_bytes", "machine", "commit", "torch")
    assert list_key_columns(Row) == ("case", "part")


def test_kept_rows_are_found_replaced_and_dropped(tmp_path: Path) -> None:
    kept = Study(Row, Runs()).read_kept(tmp_path)
    kept.add(row("a", 0), row("b", 0), row("a", 1))
    kept.add(row("a", 0, seconds=2.0))
    assert ("a", 0) in kept and ("c", 0) not in kept
    assert [r.seconds for r in kept.of("a")] == [2.0, 1.0]
    kept.drop(kept.of("a"))
    assert list(kept) == read_rows(tmp_path / "rows.csv", Row) == [row("b", 0)]


def test_cells_are_written_by_their_units() -> None:
    columns = (
        "case",
        Column("peak", "peak_bytes", missing="-"),
        Column("took", "seconds", "{:.2f}"),
    )
    assert build_lines([row("a", 0, seconds=1.25, peak_bytes=2000), row("b", 0)], columns) == [
        ("case", "peak", "took"),
        ("a", "2.00 kB", "1.25"),
        ("b", "-", "1.00"),
    ]
    assert format_markdown([row("a", 0)], ("case", columns[1])) == join_markdown([("case", "peak"), ("a", "-")])
    assert format_bullets(["x", "y"]) == "- x\n- y\n"


def test_rows_side_by_side_are_one_line() -> None:
    rows = [row("a", 0), row("a", 1, seconds=3.0), row("b", 1, seconds=4.0)]
    columns = (
        "case",
        *(Column(str(part), "seconds", "{:g}", at=part) for part in (0, 1)),
        Column("sum", lambda found: sum(row.seconds for row in found.values()), "{:g}", at=ALL),
    )
    assert build_lines(group_side_by_side(rows, "part", "case"), columns)[1:] == [("a", "1", "3", "4"), ("b", "", "4", "4")]
    assert list(group_by(rows, "case", "part")) == [("a", 0), ("a", 1), ("b", 1)]
    assert list(group_by(rows, "case")) == ["a", "b"] and format_values(rows, "case") == "a and b"


def test_benchmark_passes_its_settings_to_each_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "limit_threads", lambda: None)
    seen: list[tuple[str, int]] = []

    def run(case: str, known: Sequence[Row], *, times: int) -> Iterator[Row]:
        seen.append((case, times))
        yield row(case, times)

    main = Main(Study(Row, run), NAMES, out=str(tmp_path), settings={"times": Setting(3, "how often")})
    assert main(["--models", "a", "--times", "5"]) == 0
    assert main([]) == 0
    assert seen == [("a", 5), ("b", 3)]  # a has its rows


def test_keys_without_rows_are_missing() -> None:
    known = [row("a", 0), row("a", 2)]
    assert find_missing_keys([("a", 0), ("a", 1), ("b", 2)], known, "case", "part") == [("a", 1), ("b", 2)]


def test_environments_of_rows_are_listed_once() -> None:
    rows = [row("a", 0), replace(row("a", 1), torch="u")]
    assert describe_provenance(rows, "case") == "m; torch t and u, case a; commit c.\n"
