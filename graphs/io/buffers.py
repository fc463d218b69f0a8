"""Buffers and their offsets as CSV, in the format published with MiniMalloc.

The columns ``id``, ``lower``, ``upper`` and ``size``, in any order; ``alignment`` and ``pool`` may be there, and others are
kept as they are. A buffer is in use in the half-open interval [lower, upper). With ``start`` or ``begin`` in place of ``lower``,
and ``end`` in place of ``upper``, the interval includes its end. A column ``offset`` is written.
"""

import csv
import io
import os
from dataclasses import dataclass

from planner.graphs.addresses import AddressError, Buffer, Offsets
from planner.graphs.errors import FormatError
from planner.graphs.io.files import read_text, write_text
from planner.graphs.pools import DEVICE

_NAMES = {"buffer": "id", "buffer_id": "id", "begin": "lower", "start": "lower", "end": "upper"}
_NEEDED = ("id", "lower", "upper", "size")
_LARGEST = 2**62  # of a number: sums of two are still 64 bits


@dataclass(frozen=True, slots=True)
class BufferTable:
    """A file of buffers.

    Attributes:
        header: names of the columns, as they are in the file.
        rows: the fields of each buffer, as they are in the file.
        buffers: the buffers that the rows describe.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    buffers: tuple[Buffer, ...]


def read_buffers(path: str | os.PathLike[str]) -> BufferTable:
    """Read the buffers in the file `path`.

    Raises:
        FormatError: the file cannot be read, lacks a column, or a line is not a buffer; two have the same id.
    """
    text = read_text(path)
    try:
        lines = [line for line in csv.reader(io.StringIO(text, newline=""), strict=True) if line]
    except csv.Error as error:
        raise FormatError(f"{path}: not CSV: {error}") from None
    if not lines:
        raise FormatError(f"{path}: the file is empty")
    header = tuple(name.strip() for name in lines[0])
    columns = [_NAMES.get(name, name) for name in header]
    if repeated := [name for name in columns if columns.count(name) > 1]:
        raise FormatError(f"{path}: there are two columns {repeated[0]!r}")
    if missing := [name for name in _NEEDED if name not in columns]:
        raise FormatError(
            f"{path}: there is no column {missing[0]!r}: the first line must name id, lower, upper and size, and is "
            f"{','.join(header)[:80]!r}"
        )
    buffers: list[Buffer] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines[1:], 2):
        where = f"{path}: line {number}"
        if len(line) != len(header):
            raise FormatError(f"{where} has {len(line)} fields, and the header {len(header)}: the file may be cut short")
        buffer = _parse_buffer(dict(zip(columns, line, strict=True)), where, ends_included="end" in header)
        if buffer.id in seen:
            raise FormatError(f"{where}: the id {buffer.id!r} is also that of line {seen[buffer.id]}")
        seen[buffer.id] = number
        buffers.append(buffer)
    return BufferTable(header, tuple(map(tuple, lines[1:])), tuple(buffers))


def write_offsets(path: str | os.PathLike[str], table: BufferTable, offsets: Offsets) -> None:
    """Write the columns of `table` to `path`, and the offset of each buffer as the last one, whole or not at all.

    Raises:
        OutputError: it cannot be written.
    """
    kept = [place for place, name in enumerate(table.header) if name != "offset"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*(table.header[place] for place in kept), "offset"])
    pairs = zip(table.rows, offsets.offsets, strict=True)
    writer.writerows([*(row[place] for place in kept), offset] for row, offset in pairs)
    write_text(path, text.getvalue())


def _parse_buffer(fields: dict[str, str], where: str, *, ends_included: bool) -> Buffer:
    if not fields["id"].strip():
        raise FormatError(f"{where} has no id")
    if fields.get("gaps", "").strip():
        raise FormatError(f"{where}: the buffer has gaps in its lifetime, which cannot be planned: make it several buffers")
    numbers = {name: _number(fields[name], f"{where}: {name}") for name in ("lower", "upper", "size")}
    alignment = _number(fields["alignment"], f"{where}: alignment") if "alignment" in fields else 1
    upper = numbers["upper"] + ends_included
    pool = fields.get("pool", DEVICE).strip()
    try:
        return Buffer(fields["id"].strip(), numbers["lower"], upper, numbers["size"], alignment, pool)
    except AddressError as error:
        raise FormatError(f"{where}: {error}") from None


def _number(text: str, where: str) -> int:
    digits = text.strip()
    if not digits.removeprefix("-").isdecimal() or not digits.isascii():
        raise FormatError(f"{where} is {text!r}: must be a whole number")
    if len(digits) > 20 or abs(int(digits)) > _LARGEST:
        raise FormatError(f"{where} is {digits[:24]}: must be at most 2^62")
    return int(digits)
