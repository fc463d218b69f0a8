"""Operator logs of real training steps, as the simulator of DTR (Kirisame et al., ICLR 2021) reads them.

What its instructions mean here:

- CONSTANT: memory from outside that stays to the end. Before the first call it is static; later ones are
  outputs of an op that takes no time, must not run again, and whose outputs are kept.
- CALL: an op, unless all its results alias an argument. Then it is a view, which is neither op nor tensor:
  its time goes to the op that made the storage, of a constant to the next op. (``read`` can keep it.)
- MUTATE: copy on write, as DTR does it. The op reads the storage and makes a new one of the same size; other
  references stay with the old one.
- COPY, COPY_FROM, RELEASE: references to a storage come and go. A storage is in memory until the last of
  them is released; what still has one at the end of the log is kept.
- ANNOTATE: everything before START is skipped, BACKWARD begins the backward.

A program often holds a reference beyond the last op that reads the storage (autograd saves tensors that it
never reads), and the log counts that memory. It is free to give up, so it must not bind a planner: an op
that takes no time and reads nothing stands after the last reader and makes a tensor of that size; another,
at the release, reads it. Keeping everything then takes what the log says, and dropping the tensor costs nothing.
"""

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from graphs.errors import FormatError
from graphs.importers.storages import Record, Storage
from graphs.io.fields import Fields, shown
from graphs.ir import Graph, Phase

_GZIP = b"\x1f\x8b"
_HEAD_BYTES = 4096
_LARGEST = 2**63 - 1


def is_log(path: str | os.PathLike[str]) -> bool:
    """Whether the file `path` is gzipped, or its first line is an instruction."""
    try:
        with Path(path).open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except (OSError, ValueError):
        return False
    return head.startswith(_GZIP) or b'"INSTRUCTION"' in head.lstrip().split(b"\n", 1)[0]


def read(path: str | os.PathLike[str], *, name: str, views: bool = False) -> Graph:
    """The graph of the log in the file `path`.

    Args:
        path: of the log, which may be gzipped.
        name: for the provenance.
        views: make each view an op of its own, that reads its base and makes a tensor of no bytes; what reads the
            view reads both. So DTR has it: evicting a storage loses its views, and what makes them takes time.

    Raises:
        FormatError: the file is cut short or damaged, or a line is not what it should be; names the line.
    """
    lines = _lines(path)
    starts = [
        i for i, (_, line) in enumerate(lines) if line.take("INSTRUCTION") == "ANNOTATE" and line.take("ANNOTATION") == "START"
    ]
    return _Log(str(path), lines[starts[0] + 1 :] if starts else lines, views=views).graph(name)


def _lines(path: str | os.PathLike[str]) -> list[tuple[int, Fields]]:
    """The lines that are not empty, with their numbers."""
    lines = []
    for number, text in enumerate(_text(path).split("\n"), start=1):
        if not text.strip():
            continue
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise FormatError(f"{path}: line {number} is not JSON, or cut short: {shown(text)}") from None
        lines.append((number, Fields(value, source=str(path), path=f"line {number}")))
    return lines


def _text(path: str | os.PathLike[str]) -> str:
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


