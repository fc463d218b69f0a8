"""Tables made of rows: columns are declared as data, with their titles, values and formats."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, TypeVar

from planner.graphs.units import format_bytes, format_ratio, format_seconds

Item = TypeVar("Item")

# Formats by the suffix of a name.
UNITS: Mapping[str, Callable[[Any], str]] = MappingProxyType(
    {"_bytes": format_bytes, "_s": format_seconds, "gap": format_ratio, "overhead": format_ratio, "ratio": "{:.3f}x".format}
)


ALL = object()


class SideBySide(dict[Any, Item]):
    """Rows in one line of a table, by the value that distinguishes them."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        value: name of an attribute of a line's item, or a function of it; None: the attribute named like the title.
        form: format of a value: a function, or a string such as ``{:.2f}``; None: by the unit at the end of its name.
        missing: text for None.
        at: for a line of several rows (``group_side_by_side``), the row of the value; ALL: all rows together; None: any row,
            since they agree.
    """

    title: str
    value: str | Callable[[Any], object] | None = None
    form: str | Callable[[Any], str] | None = None
    missing: str = ""
    at: object = None

    def format_cell(self, item: object) -> str:
        """Return the cell for `item`."""
        value = self.title if self.value is None else self.value
        if isinstance(item, SideBySide):
            item = item if self.at is ALL else next(iter(item.values())) if self.at is None else item.get(self.at)
            if item is None:
                return self.missing
        found = value(item) if callable(value) else attrgetter(value)(item)
        if found is None:
            return self.missing
        form = self.form or (str if callable(value) else get_format(value))
        return form(found) if callable(form) else form.format(found)


def share_column(title: str, part: str, whole: str, form: str | Callable[[Any], str], missing: str = "") -> Column:
    """Return the column of the attribute `part` divided by `whole`; `missing` if one of them is unknown, or `whole` is 0."""
    return Column(title, partial(_divide, part, whole), form, missing)


def _divide(part: str, whole: str, item: object) -> float | None:
    of, by = getattr(item, part), getattr(item, whole)
    return of / by if of is not None and by else None


def get_format(name: str) -> Callable[[Any], str]:
    """Return the format for values of the attribute `name`, by the unit in its name."""
    return next((form for end, form in UNITS.items() if name.endswith(end)), str)


def build_lines(items: Iterable[object], columns: Iterable[Column | str]) -> list[tuple[str, ...]]:
    """Return a header and a line for each of `items`; a string as column names an attribute."""
    declared = [Column(column) if isinstance(column, str) else column for column in columns]
    return [
        tuple(column.title for column in declared),
        *(tuple(column.format_cell(item) for column in declared) for item in items),
    ]


def format_markdown(items: Iterable[object], columns: Iterable[Column | str]) -> str:
    """Return the ``build_lines`` as a Markdown table."""
    return join_markdown(build_lines(items, columns))


def join_markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return `rows`, the first of them the header, as a Markdown table."""
    header, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join((header, f"|{' --- |' * len(rows[0])}", *body)) + "\n"


def format_bold(text: str, *, best: bool) -> str:
    """Return `text`, in bold if it is the best of its line."""
    return f"**{text}**" if best else text


def format_bullets(sentences: Iterable[str]) -> str:
    """Return `sentences` as a Markdown list."""
    return "\n".join(f"- {sentence}" for sentence in sentences) + "\n"


def group_by(items: Iterable[Item], *names: str) -> dict[Any, list[Item]]:
    """Return `items` grouped by their attributes `names`: by the value of a single one, or by a tuple."""
    found: dict[Any, list[Item]] = {}
    of = attrgetter(*names)
    for item in items:
        found.setdefault(of(item), []).append(item)
    return found


def group_side_by_side(items: Iterable[Item], over: str, *names: str) -> list[SideBySide[Item]]:
    """Return those of `items` that agree in `names` as one entry, by their attribute `over`."""
    return [SideBySide({getattr(item, over): item for item in found}) for found in group_by(items, *names).values()]


def format_values(items: Iterable[object], name: str, between: str = " and ") -> str:
    """Return the distinct values of the attribute `name` as text; one value if all rows agree."""
    return between.join(dict.fromkeys(str(getattr(item, name)) for item in items))


def describe_provenance(rows: Sequence[object], *packages: str) -> str:
    """Return a line on what `rows` were made with: machine, torch, further `packages` that are columns, and commit."""
    versions = ", ".join(f"{package} {format_values(rows, package)}" for package in ("torch", *packages))
    return f"{format_values(rows, 'machine')}; {versions}; commit {format_values(rows, 'commit')}.\n"
