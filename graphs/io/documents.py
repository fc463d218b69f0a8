"""JSON values as Structs: what msgspec finds wrong in them, in one line, and the free objects, which have no type."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, inspect

from graphs.errors import FormatError

_LARGEST = 2**63 - 1
_DEEPEST = 100
_SHOWN, _SAID = 60, 200  # characters
_BUILTIN = frozenset({str, int, float, bool, dict})

GRAPH_FORMAT = "remat-planner graph"
PLAN_FORMAT = "remat-planner plan"
VERSION = 4

_WRITER = {GRAPH_FORMAT: "planner trace", PLAN_FORMAT: "planner solve"}

# What documents are made of. ``Size`` and ``Finite`` are below zero where the graph is to refuse them, which knows names.
Natural = Annotated[int, Meta(ge=0, le=_LARGEST)]
Size = Annotated[int, Meta(le=_LARGEST)]
Finite = Annotated[float, Meta(ge=-(2.0**63), le=2.0**63)]
Seconds = Annotated[float, Meta(ge=0, le=2.0**63)]

Document = TypeVar("Document")
Row = TypeVar("Row", bound=Struct)

_ERROR = re.compile(r"(?P<what>.*?)(?: - at (?:`key` in )?`\$(?P<path>[^`]*)`)?", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")


def document(value: object, kind: type[Document], source: str, *, path: str = "") -> Document:
    """`value` as a `kind`; `source` names the file in messages, and `path` says where in it the value is.

    Raises:
        FormatError: it is none; names the file, the field and its value, and says what is expected.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise FormatError(f"{source}: {_defect(str(error), value, kind, path)}") from None


def check_header(data: Mapping[str, object], expected: str, source: str) -> None:
    """Refuse `data` unless it is what is expected, in a version this planner reads.

    Raises:
        FormatError: says what makes one.
    """
    what, found, version = expected.removeprefix("remat-planner "), data.get("format"), data.get("version")
    if "format" not in data:
        raise FormatError(f'{source}: not a {what}: it has no field "format" (files of {_WRITER[expected]} have)')
    if found != expected:
        known = isinstance(found, str) and found in _WRITER
        kind = f"a {str(found).removeprefix('remat-planner ')}" if known else f"format {shown(found)}"
        raise FormatError(f"{source}: holds {kind}, but a {what} is expected, as written by {_WRITER[expected]}")
    if isinstance(version, int) and not isinstance(version, bool) and version != VERSION:
        raise FormatError(
            f"{source}: is a {what} of version {shown(version)}, this planner reads {VERSION}: make a new one with "
            f"{_WRITER[expected]}"
        )


def refuse(source: str, path: str, value: object, must: str) -> NoReturn:
    """Raise the error that `value`, in the file `source` at `path`, must be otherwise."""
    raise FormatError(f"{source}: {path} is {shown(value)}: must be {must}")


def row_of(value: object, kind: type[Row]) -> Row:
    """The `kind` whose fields are the attributes of `value`; of those that can be left out, None says that they are."""
    return kind(*_attributes(kind)(value))


def fields_of(row: Struct) -> dict[str, object]:
    """The fields of `row` as they stand in a file: without those that equal their default or are left out."""
    # ``msgspec.to_builtins`` leaves out what is its default, not what equals it, and does not know numpy's floats.
    return {
        name: value if type(value) in _BUILTIN else _builtin(value)
        for value, (name, default) in zip(msgspec.structs.astuple(row), _defaults(type(row)), strict=True)
        if value is not default and value != default and not (value is None and default is UNSET)
    }


def arguments_of(row: Struct) -> dict[str, Any]:
    """The fields of `row` as arguments: what is left out is None."""
    arguments = msgspec.structs.asdict(row)
    return arguments | dict.fromkeys([name for name, value in arguments.items() if value is UNSET])


def shown(value: object) -> str:
    """`value` as in the file, cut to what fits a message."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return _cut(text, _SHOWN)


def plain(value: object, where: str, *, depth: int = 0) -> object:
    """`value` as dicts with string keys, lists, strings, finite numbers, booleans and None.

    Raises:
        FormatError: some of it has no such form; `where` says what `value` is.
    """
    if depth > _DEEPEST:
        raise FormatError(f"{where} is nested more than {_DEEPEST} deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise FormatError(f"{where} is {shown(value)}: must be finite")
        return float(value)
    if isinstance(value, list | tuple):
        return [plain(element, f"{where}[{i}]", depth=depth + 1) for i, element in enumerate(value)]
    if isinstance(value, Mapping):
        return plain_object(value, where, depth=depth)
    raise FormatError(f"{where} is of type {type(value).__name__}, which JSON does not know")


def plain_object(value: Mapping[str, object], where: str, *, depth: int = 0) -> dict[str, object]:
    """The same of an object."""
    entries = {}
    for name, element in value.items():
        if not isinstance(name, str):
            raise FormatError(f"{where} has the key {name!r}: keys are strings")
        entries[_text(name, where)] = plain(element, f"{where}.{name}", depth=depth + 1)
    return entries


def _builtin(value: object) -> object:
    if isinstance(value, tuple):
        return [element if type(element) is int else _builtin(element) for element in value]
    if isinstance(value, Struct):
        return fields_of(value)
    return str(value) if isinstance(value, StrEnum) else value


@cache
def _attributes(kind: type[Struct]) -> Callable[[object], tuple[object, ...]]:
    return attrgetter(*kind.__struct_fields__)


@cache
def _defaults(kind: type[Struct]) -> tuple[tuple[str, object], ...]:
    """The names that the fields have in the file, and their defaults."""
    return tuple((field.encode_name, field.default) for field in msgspec.structs.fields(kind))


def _defect(said: str, value: object, kind: object, path: str) -> str:
    """What msgspec says of `value`, with the value at the place that it names."""
    match = _ERROR.fullmatch(said)
    assert match is not None
    what, steps = match["what"], [name or place for name, place in _STEP.findall(match["path"] or "")]
    for i, step in enumerate(steps):
        if isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value, path = value[int(step)], f"{path}[{step}]"
        elif isinstance(value, dict) and step in value:
            value, path = value[step], f"{path}.{step}" if path else step
        else:  # a key or value of a mapping, whose name msgspec does not say
            steps = steps[:i]
            break
    if isinstance(value, float) and not math.isfinite(value):
        what = "expected a finite number"
    if what.startswith("Invalid ") and (choices := _choices(kind, steps)):
        what = f"expected one of {', '.join(choices)}"
    what = _cut(f"{what[0].lower()}{what[1:]}".replace("\n", " "), _SAID)
    if what.startswith("object "):
        return f"{path}: {what}" if path else what
    return f"{path or 'the content'} is {shown(value)}: {what}"


def _choices(kind: object, steps: Sequence[str]) -> list[str]:
    """The values of the enumeration, or the tags, that stand in a `kind` where `steps` lead."""
    at = inspect.type_info(kind)
    for step in steps:
        match at:
            case inspect.StructType():
                at = next(field.type for field in at.fields if field.encode_name == step)
            case inspect.VarTupleType():
                at = at.item_type
            case inspect.TupleType():
                at = at.item_types[int(step)]
            case inspect.UnionType():
                return [str(one.tag) for one in at.types if isinstance(one, inspect.StructType) and one.tag_field == step]
    return list(at.cls) if isinstance(at, inspect.EnumType) and issubclass(at.cls, StrEnum) else []


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _text(value: str, where: str) -> str:
    """`value`, refused if it is no text: half of a surrogate pair cannot be printed."""
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise FormatError(f"{where} is {shown(value)}: not valid Unicode") from None
    return value
