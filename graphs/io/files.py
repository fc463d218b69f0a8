"""JSON files: reading with precise errors, and atomic writing."""

import json
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryFile

from planner.graphs.documents import convert_to_json, shorten
from planner.graphs.errors import FormatError, OutputError, UsageError

_DESCRIPTOR = re.compile(r"/(?:dev|proc/(?P<process>[0-9]+))/fd/(?P<number>[0-9]+)")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # half of a character, which is invalid without the other half
_MOST_LINKS = 40  # symbolic links to follow, as on Linux
_DOCUMENTS = {".doc", ".docx", ".htm", ".html", ".ipynb", ".log", ".md", ".odt", ".pdf", ".rst", ".tex", ".txt"}
_DATA = {".csv", ".db", ".json", ".jsonl", ".npy", ".npz", ".parquet", ".toml", ".tsv", ".xls", ".xlsx", ".xml", ".yaml", ".yml"}
_OTHERS = {".gz", ".jpeg", ".jpg", ".lp", ".mps", ".pickle", ".pkl", ".png", ".pt", ".pth", ".py", ".safetensors", ".svg", ".zip"}
_FORMATS = _DOCUMENTS | _DATA | _OTHERS


def read_object(path: str | os.PathLike[str]) -> dict[str, object]:
    """Return the JSON object in the file `path`.

    Raises:
        FormatError: the file does not exist, cannot be read, is not text, is not JSON, is cut short, or holds something other
            than an object.
    """
    text = read_text(path)
    body = text.rstrip()
    if not body:
        raise FormatError(f"{path}: the file is empty")
    try:
        value = json.loads(body, object_pairs_hook=_build_object)
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
        raise FormatError(f"{path}: holds {shorten(value)}: must be an object, {{...}}")
    if _SURROGATE.search(body):
        for name, entry in value.items():
            convert_to_json(name, f"{path}: a field's name")
            convert_to_json(entry, f"{path}: {name}")
    return value


