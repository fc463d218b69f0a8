"""Rows: frozen dataclasses whose fields are the columns of a CSV, which is complete after every row."""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from planner.graphs.errors import OutputError
from planner.graphs.io.files import write_text
from planner.measure.machine import commit

if TYPE_CHECKING:
    import torch
    from _typeshed import DataclassInstance

Row = TypeVar("Row", bound="DataclassInstance")
Key = tuple[object, ...]
FIRST, _LAST = -1, 1  # positions of columns


def declare_key(said: str = "", *, summary: str = "first") -> Any:
    """Declare a column that is part of the key."""
    return field(metadata={"said": said, "summary": summary, "place": FIRST, "key": True})


def declare_made(said: str = "") -> Any:
    """Declare a column on the machine or versions a row was made with."""
    return field(default="", metadata={"said": said, "place": _LAST})


def declare_column(said: str = "", *, default: object = MISSING, summary: str = "first", place: int = 0) -> Any:
    """Declare a column that is required unless it has a `default`.

    Args:
        said: description; the unit is the end of the column's name.
        default: value if it is not given.
        summary: the function of pandas that sums up several rows of it.
        place: FIRST: among the columns of the key, though it tells no rows apart.
    """
    return field(default=default, metadata={"said": said, "summary": summary, "place": place})


def declare_value(said: str = "", *, summary: str = "first") -> Any:
    """Declare a column that is None (an empty cell) if its value is unknown."""
    return declare_column(said, default=None, summary=summary)


def declare_text(said: str = "") -> Any:
    """Declare a column of text that may be empty."""
    return declare_column(said, default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """Base class of rows whose last columns record what they were made with, as in ``collect_provenance``."""

    machine: str = declare_made()
    commit: str = declare_made()
    torch: str = declare_made()


def list_columns(kind: "type[DataclassInstance]") -> tuple[str, ...]:
    """Return the columns of a CSV of `kind`: the key, other columns, and those of ``Made``."""
    return tuple(field.name for field in sorted(fields(kind), key=lambda field: field.metadata.get("place", 0)))


def list_key_columns(kind: "type[DataclassInstance]") -> tuple[str, ...]:
    """Return the columns of `kind` that form its key."""
    return tuple(field.name for field in fields(kind) if field.metadata.get("key"))


def collect_provenance(device: "torch.device | None" = None, packages: Iterable[str] = ()) -> dict[str, str]:
    """Return the device (None: the CPU), the commit, and the versions of torch and of `packages` as columns of a row."""
    import torch

    from planner.measure.steps import describe_device

    common = {"machine": describe_device(device or torch.device("cpu")), "commit": commit(), "torch": torch.__version__}
    return common | {package: _get_version(package) for package in packages}


def _get_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def find_missing_keys(wanted: Iterable[Key], known: Iterable[object], *names: str) -> list[Key]:
    """Return those of `wanted` that are the values of the columns `names` in no row of `known`."""
    made = set(map(attrgetter(*names), known))
    return [key for key in wanted if key not in made]


def order_by(**names: Iterable[object]) -> Callable[[Any], Key]:
    """Return a sort key for rows: the position of each column's value in its list, or the end of the list if it is missing."""
    places = {name: {value: place for place, value in enumerate(values)} for name, values in names.items()}
    return lambda row: tuple(found.get(getattr(row, name), len(found)) for name, found in places.items())


class KeptRows(Generic[Row]):
    """The rows of a CSV by their keys. The file is complete after every change.

    Args:
        path: path of the CSV, which may be missing.
        order: sort key of rows; None: in the order of addition.

    Raises:
        OutputError: the CSV has other columns, or is damaged.
    """

    def __init__(self, path: Path, kind: type[Row], order: Callable[[Row], Any] | None = None) -> None:
        self.path = path
        self._kind = kind
        self._order = order
        self._key = attrgetter(*list_key_columns(kind))
        self._rows = {self._key(row): row for row in read_rows(path, kind)}

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)

    def of(self, *key: object) -> list[Row]:
        """Return the rows whose key begins with `key`."""
        columns = list_key_columns(self._kind)
        return [row for row in self if all(getattr(row, name) == part for name, part in zip(columns, key, strict=False))]

    def add(self, *rows: Row) -> None:
        """Add `rows` atomically; rows with the same keys are replaced."""
        self._rows |= {self._key(row): row for row in rows}
        if self._order is not None:
            self._rows = {self._key(row): row for row in sorted(self, key=self._order)}
        self._write()

    def drop(self, rows: Iterable[Row]) -> None:
        """Remove `rows`."""
        gone = {self._key(row) for row in rows}
        if gone:
            self._rows = {key: row for key, row in self._rows.items() if key not in gone}
            self._write()

    def _write(self) -> None:
        write_rows(self.path, self._kind, self)


def read_csv(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """Return the rows of a CSV as text by column; an empty list if there is no file.

    Raises:
        OutputError: it has other columns, or is no CSV.
    """
    if not path.exists():
        return []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            header, *rows = list(csv.reader(file, strict=True)) or [[]]
    except (UnicodeDecodeError, csv.Error) as error:
        raise OutputError(f"{path} is damaged ({error}): delete it") from None
    if not header:
        raise OutputError(f"{path} is damaged (it has no columns): delete it")
    if tuple(header) != tuple(columns):
        raise OutputError(f"{path} has other columns than are written here: choose another folder, or delete it")
    for number, row in enumerate(rows, 1):
        if len(row) != len(columns):
            raise OutputError(f"{path} is damaged (row {number} has {len(row)} cells for {len(columns)} columns): delete it")
    return [dict(zip(columns, row, strict=True)) for row in rows]


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """Return the rows of a CSV whose columns are the fields of the dataclass `kind`; empty numeric cells are None.

    Raises:
        OutputError: it has other columns, or is no CSV, or a cell is not of the type of its field.
    """
    types = {field.name: field.type for field in fields(kind)}
    rows = [
        {name: cell if cell or types[name] is str else None for name, cell in row.items()}
        for row in read_csv(path, list_columns(kind))
    ]
    try:
        return msgspec.convert(rows, list[kind], strict=False)  # type: ignore[valid-type]
    except msgspec.ValidationError as error:
        raise OutputError(f"{path} is damaged ({error}): delete it") from None


def write_rows(path: Path, kind: type[Row], rows: Iterable[Row]) -> None:
    """Write `rows` of `kind` to a CSV atomically; raise an OutputError if it cannot be written."""
    names = list_columns(kind)
    write_csv(path, names, ({name: getattr(row, name) for name in names} for row in rows))


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Write a CSV atomically; None becomes an empty cell.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{path.parent} cannot be made: {error.strerror or error}") from error
    table = io.StringIO()
    writer = csv.DictWriter(table, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, table.getvalue())