class _Log:
    """Replays the lines of a log into a record: a name stands for the storage it refers to."""

    def __init__(self, source: str, lines: list[tuple[int, Fields]], *, views: bool) -> None:
        self.source = source
        self.keeps_views = views
        self.handles: dict[str, Storage] = {}  # of names of views that are ops: the tensor of no bytes
        self.rest: Iterator[tuple[int, Fields]] = iter(lines)
        self.line = 0
        self.record = Record()
        self.names: dict[str, Storage] = {}
        self.counts = dict.fromkeys(("CONSTANT", "CALL", "MUTATE"), 0)
        self.views = 0
        self.actions: dict[str, Callable[[Fields], None]] = {
            "CONSTANT": self.constant,
            "CALL": self.call,
            "MUTATE": self.mutate,
            "COPY": self.copy,
            "COPY_FROM": self.copy_from,
            "RELEASE": self.release,
            "ANNOTATE": self.annotate,
        }

    def graph(self, name: str) -> Graph:
        """The graph of all lines."""
        for number, fields in self.rest:
            self.line = number
            kind = fields.string("INSTRUCTION")
            if kind not in self.actions:
                fields.refuse("INSTRUCTION", f"one of {', '.join(self.actions)} here")
            if kind in self.counts:
                self.counts[kind] += 1
            self.actions[kind](fields)
        if not self.record.ops:
            raise FormatError(f"{self.source}: the log has no CALL: it ends at line {self.line}")
        return self.record.graph(
            {
                "imported": "DTR log",
                "model": name,
                "log_ops": sum(self.counts.values()),
                "constants": self.counts["CONSTANT"],
                "calls": self.counts["CALL"],
                "mutations": self.counts["MUTATE"],
                "views": self.views,
            }
        )

    def constant(self, fields: Fields) -> None:
        """CONSTANT, then MEMORY of the same name."""
        name = self.new_name(fields, "NAME")
        self.names[name] = self.record.constant(name, self.detail("MEMORY", name))

    def call(self, fields: Fields) -> None:
        """CALL, then for each result MEMORY and ALIAS (the index of an argument, or -1)."""
        bases, time_ns, target = self.storages(fields, "ARGS"), self.integer(fields, "TIME"), fields.string("NAME")
        arguments = self.with_handles(fields, bases)
        made: list[tuple[str, int]] = []
        views: list[tuple[str, Storage]] = []
        for result in self.strings(fields, "RESULT"):
            if result in self.names or result in dict(made):
                fields.refuse("RESULT", f"new names: {shown(result)} is taken")
            size_bytes = self.detail("MEMORY", result)
            alias = self.detail("ALIAS", result, least=-1, below=len(bases))
            if alias < 0:
                made.append((result, size_bytes))
            else:
                views.append((result, bases[alias]))
        if made or not views:
            storages = self.record.op(target, arguments, made, time_ns)
            self.names.update(zip((name for name, _ in made), storages, strict=True))
        else:
            self.views += 1
            if self.keeps_views:
                handles = self.record.view_op(target, arguments, views, time_ns)
                self.handles.update(zip((name for name, _ in views), handles, strict=True))
            else:
                self.record.view([base for _, base in views], time_ns)
        for name, base in views:
            base.references += 1
            self.names[name] = base

    def mutate(self, fields: Fields) -> None:
        """MUTATE: the arguments at the positions in MUTATE are given new storages, on writing."""
        arguments, names = self.storages(fields, "ARGS"), self.strings(fields, "ARGS")
        written = fields.integers("MUTATE", below=len(arguments))
        count = len(self.record.ops)
        made = [(f"{names[i]}@{count}", arguments[i].size_bytes) for i in written]
        if len(set(made)) < len(made):
            fields.refuse("MUTATE", "a list of different arguments")
        read = self.with_handles(fields, arguments)
        storages = self.record.op(fields.string("NAME"), read, made, self.integer(fields, "TIME"))
        for i, storage in zip(written, storages, strict=True):
            self.names[names[i]] = storage
            self.handles.pop(names[i], None)
            self.record.release(arguments[i])

    def copy(self, fields: Fields) -> None:
        """COPY: the name DST refers to the storage of SRC as well."""
        storage = self.storage(fields, "SRC", fields.string("SRC"))
        self.names[self.new_name(fields, "DST")] = storage
        storage.references += 1
        self.copy_handle(fields)

    def copy_from(self, fields: Fields) -> None:
        """COPY_FROM: the name DST, which refers to something, now refers to the storage of SRC."""
        storage, old = (self.storage(fields, key, fields.string(key)) for key in ("SRC", "DST"))
        storage.references += 1
        self.names[fields.string("DST")] = storage
        self.record.release(old)
        self.copy_handle(fields)

    def release(self, fields: Fields) -> None:
        """RELEASE: the name refers to nothing any more. Names from before the log are passed over."""
        storage = self.names.get(name := fields.string("NAME"))
        if storage is None:
            return
        self.storage(fields, "NAME", name)
        self.record.release(storage)

    def annotate(self, fields: Fields) -> None:
        """ANNOTATE: BACKWARD begins the backward."""
        if fields.string("ANNOTATION") == "BACKWARD":
            self.record.phase = Phase.BACKWARD

    def copy_handle(self, fields: Fields) -> None:
        """What DST names is a view if what SRC names is."""
        source, name = fields.string("SRC"), fields.string("DST")
        self.handles.pop(name, None)
        if source in self.handles:
            self.handles[name] = self.handles[source]

    def with_handles(self, fields: Fields, bases: list[Storage]) -> list[Storage]:
        """`bases`, the storages of ARGS, and the tensors of no bytes of those that are views."""
        names = self.strings(fields, "ARGS")
        return [s for name, base in zip(names, bases, strict=True) for s in (base, self.handles.get(name)) if s is not None]

    def storages(self, fields: Fields, key: str) -> list[Storage]:
        """The storages that the names in the list `key` refer to."""
        return [self.storage(fields, key, name) for name in self.strings(fields, key)]

    def storage(self, fields: Fields, key: str, name: str) -> Storage:
        """The storage that `name` refers to."""
        storage = self.names.get(name)
        if storage is None or not storage.references:
            state = "was never made" if storage is None else "was released"
            fields.refuse(key, f"what is in memory: {shown(name)} {state}")
        return storage

    def strings(self, fields: Fields, key: str) -> list[str]:
        """A list of strings."""
        values = fields.array(key)
        strings = [value for value in values if isinstance(value, str)]
        if len(strings) < len(values):
            fields.refuse(key, "a list of strings")
        return strings

    def new_name(self, fields: Fields, key: str) -> str:
        """A name that is not in use."""
        name = fields.string(key)
        if name in self.names:
            fields.refuse(key, "a new name: this one is taken")
        return name

    def detail(self, key: str, name: str, *, least: int = 0, below: int = _LARGEST) -> int:
        """The number on the next line, which must be `key` of `name`."""
        previous = self.line
        self.line, fields = next(self.rest, (previous, None))
        if fields is None:
            raise FormatError(f"{self.source}: the log is cut short: after line {previous}, {key} of {shown(name)} is missing")
        if fields.take("INSTRUCTION") != key:
            fields.refuse("INSTRUCTION", f"{key} of {shown(name)}")
        if fields.take("NAME") != name:
            fields.refuse("NAME", shown(name))
        return self.integer(fields, key, least=least, below=below)

    def integer(self, fields: Fields, key: str, *, least: int = 0, below: int = _LARGEST) -> int:
        """A whole number, which these logs write as a string."""
        text = fields.string(key)
        if not text.isascii() or not text.removeprefix("-").isdecimal() or len(text) > 20 or not least <= int(text) < below:
            limit = "" if below == _LARGEST else f" and below {below}"
            fields.refuse(key, f"a whole number as a string, {least} or more{limit}")
        return int(text)