def check_writable(path: str | os.PathLike[str], *read: str | os.PathLike[str], suffix: str = "") -> None:
    """Raise an error, before work is spent, if `path` cannot be written, or is one of the files that are `read` for it.

    A name that ends like files of another format than `suffix` is refused: it would replace a file of the user's, such as the
    model's code, or name one that no other program opens. Any other ending is the user's own.

    Raises:
        OutputError: the folder does not exist or is not writable, or `path` is a folder or ends like another format.
        UsageError: it is one of the files that are read.
    """
    if not isinstance(path, str | os.PathLike):
        raise OutputError(f"the name of the file to write is {path!r}: must be text or a path")
    if not os.fspath(path):
        raise OutputError("the name of the file to write is empty")
    if (descriptor := open_descriptor(path)) is not None:
        try:
            os.fstat(descriptor)
        except (OSError, OverflowError) as error:
            raise _make_output_error(path, error) from None
        return
    try:
        target = _find_target(path)
        if target.is_symlink():
            raise OutputError(f"{path} cannot be written: its symbolic links form a loop")
        if target.is_dir():
            raise OutputError(f"{path} is a folder: name a file")
        if not target.parent.is_dir():
            raise OutputError(f"{path} cannot be written: there is no folder {target.parent}")
    except (OSError, ValueError) as error:  # an invalid or too long name; a loop of links
        raise _make_output_error(path, error) from None
    if target.exists() and not os.access(target, os.W_OK):
        raise OutputError(f"{path} cannot be written: Permission denied")
    if target.exists() and any(Path(source).exists() and target.samefile(source) for source in read):
        raise UsageError(f"{path} is an input of this command: name another file to write")
    if suffix and (other := Path(path).suffix.lower()) in _FORMATS - {suffix}:
        raise OutputError(f"{path} ends with {other}, but what is written is a {suffix} file: name one that ends with {suffix}")
    if _is_replaceable(target):
        _check_creatable(target.parent, path)


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Raise an OutputError, before work is spent, if files cannot be written in `folder`, which may have to be created."""
    place = Path(folder).absolute()
    try:
        while not os.path.lexists(place):
            place = place.parent
        if not place.is_dir():
            given = folder if place == Path(folder).absolute() else place
            raise OutputError(f"{given} is a file: name a folder, which is made where there is none")
    except (OSError, ValueError) as error:
        raise _make_output_error(folder, error) from None
    _check_creatable(place, folder)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path` as UTF-8, as ``write_bytes`` does; raise an OutputError if it cannot be written."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write `content` to `path` atomically: the old file stays until the new one is on disk.

    A path that is not a file, such as /dev/stdout, /dev/null or a pipe, is written to directly.

    Raises:
        OutputError: it cannot be written.
    """
    check_writable(path)
    if not is_replaced(path):
        _write_through(path, content, open_descriptor(path))
        return
    target = _find_target(path)
    # Named before it is created, so that it is removed after an interruption at any moment.
    temporary = target.with_name(f".planner-{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            temporary.chmod(target.stat().st_mode & 0o7777)
        temporary.replace(target)
    except OSError as error:
        raise _make_output_error(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def open_descriptor(path: str | os.PathLike[str]) -> int | None:
    """Return the file descriptor of this process that `path` names, such as 1 for /dev/stdout; None for other paths."""
    place = Path(path)
    for _ in range(_MOST_LINKS):
        try:
            place = Path(os.path.realpath(place.parent), place.name)
            if match := _DESCRIPTOR.fullmatch(str(place)):
                return int(match["number"]) if match["process"] in (None, str(os.getpid())) else None
            place = place.parent / place.readlink()
        except (OSError, ValueError):  # it is no link, or no path at all
            return None
    return None


def is_replaced(path: str | os.PathLike[str]) -> bool:
    """Return True if writing replaces the file at `path`; False for paths that are not files."""
    return open_descriptor(path) is None and _is_replaceable(_find_target(path))


def is_stdout(path: str | os.PathLike[str]) -> bool:
    """Return True if `path` is the standard output of this process."""
    if open_descriptor(path) == 1:
        return True
    try:
        found = Path(path).stat()
        return stat.S_ISREG(found.st_mode) and os.path.samestat(found, os.fstat(1))
    except (OSError, ValueError):
        return False


def format_json(data: Mapping[str, object]) -> str:
    """Return the JSON text of a graph or plan, readable for people and in diffs.

    Each line has a tensor, an op, or an execution with the frees after it.

    Raises:
        FormatError: a number is not finite.
    """
    parts = []
    for name, value in data.items():
        if name == "steps" and isinstance(value, list):
            parts.append(f"{_encode(name)}: [{_format_rows(_format_steps(value))}]")
        elif name in ("pools", "tensors", "ops") and isinstance(value, list):
            parts.append(f"{_encode(name)}: [{_format_rows(map(_encode, value))}]")
        elif isinstance(value, dict):
            parts.append(
                f"{_encode(name)}: {{{_format_rows(f'{_encode(key)}: {_encode(entry)}' for key, entry in value.items())}}}"
            )
        else:
            parts.append(f"{_encode(name)}: {_encode(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _build_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {shorten(repeated)} appears twice in one object")
    return fields


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text in the file `path`; raise a FormatError if the file is not there, cannot be read, or is not text."""
    try:
        if _is_device(path):
            raise FormatError(f"{path}: is a device, not a file")
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise FormatError(f"{path}: there is no such file") from None
    except IsADirectoryError:
        raise FormatError(f"{path}: is a folder, not a file") from None
    except (OSError, TypeError, ValueError) as error:
        raise FormatError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not a text file: byte {error.start} is 0x{content[error.start]:02x}") from None
    if "\0" in text:
        raise FormatError(f"{path}: not a text file: byte {content.index(0)} is 0x00")
    return text


def _is_device(path: str | os.PathLike[str]) -> bool:
    """Return True if `path` is a device without an end, such as /dev/zero; a terminal has one."""
    mode = Path(path).stat().st_mode
    if stat.S_ISCHR(mode):
        with Path(path).open("rb", buffering=0) as device:
            return not device.isatty()
    return stat.S_ISBLK(mode)


def _is_replaceable(target: Path) -> bool:
    """Return True if a new file may replace `target`; False for /dev/stdout or a pipe."""
    return target.is_file() or not target.exists()


def _check_creatable(folder: Path, path: str | os.PathLike[str]) -> None:
    """Raise an OutputError about `path` if no file can be created in `folder`: /proc says that it is writable, and is not."""
    try:
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _make_output_error(path, error) from None


def _find_target(path: str | os.PathLike[str]) -> Path:
    """Return the file to replace: the target of a symbolic link, not the link."""
    return Path(os.path.realpath(path))


def _write_through(path: str | os.PathLike[str], content: bytes, descriptor: int | None) -> None:
    """Write to a path that is not a file; an open descriptor is written to at its position, after earlier output."""
    try:
        if descriptor is None:
            # No O_CREAT: if it was removed meanwhile, it is not created.
            opened = os.open(path, os.O_WRONLY)
        else:
            if sys.stdout is not None:
                sys.stdout.flush()
            opened = os.dup(descriptor)
        with os.fdopen(opened, "wb") as file:
            file.write(content)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _make_output_error(path, error) from error


def _make_output_error(path: str | os.PathLike[str], error: Exception) -> OutputError:
    return OutputError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}")


def _format_steps(steps: list[object]) -> Iterable[str]:
    line: list[str] = []
    for step in steps:
        if line and isinstance(step, list) and step[0] == "compute":
            yield ", ".join(line)
            line = []
        line.append(_encode(step))
    if line:
        yield ", ".join(line)


def _format_rows(rows: Iterable[str]) -> str:
    text = ",\n  ".join(rows)
    return f"\n  {text}\n" if text else ""


def _encode(value: object) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        raise FormatError(f"{value!r} holds a number that is not finite: it has no form in JSON") from None
