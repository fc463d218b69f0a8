"""Solver parameters: frozen dataclasses of numbers, strings, tuples and other dataclasses, checked, or read from TOML files."""

import math
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from graphs.errors import UsageError

Params = TypeVar("Params")

_WANTED = {bool: "true or false", int: "a whole number, 0 or more", float: "a number, 0 or more", str: "a string"}


def check_values(params: Any, group: str = "") -> None:
    """Raise unless each value in `params` has the type of its field, and each number is finite and not negative.

    Args:
        group: name of the field that holds `params`, for messages.

    Raises:
        UsageError: with the name of the field, its value, and what it must be.
    """
    hints = get_type_hints(type(params))
    for field in fields(params):
        _check(hints[field.name], getattr(params, field.name), f"{group}.{field.name}" if group else field.name)


def _check(kind: Any, value: Any, name: str) -> None:
    if is_dataclass(kind):
        if type(value) is not kind:
            raise UsageError(f"{name} is {value!r}: must be {getattr(kind, '__name__', kind)}")
        check_values(value, name)
    elif get_origin(kind) is tuple:
        if type(value) is not tuple:
            raise UsageError(f"{name} is {value!r}: must be a tuple")
        for i, (of_item, item) in enumerate(_pair_items(get_args(kind), value, name)):
            _check(of_item, item, f"{name}[{i}]")
    else:
        fits = type(value) is kind or (kind is float and type(value) is int)
        if not fits or (kind in (int, float) and not (value >= 0 and math.isfinite(value))):
            raise UsageError(f"{name} is {value!r}: must be {_WANTED[kind]}")


def _pair_items(kinds: tuple[Any, ...], values: Any, name: str) -> list[tuple[Any, Any]]:
    """Return the items of a tuple with their types, given the arguments of its type."""
    of_any_length = len(kinds) == 2 and kinds[1] is Ellipsis
    if not of_any_length and len(values) != len(kinds):
        raise UsageError(f"{name} is {values!r}: must be an array of {len(kinds)} values")
    return list(zip(kinds[:1] * len(values) if of_any_length else kinds, values, strict=True))


def read_params(kind: type[Params], path: Path | str) -> Params:
    """Return parameters of class `kind` from the file, with defaults for missing ones.

    Raises:
        UsageError: the file cannot be read or is not TOML, or it has an unknown key or a wrong value.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    try:
        made: Params = _convert(kind, table, "")
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    return made


def _convert(kind: Any, value: Any, name: str) -> Any:
    """Return a `value` of the file with tables and arrays as dataclasses and tuples."""
    if is_dataclass(kind):
        return _convert_table(kind, value, name)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise UsageError(f"{name} is {value!r}: must be an array")
        return tuple(
            _convert(of_item, item, f"{name}[{i}]") for i, (of_item, item) in enumerate(_pair_items(get_args(kind), value, name))
        )
    _check(kind, value, name)
    return float(value) if kind is float else value


def _convert_table(kind: Any, table: Any, name: str) -> Any:
    known = [field.name for field in fields(kind)]
    if not isinstance(table, dict):
        raise UsageError(f"{name} is {table!r}: must be a table with any of {', '.join(known)}")
    if unknown := [key for key in table if key not in known]:
        where = f"in {name}" if name else "at the top"
        raise UsageError(f"there is no {unknown[0]!r} {where}: choose from {', '.join(known)}")
    hints = get_type_hints(kind)
    prefix = f"{name}." if name else ""
    return kind(**{key: _convert(hints[key], value, prefix + key) for key, value in table.items()})
