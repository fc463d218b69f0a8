"""The lines of the logs that ``simrd`` imports: JSON objects, each an instruction."""

import gzip
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

from msgspec import Meta, Struct

from planner.graphs.documents import Natural, convert_document, shorten
from planner.graphs.errors import FormatError

_GZIP = b"\x1f\x8b"
_HEAD_BYTES = 4096

Names = tuple[str, ...]
_Number = Annotated[str, Meta(pattern=r"^-?[0-9]{1,19}\Z")]  # the logs write integers as strings


class LogLine(Struct, tag_field="INSTRUCTION", rename=str.upper):
    """An instruction with its fields."""


class ConstantLine(LogLine, tag="CONSTANT"):
    """Memory from outside, followed by its MEMORY."""

    name: str


class CallLine(LogLine, tag="CALL"):
    """An op, followed by MEMORY and ALIAS of each result."""

    name: str
    args: Names
    result: Names
    time: _Number


class MutateLine(LogLine, tag="MUTATE"):
    """An op that writes to the arguments at the positions `mutate`."""

    name: str
    args: Names
    mutate: tuple[Natural, ...]
    time: _Number


class CopyLine(LogLine, tag="COPY"):
    """A new name `dst` for the storage of `src`."""

    src: str
    dst: str


class CopyFromLine(LogLine, tag="COPY_FROM"):
    """A name `dst` in use that refers to the storage of `src` from here on."""

    src: str
    dst: str


class ReleaseLine(LogLine, tag="RELEASE"):
    """The end of a name."""

    name: str


class AnnotateLine(LogLine, tag="ANNOTATE"):
    """A mark: START or BACKWARD."""

    annotation: str


class MemoryLine(LogLine, tag="MEMORY"):
    """The bytes of `name`."""

    name: str
    memory: _Number


class AliasLine(LogLine, tag="ALIAS"):
    """The position of the argument that `name` is a view of, or -1."""

    name: str
    alias: _Number


_INSTRUCTION: Any = (
    ConstantLine | CallLine | MutateLine | CopyLine | CopyFromLine | ReleaseLine | AnnotateLine | MemoryLine | AliasLine
)
_KINDS: dict[str, Any] = {str(kind.__struct_config__.tag): kind for kind in get_args(_INSTRUCTION)}


class _Beginning(Struct, rename=str.upper):
    """The fields of a line that mark the start of the log."""

    instruction: object
    annotation: object = None


def is_log(path: str | os.PathLike[str]) -> bool:
    """Return True if the file `path` is gzipped or its first line is an instruction."""
    try:
        with Path(path).open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except (OSError, ValueError):
        return False
    return head.startswith(_GZIP) or b'"INSTRUCTION"' in head.lstrip().split(b"\n", 1)[0]


def read_lines(path: str | os.PathLike[str]) -> list[tuple[int, Mapping[str, object]]]:
    """Return the lines after START, with their numbers; all lines if there is none.

    Raises:
        FormatError: the file is cut short or damaged, or a line is no JSON object.
    """
    lines = []
    for number, text in enumerate(_read_text(path).split("\n"), start=1):
        if not text.strip():
            continue
        try:
            lines.append((number, json.loads(text)))
        except (ValueError, RecursionError):
            raise FormatError(f"{path}: line {number} is not JSON, or cut short: {shorten(text)}") from None
    for i, (number, value) in enumerate(lines):
        beginning = convert_document(value, _Beginning, str(path), path=f"line {number}")
        if beginning.instruction == "ANNOTATE" and beginning.annotation == "START":
            return lines[i + 1 :]
    return lines


def parse_line(value: object, source: str, number: int) -> LogLine:
    """Return line `number` of the file `source` as an instruction; raise a FormatError if the line is not an instruction."""
    # msgspec caches the decoder of a Struct, but not of a union.
    kind = _KINDS.get(str(value.get("INSTRUCTION")), _INSTRUCTION) if isinstance(value, dict) else _INSTRUCTION
    line: LogLine = convert_document(value, kind, source, path=f"line {number}")
    return line


def _read_text(path: str | os.PathLike[str]) -> str:
    try:
        content = Path(path).read_bytes()
        if content.startswith(_GZIP):
            content = gzip.decompress(content)
        return content.decode()
    except EOFError:
        raise FormatError(f"{path}: the file is cut short: the gzip stream has no end") from None
    except (zlib.error, gzip.BadGzipFile) as error:
        raise FormatError(f"{path}: the gzip stream is damaged: {error}") from None
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not a text file: byte {error.start} is 0x{error.object[error.start]:02x}") from None
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from None
