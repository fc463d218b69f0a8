"""Importer of operator logs of real training steps, in the format of DTR's simulator (Kirisame et al., ICLR 2021).

Instructions are translated as follows:

- CONSTANT: memory from outside that stays to the end. Before the first call it is static; later ones are outputs of an op that
  takes no time, must not be recomputed, and whose outputs are kept.
- CALL: an op, unless all its results alias an argument. Then it is a view, which is neither op nor tensor: its time is added to
  the op that made the storage, for a constant to the next op. (``read`` can keep views.)
- MUTATE: copy on write, as in DTR. The op reads the storage and makes a new one of the same size; other references keep the
  old one.
- COPY, COPY_FROM, RELEASE: references to a storage are added and removed. A storage is in memory until the last one is
  released; one with references at the end of the log is kept.
- ANNOTATE: everything before START is skipped; BACKWARD begins the backward pass.

A program often has a reference beyond the last op that reads the storage (autograd saves tensors that it never reads), and the
log counts that memory. It may be freed earlier, so it must not bind a planner: an op that takes no time and reads nothing comes
after the last reader and makes a tensor of that size; another one, at the release, reads it. Keeping everything then needs as
much as the log, and freeing the tensor costs nothing.
"""

import os
from collections.abc import Iterator, Mapping
from typing import NoReturn

from planner.graphs.documents import refuse, shorten
from planner.graphs.errors import FormatError
from planner.graphs.importers.simrd_lines import (
    AliasLine,
    AnnotateLine,
    CallLine,
    ConstantLine,
    CopyFromLine,
    CopyLine,
    LogLine,
    MemoryLine,
    MutateLine,
    Names,
    ReleaseLine,
    parse_line,
    read_lines,
)
from planner.graphs.importers.storages import ExecutionRecord, Storage
from planner.graphs.ir import Graph, Phase

_LARGEST = 2**63 - 1


def read(path: str | os.PathLike[str], *, name: str, views: bool = False) -> Graph:
    """Return the graph of the log in the file `path`.

    Args:
        path: the log, plain or gzipped.
        name: the model, for the provenance.
        views: make each view an op that reads its base and makes a tensor of 0 bytes; readers of the view read both. So it is in
            DTR: evicting a storage loses its views, and recomputing them takes time.

    Raises:
        FormatError: the file is cut short or damaged, or a line is wrong; names the line.
    """
    return _Log(str(path), read_lines(path), views=views).replay(name)


