"""JSON values as msgspec Structs, with defects described in one line, and free-form JSON objects."""

import json
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, inspect

from planner.graphs.errors import FormatError

_LARGEST = 2**63 - 1
_DEEPEST = 100
_SHOWN, _SAID = 60, 200  # characters
_BUILTIN = frozenset({str, int, float, bool, dict})

GRAPH_FORMAT = "remat-planner graph"
PLAN_FORMAT = "remat-planner plan"
VERSION = 4

_WRITER = {GRAPH_FORMAT: "planner trace", PLAN_FORMAT: "planner solve"}

# Types of fields. ``Size`` and ``Finite`` admit negative values: the graph refuses them, with names.
Natural = Annotated[int, Meta(ge=0, le=_LARGEST)]
Size = Annotated[int, Meta(le=_LARGEST)]
Finite = Annotated[float, Meta(ge=-(2.0**63), le=2.0**63)]
Seconds = Annotated[float, Meta(ge=0, le=2.0**63)]

Document = TypeVar("Document")
StructType = TypeVar("StructType", bound=Struct)

_ERROR = re.compile(r"(?P<what>.*?)(?: - at (?:`key` in )?`\$(?P<path>[^`]*)`)?", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")


class RecordedMapping(Mapping[str, object]):
    """Base class of objects with typed fields that are also the mapping which files have of them."""

    @property
    @abstractmethod
    def recorded(self) -> Mapping[str, object]:
        """The entries as in files, in their order."""

    def __getitem__(self, name: str) -> object:
        return self.recorded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.recorded)

    def __len__(self) -> int:
        return len(self.recorded)


def convert_document(value: object, kind: type[Document], source: str, *, path: str = "") -> Document:
    """Return `value` as a `kind`; messages name the file `source` and the position `path` of the value in it.

    Raises:
        FormatError: `value` does not match; names the file, the field, its value and the expected one.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise FormatError(f"{source}: {_describe_defect(str(error), value, kind, path)}") from None


def check_header(data: Mapping[str, object], expected: str, source: str) -> None:
    """Raise a FormatError, with the command that writes such files, unless `data` has this format in a supported version."""
    what, found, version = expected.removeprefix("remat-planner "), data.get("format"), data.get("version")
    if "format" not in data:
        raise FormatError(f'{source}: not a {what}: it has no field "format" (files of {_WRITER[expected]} have)')
    if found != expected:
        known = isinstance(found, str) and found in _WRITER
        kind = f"a {str(found).removeprefix('remat-planner ')}" if known else f"format {shorten(found)}"
        raise FormatError(f"{source}: holds {kind}, but a {what} is expected, as written by {_WRITER[expected]}")
    if isinstance(version, int) and not isinstance(version, bool) and version != VERSION:
        raise FormatError(
            f"{source}: is a {what} of version {shorten(version)}, this planner reads {VERSION}: make a new one with "
            f"{_WRITER[expected]}"
        )


def refuse(source: str, path: str, value: object, must: str) -> NoReturn:
    """Raise the error that `value`, in the file `source` at `path`, must be different."""
    raise FormatError(f"{source}: {path} is {shorten(value)}: must be {must}")


def build_struct(value: object, kind: type[StructType]) -> StructType:
    """Return a `kind` with the attributes of `value`; None represents optional fields that are unset."""
    return kind(*_make_getter(kind)(value))


def list_fields(struct: Struct) -> dict[str, object]:
    """Return the fields of `struct` for a file, without those that equal their default or are unset."""
    # ``msgspec.to_builtins`` omits defaults by identity, not by equality, and does not support numpy's floats.
    return {
        name: value if type(value) in _BUILTIN else _convert_to_builtin(value)
        for value, (name, default) in zip(msgspec.structs.astuple(struct), _list_defaults(type(struct)), strict=True)
        if value is not default and value != default and not (value is None and default is UNSET)
    }


def list_arguments(struct: Struct) -> dict[str, Any]:
    """Return the fields of `struct` as keyword arguments, with None for unset ones."""
    arguments = msgspec.structs.asdict(struct)
    return arguments | dict.fromkeys([name for name, value in arguments.items() if value is UNSET])


def shorten(value: object) -> str:
    """Return `value` as JSON, cut to a length that fits a message."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return _cut(text, _SHOWN)


def convert_to_json(value: object, where: str, *, depth: int = 0) -> object:
    """Convert `value` to dicts with string keys, lists, strings, finite numbers, booleans and None.

    Raises:
        FormatError: a part has no such form; `where` describes `value`.
    """
    if depth > _DEEPEST:
        raise FormatError(f"{where} is nested more than {_DEEPEST} deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _check_text(value, where)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise FormatError(f"{where} is {shorten(value)}: must be finite")
        return float(value)
    if isinstance(value, list | tuple):
        return [convert_to_json(element, f"{where}[{i}]", depth=depth + 1) for i, element in enumerate(value)]
    if isinstance(value, Mapping):
        return convert_to_json_object(value, where, depth=depth)
    raise FormatError(f"{where} is of type {type(value).__name__}, which JSON does not know")


def convert_to_json_object(value: Mapping[str, object], where: str, *, depth: int = 0) -> dict[str, object]:
    """Convert a mapping as ``convert_to_json`` does."""
    entries = {}
    for name, element in value.items():
        if not isinstance(name, str):
            raise FormatError(f"{where} has the key {name!r}: keys are strings")
        entries[_check_text(name, where)] = convert_to_json(element, f"{where}.{name}", depth=depth + 1)
    return entries


def _convert_to_builtin(value: object) -> object:
    if isinstance(value, tuple):
        return [element if type(element) is int else _convert_to_builtin(element) for element in value]
    if isinstance(value, Struct):
        return list_fields(value)
    return str(value) if isinstance(value, StrEnum) else value


@cache
def _make_getter(kind: type[Struct]) -> Callable[[object], tuple[object, ...]]:
    return attrgetter(*kind.__struct_fields__)


@cache
def _list_defaults(kind: type[Struct]) -> tuple[tuple[str, object], ...]:
    """Return the names of the fields in the file, and their defaults."""
    return tuple((field.encode_name, field.default) for field in msgspec.structs.fields(kind))


def _describe_defect(said: str, value: object, kind: object, path: str) -> str:
    """Return msgspec's message about `value`, with the value at the position that it names."""
    match = _ERROR.fullmatch(said)
    assert match is not None
    what, steps = match["what"], [name or place for name, place in _STEP.findall(match["path"] or "")]
    for i, step in enumerate(steps):
        if isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value, path = value[int(step)], f"{path}[{step}]"
        elif isinstance(value, dict) and step in value:
            value, path = value[step], f"{path}.{step}" if path else step
        else:  # a key or value of a mapping, which msgspec does not name
            steps = steps[:i]
            break
    if isinstance(value, float) and not math.isfinite(value):
        what = "expected a finite number"
    if what.startswith("Invalid ") and (choices := _list_choices(kind, steps)):
        what = f"expected one of {', '.join(choices)}"
    what = _cut(f"{what[0].lower()}{what[1:]}".replace("\n", " "), _SAID)
    if what.startswith("object "):
        return f"{path}: {what}" if path else what
    return f"{path or 'the content'} is {shorten(value)}: {what}"


def _list_choices(kind: object, steps: Sequence[str]) -> list[str]:
    """Return the values of the enumeration, or the tags, at `steps` in a `kind`."""
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


def _check_text(value: str, where: str) -> str:
    """Return `value`; raise an error if it has half of a surrogate pair, which cannot be printed."""
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise FormatError(f"{where} is {shorten(value)}: not valid Unicode") from None
    return value
