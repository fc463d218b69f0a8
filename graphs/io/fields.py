"""The fields of a JSON object, taken one by one and checked."""

import json
import math
from collections.abc import Mapping
from enum import StrEnum
from typing import NoReturn, TypeGuard, TypeVar

from graphs.errors import FormatError

_Choice = TypeVar("_Choice", bound=StrEnum)
_DEEPEST = 100
_LARGEST = 2**63 - 1


class Fields:
    """The fields of one JSON object, taken one by one and checked.

    Args:
        value: the object.
        source: the file, for messages.
        path: where in the file the object is, "" for the whole.

    Raises:
        FormatError: by every method, with the file, the field and its value.
    """

    def __init__(self, value: object, *, source: str, path: str) -> None:
        self.source = source
        self.path = path
        if not isinstance(value, dict):
            raise FormatError(f"{source}: {path or 'the content'} is {shown(value)}: must be an object, {{...}}")
        self._values = value
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def refuse(self, name: str, must: str) -> NoReturn:
        """Raise the error that field `name` must be otherwise."""
        raise FormatError(f"{self.source}: {self._where(name)} is {shown(self._values[name])}: must be {must}")

    def take(self, name: str) -> object:
        """Field `name`, whatever it is."""
        if name not in self._values:
            raise FormatError(f"{self.source}: {self.path or 'the file'} has no field {name!r}")
        self._taken.add(name)
        return self._values[name]

    def string(self, name: str) -> str:
        """A string."""
        value = self.take(name)
        if not isinstance(value, str):
            self.refuse(name, "a string")
        return _text(value, f"{self.source}: {self._where(name)}")

    def integer(self, name: str, *, signed: bool = False) -> int:
        """A whole number, from 0 unless `signed`, of 63 bits."""
        value = self.take(name)
        if not _is_integer(value):
            self.refuse(name, "a whole number")
        if value < 0 and not signed:
            self.refuse(name, "0 or more")
        if abs(value) > _LARGEST:
            self.refuse(name, "below 2^63")
        return value

    def number(self, name: str) -> float:
        """A finite number, of any sign."""
        value = self.take(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.refuse(name, "a number")
        if abs(value) > _LARGEST or not math.isfinite(value):
            self.refuse(name, "finite")
        return float(value)

    def boolean(self, name: str) -> bool:
        """True or false."""
        value = self.take(name)
        if not isinstance(value, bool):
            self.refuse(name, "true or false")
        return value

    def choice(self, name: str, choices: type[_Choice]) -> _Choice:
        """One of the values of an enumeration."""
        value = self.take(name)
        if not isinstance(value, str) or value not in list(choices):
            self.refuse(name, "one of " + ", ".join(choices))
        return choices(value)

    def array(self, name: str) -> list[object]:
        """A list of anything."""
        value = self.take(name)
        if not isinstance(value, list):
            self.refuse(name, "a list, [...]")
        return value

    def integers(self, name: str, *, below: int = _LARGEST) -> tuple[int, ...]:
        """A list of whole numbers from 0 up to, and without, `below`."""
        values = self.array(name)
        integers = tuple(value for value in values if _is_integer(value) and 0 <= value < below)
        if len(integers) < len(values):
            limit = "" if below == _LARGEST else f" and below {below}"
            self.refuse(name, f"a list of whole numbers, 0 or more{limit}")
        return integers

    def mapping(self, name: str) -> dict[str, object]:
        """An object with any fields."""
        value = self.take(name)
        if not isinstance(value, dict):
            self.refuse(name, "an object, {...}")
        copy = plain(value, f"{self.source}: {self._where(name)}")
        assert isinstance(copy, dict)
        return copy

    def finish(self) -> None:
        """Refuse fields that nobody took."""
        unknown = sorted(set(self._values) - self._taken)
        if unknown:
            raise FormatError(f"{self.source}: {self.path or 'the file'} has the unknown field {shown(unknown[0])}")

    def _where(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name


def shown(value: object) -> str:
    """`value` as in the file, cut to what fits a message."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."


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
        entries = {}
        for name, element in value.items():
            if not isinstance(name, str):
                raise FormatError(f"{where} has the key {name!r}: keys are strings")
            entries[_text(name, where)] = plain(element, f"{where}.{name}", depth=depth + 1)
        return entries
    raise FormatError(f"{where} is of type {type(value).__name__}, which JSON does not know")


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _text(value: str, where: str) -> str:
    """`value`, refused if it is no text: half of a surrogate pair cannot be printed."""
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise FormatError(f"{where} is {shown(value)}: not valid Unicode") from None
    return value
