"""Tables that grow row by row, as CSV files that are whole after every row. Imports pandas only when called."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from graphs.errors import OutputError
from graphs.io.files import write_text

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Row = TypeVar("Row", bound=DataclassInstance)


def read_csv(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a CSV as text by column; none where there is no file.

    Raises:
        OutputError: it has other columns, or is no CSV.
    """
    if not path.exists():
        return []
    import pandas as pd

    try:
        # Read by its Python engine, pandas tells a cell that is not there from an empty one; the header is a row like others.
        table = pd.read_csv(path, header=None, dtype=str, keep_default_na=False, encoding="utf-8", engine="python")
    except ValueError as error:  # of pandas' parser, or of the encoding
        raise OutputError(f"{path} is damaged ({str(error).strip()}): delete it") from None
    header, *rows = table.itertuples(index=False, name=None)
    if header != tuple(columns):
        raise OutputError(f"{path} has other columns than are written here: choose another folder, or delete it")
    for number, row in enumerate(rows, 1):
        if not all(isinstance(cell, str) for cell in row):
            raise OutputError(f"{path} is damaged (row {number} has fewer cells than there are columns): delete it")
    return [dict(zip(columns, row, strict=True)) for row in rows]


def read_rows(path: Path, kind: "type[Row]") -> "list[Row]":
    """The rows of a CSV whose columns are the fields of the dataclass `kind`; empty numbers are None.

    Raises:
        OutputError: it has other columns, or is no CSV, or a cell is not of the type of its field.
    """
    columns = {field.name: field.type for field in fields(kind)}
    rows = [
        {name: text if text or columns[name] is str else None for name, text in row.items()}
        for row in read_csv(path, tuple(columns))
    ]
    try:
        return msgspec.convert(rows, list[kind], strict=False)  # type: ignore[valid-type]
    except msgspec.ValidationError as error:
        raise OutputError(f"{path} is damaged ({error}): delete it") from None


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Write the CSV, whole or not at all; what is None is left empty.

    Raises:
        OutputError: it cannot be written.
    """
    import pandas as pd

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{path.parent} cannot be made: {error.strerror or error}") from error
    cells = [["" if row[name] is None else str(row[name]) for name in columns] for row in rows]
    write_text(path, pd.DataFrame(cells, columns=list(columns), dtype=str).to_csv(index=False, lineterminator="\n"))
