"""Reader of solver parameters from TOML files: frozen dataclasses of numbers, strings, tuples and other dataclasses."""

import math
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from graphs.errors import UsageError

Params = TypeVar("Params")

_WANTED = {bool: "true or false", int: "a whole number, 0 or more", float: "a number, 0 or more", str: "a string"}


def read_params(kind: type[Params], path: Path | str) -> Params:
    """Return parameters of class `kind` from the file, with defaults for missing ones.

    Raises:
        UsageError: the file cannot be read or is not TOML, or it has an unknown key or a value of another type.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    made: Params = _made(kind, table, f"{path}: ", "")
    return made


def _made(kind: Any, value: Any, file: str, name: str) -> Any:
    """Return `value` of the file as a `kind`."""
    if is_dataclass(kind):
        return _of_table(kind, value, file, name)
    if get_origin(kind) is tuple:
        return _of_array(get_args(kind), value, file, name)
    given = float(value) if kind is float and type(value) is int else value
    if type(given) is not kind or (kind in (int, float) and not (given >= 0 and math.isfinite(given))):
        raise UsageError(f"{file}{name} is {value!r}: must be {_WANTED[kind]}")
    return given


def _of_table(kind: Any, table: Any, file: str, name: str) -> Any:
    known = [field.name for field in fields(kind)]
    if not isinstance(table, dict):
        raise UsageError(f"{file}{name} is {table!r}: must be a table with any of {', '.join(known)}")
    if unknown := [key for key in table if key not in known]:
        where = f"in {name}" if name else "at the top"
        raise UsageError(f"{file}there is no {unknown[0]!r} {where}: choose from {', '.join(known)}")
    hints = get_type_hints(kind)
    prefix = f"{name}." if name else ""
    return kind(**{key: _made(hints[key], value, file, prefix + key) for key, value in table.items()})


def _of_array(kinds: tuple[Any, ...], array: Any, file: str, name: str) -> Any:
    of_any_length = len(kinds) == 2 and kinds[1] is Ellipsis
    if not isinstance(array, list) or not (of_any_length or len(array) == len(kinds)):
        wanted = "an array" if of_any_length else f"an array of {len(kinds)} values"
        raise UsageError(f"{file}{name} is {array!r}: must be {wanted}")
    of_each = kinds[:1] * len(array) if of_any_length else kinds
    return tuple(_made(kind, value, file, f"{name}[{i}]") for i, (kind, value) in enumerate(zip(of_each, array, strict=True)))
