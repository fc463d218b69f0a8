"""JSON files read with every defect named, and written whole or not at all."""

import json
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

from graphs.errors import FormatError, OutputError
from graphs.jsonfields import shown


def read_object(path: str | os.PathLike[str]) -> dict[str, object]:
    """The JSON object in the file `path`.

    Raises:
        FormatError: the file is not there, cannot be read, is not text, is not JSON, is cut short, or
            holds something other than an object.
    """
    text = _read_text(path)
    body = text.rstrip()
    if not body:
        raise FormatError(f"{path}: the file is empty")
    try:
        value = json.loads(body, object_pairs_hook=_without_repetition)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        if body.startswith("{") and (error.pos >= len(body) or not body.endswith("}")):
            line, column = body.count("\n") + 1, len(body) - (body.rfind("\n") + 1)
            raise FormatError(f"{path}: the file is cut short: it ends at line {line}, column {column}") from None
        raise FormatError(f"{path}: not JSON at {where}: {error.msg}") from None
    except RecursionError:
        raise FormatError(f"{path}: nested too deeply to be read") from None
    except ValueError as error:
        raise FormatError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{path}: holds {shown(value)}: must be an object, {{...}}")
    return value


def check_writable(path: str | os.PathLike[str]) -> None:
    """Find out, before work is spent, whether `path` can be written.

    Raises:
        OutputError: the folder is not there or not writable, or `path` is a folder.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise OutputError(f"{path} is a folder: name a file")
    if not target.parent.is_dir():
        raise OutputError(f"{path} cannot be written: there is no folder {target.parent}")
    needed = [target] if target.exists() else []
    if _replaceable(target):
        needed.append(target.parent)
    if not all(os.access(place, os.W_OK) for place in needed):
        raise OutputError(f"{path} cannot be written: permission denied")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path`, whole or not at all: what was there stays until all of it is on disk.

    Raises:
        OutputError: it cannot be written.
    """
    check_writable(path)
    # The file behind a symbolic link is replaced, not the link.
    target = Path(os.path.realpath(path))
    if not _replaceable(target):
        _write_device(target, text)
        return
    # Named before it is made, so that an interruption at any moment finds it and removes it.
    temporary = target.with_name(f".planner-{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            temporary.chmod(target.stat().st_mode & 0o7777)
        temporary.replace(target)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def layout(data: Mapping[str, object]) -> str:
    """JSON text of a graph or plan, for people and for diffs.

    A tensor, an op, or an execution with what is freed after it, per line.

    Raises:
        FormatError: a number is not finite.
    """
    parts = []
    for name, value in data.items():
        if name == "steps" and isinstance(value, list):
            parts.append(f"{_dump(name)}: [{_rows(_executions(value))}]")
        elif name in ("tensors", "ops") and isinstance(value, list):
            parts.append(f"{_dump(name)}: [{_rows(map(_dump, value))}]")
        elif isinstance(value, dict):
            parts.append(f"{_dump(name)}: {{{_rows(f'{_dump(key)}: {_dump(entry)}' for key, entry in value.items())}}}")
        else:
            parts.append(f"{_dump(name)}: {_dump(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _without_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {shown(repeated)} appears twice in one object")
    return fields


def _read_text(path: str | os.PathLike[str]) -> str:
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise FormatError(f"{path}: there is no such file") from None
    except IsADirectoryError:
        raise FormatError(f"{path}: is a folder, not a file") from None
    except (OSError, ValueError) as error:
        raise FormatError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not a text file: byte {error.start} is 0x{content[error.start]:02x}") from None
    if "\0" in text:
        raise FormatError(f"{path}: not a text file: byte {content.index(0)} is 0x00")
    return text


def _replaceable(target: Path) -> bool:
    """Whether a new file may take the place of `target`: not so for /dev/stdout or a pipe."""
    return target.is_file() or not target.exists()


def _write_device(target: Path, text: str) -> None:
    try:
        with target.open("w", encoding="utf-8") as file:
            file.write(text)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"{target} cannot be written: {error.strerror or error}") from error


def _executions(steps: list[object]) -> Iterable[str]:
    line: list[str] = []
    for step in steps:
        if line and isinstance(step, list) and step[0] == "compute":
            yield ", ".join(line)
            line = []
        line.append(_dump(step))
    if line:
        yield ", ".join(line)


def _rows(rows: Iterable[str]) -> str:
    text = ",\n  ".join(rows)
    return f"\n  {text}\n" if text else ""


def _dump(value: object) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        raise FormatError(f"{value!r} holds a number that is not finite: it has no form in JSON") from None
