"""Tables that grow row by row, as CSV files that are whole after every row. Never imports torch or pandas."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from graphs.errors import OutputError
from graphs.io.files import write_text


def read_csv(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a CSV as text by column; none where there is no file.

    Raises:
        OutputError: it has other columns, or is no CSV.
    """
    if not path.exists():
        return []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
    except (csv.Error, UnicodeError) as error:
        raise OutputError(f"{path} is damaged ({error}): delete it") from None
    if tuple(reader.fieldnames or ()) != tuple(columns):
        raise OutputError(f"{path} has other columns than are written here: choose another folder, or delete it")
    for number, row in enumerate(rows, 1):
        if None in row or None in row.values():
            raise OutputError(f"{path} is damaged (row {number} has more or fewer cells than there are columns): delete it")
    return rows


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Write the CSV, whole or not at all; what is None is left empty.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{path.parent} cannot be made: {error.strerror or error}") from error
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: "" if value is None else value for name, value in row.items()} for row in rows)
    write_text(path, text.getvalue())
