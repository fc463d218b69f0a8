"""Parameters of solvers in TOML files: a table is a dataclass, and its keys are the fields of that."""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TypeVar, get_type_hints

import msgspec

from graphs.errors import FormatError

Params = TypeVar("Params")


def read_params(path: str | os.PathLike[str], kind: type[Params]) -> Params:
    """Return the parameters in the TOML file `path`; what it does not name keeps its default.

    Args:
        path: of the file.
        kind: a dataclass of parameters, such as ``WindowsParams``.

    Raises:
        FormatError: it is no such file; names the key and what it must be.
    """
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        _check_names(data, kind, "")
        return msgspec.convert(data, kind)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError, _UnknownError) as error:
        raise FormatError(f"{path} holds no {kind.__name__}: {error}") from None


class _UnknownError(Exception):
    """A key that is no parameter."""


def _check_names(data: Mapping[str, object], kind: type, where: str) -> None:
    """Refuse keys that are no fields, in tables of tables too."""
    assert is_dataclass(kind)
    known, types = [field.name for field in fields(kind)], get_type_hints(kind)
    for name, value in data.items():
        if name not in known:
            raise _UnknownError(f"there is no parameter {where}{name}; choose of {', '.join(known)}")
        if isinstance(value, Mapping) and is_dataclass(types[name]):
            _check_names(value, types[name], f"{where}{name}.")