class _Log:
    """A replay of the lines of a log into an ``ExecutionRecord``; names refer to storages."""

    def __init__(self, source: str, lines: list[tuple[int, Mapping[str, object]]], *, views: bool) -> None:
        self.source = source
        self.keeps_views = views
        self.handles: dict[str, Storage] = {}  # the tensors of 0 bytes of views that are ops, by name
        self.rest: Iterator[tuple[int, Mapping[str, object]]] = iter(lines)
        self.number = 0  # of the present line
        self.value: Mapping[str, object] = {}  # of the present line
        self.record = ExecutionRecord()
        self.names: dict[str, Storage] = {}
        self.counts = dict.fromkeys(("CONSTANT", "CALL", "MUTATE"), 0)
        self.views = 0

    def replay(self, name: str) -> Graph:
        """Replay all lines and return their graph."""
        while (line := self.read_line()) is not None:
            self.execute(line)
        if not self.record.ops:
            raise FormatError(f"{self.source}: the log has no CALL: it ends at line {self.number}")
        return self.record.build_graph(
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

    def execute(self, line: LogLine) -> None:
        """Execute `line`, and the lines that belong to it."""
        match line:
            case ConstantLine():
                self.counts["CONSTANT"] += 1
                self.check_new("NAME", line.name)
                self.names[line.name] = self.record.add_constant(line.name, self.read_memory(line.name))
            case CallLine():
                self.counts["CALL"] += 1
                self.call(line)
            case MutateLine():
                self.counts["MUTATE"] += 1
                self.mutate(line)
            case CopyLine():
                self.copy(line)
            case CopyFromLine():
                self.copy_from(line)
            case ReleaseLine():
                self.release(line)
            case AnnotateLine():
                if line.annotation == "BACKWARD":
                    self.record.phase = Phase.BACKWARD
            case _:
                self.refuse("INSTRUCTION", "after the CONSTANT or CALL that it belongs to")

    def call(self, line: CallLine) -> None:
        """Execute CALL, followed for each result by MEMORY and ALIAS (the index of an argument, or -1)."""
        bases, time_ns = self.find_arguments(line.args), self.parse_whole("TIME", line.time)
        arguments = self.add_handles(line.args, bases)
        made: list[tuple[str, int]] = []
        views: list[tuple[str, Storage]] = []
        for i, result in enumerate(line.result):
            if result in self.names or result in line.result[:i]:
                self.refuse("RESULT", f"new names: {shorten(result)} is taken")
        for result in line.result:
            size_bytes = self.read_memory(result)
            alias = self.read_alias(result, len(bases))
            if alias < 0:
                made.append((result, size_bytes))
            else:
                views.append((result, bases[alias]))
        if made or not views:
            storages = self.record.add_op(line.name, arguments, made, time_ns)
            self.names.update(zip((name for name, _ in made), storages, strict=True))
        else:
            self.views += 1
            if self.keeps_views:
                handles = self.record.view_op(line.name, arguments, views, time_ns)
                self.handles.update(zip((name for name, _ in views), handles, strict=True))
            else:
                self.record.view([base for _, base in views], time_ns)
        for name, base in views:
            base.references += 1
            self.names[name] = base

    def mutate(self, line: MutateLine) -> None:
        """Execute MUTATE: the arguments at the positions in MUTATE get new storages, by copy on write."""
        arguments = self.find_arguments(line.args)
        if max(line.mutate, default=-1) >= len(arguments):
            self.refuse("MUTATE", f"a list of positions in ARGS, below {len(arguments)}")
        count = len(self.record.ops)
        made = [(f"{line.args[i]}@{count}", arguments[i].size_bytes) for i in line.mutate]
        if len(set(made)) < len(made):
            self.refuse("MUTATE", "a list of different arguments")
        read = self.add_handles(line.args, arguments)
        storages = self.record.add_op(line.name, read, made, self.parse_whole("TIME", line.time))
        for i, storage in zip(line.mutate, storages, strict=True):
            self.names[line.args[i]] = storage
            self.handles.pop(line.args[i], None)
            self.record.release(arguments[i])

    def copy(self, line: CopyLine) -> None:
        """Execute COPY: the name DST refers to the storage of SRC as well."""
        storage = self.find_storage("SRC", line.src)
        self.check_new("DST", line.dst)
        self.names[line.dst] = storage
        storage.references += 1
        self.copy_handle(line)

    def copy_from(self, line: CopyFromLine) -> None:
        """Execute COPY_FROM: the name DST, which refers to a storage, now refers to that of SRC."""
        storage, old = self.find_storage("SRC", line.src), self.find_storage("DST", line.dst)
        storage.references += 1
        self.names[line.dst] = storage
        self.record.release(old)
        self.copy_handle(line)

    def release(self, line: ReleaseLine) -> None:
        """Execute RELEASE: the name no longer refers to a storage. Names from before the log are ignored."""
        if line.name in self.names:
            self.record.release(self.find_storage("NAME", line.name))

    def copy_handle(self, line: CopyLine | CopyFromLine) -> None:
        """Make DST a view if SRC is one."""
        self.handles.pop(line.dst, None)
        if line.src in self.handles:
            self.handles[line.dst] = self.handles[line.src]

    def add_handles(self, names: Names, bases: list[Storage]) -> list[Storage]:
        """Return `bases`, the storages of `names`, and the tensors of 0 bytes of the views among them."""
        return [s for name, base in zip(names, bases, strict=True) for s in (base, self.handles.get(name)) if s is not None]

    def find_arguments(self, names: Names) -> list[Storage]:
        """Return the storages that the arguments `names` refer to."""
        return [self.find_storage("ARGS", name) for name in names]

    def find_storage(self, key: str, name: str) -> Storage:
        """Return the storage that `name` refers to."""
        storage = self.names.get(name)
        if storage is None or not storage.references:
            state = "was never made" if storage is None else "was released"
            self.refuse(key, f"what is in memory: {shorten(name)} {state}")
        return storage

    def check_new(self, key: str, name: str) -> None:
        """Raise an error if `name` is in use."""
        if name in self.names:
            self.refuse(key, "a new name: this one is taken")

    def read_memory(self, name: str) -> int:
        """Return the bytes on the next line, which must be MEMORY of `name`."""
        line = self.read_line()
        if not isinstance(line, MemoryLine):
            self.refuse_detail(line, "MEMORY", name)
        self.check_of(line.name, name)
        return self.parse_whole("MEMORY", line.memory)

    def read_alias(self, name: str, below: int) -> int:
        """Return the position below `below`, or -1, on the next line, which must be ALIAS of `name`."""
        line = self.read_line()
        if not isinstance(line, AliasLine):
            self.refuse_detail(line, "ALIAS", name)
        self.check_of(line.name, name)
        return self.parse_whole("ALIAS", line.alias, least=-1, below=below)

    def read_line(self) -> LogLine | None:
        """Return the next line; None at the end."""
        number, value = next(self.rest, (self.number, None))
        if value is None:
            return None
        self.number, self.value = number, value
        return parse_line(value, self.source, number)

    def refuse_detail(self, line: LogLine | None, kind: str, name: str) -> NoReturn:
        """Raise the error that the next line must be `kind` of `name`."""
        if line is None:
            raise FormatError(
                f"{self.source}: the log is cut short: after line {self.number}, {kind} of {shorten(name)} is missing"
            )
        self.refuse("INSTRUCTION", f"{kind} of {shorten(name)}")

    def check_of(self, found: str, name: str) -> None:
        """Raise an error unless the line belongs to `name`."""
        if found != name:
            self.refuse("NAME", shorten(name))

    def parse_whole(self, key: str, text: str, *, least: int = 0, below: int = _LARGEST) -> int:
        """Return the integer in `text`, the field `key`."""
        if not least <= int(text) < below:
            limit = "" if below == _LARGEST else f" and below {below}"
            self.refuse(key, f"a whole number as a string, {least} or more{limit}")
        return int(text)

    def refuse(self, key: str, must: str) -> NoReturn:
        """Raise an error about the field `key` of the line."""
        refuse(self.source, f"line {self.number}.{key}", self.value[key], must)
