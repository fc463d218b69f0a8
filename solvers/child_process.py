"""A fresh interpreter that runs one function of a module and exchanges objects with its parent process.

It is started like a "spawn" process of ``multiprocessing``, but does not import the caller's main module, so that scripts need no
``if __name__ == "__main__"``.
"""

import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.spawn import get_executable
from types import MappingProxyType, TracebackType
from typing import IO, Any, Self

_COMMAND = "import sys; sys.path[:] = sys.argv[1:]; from {module} import main; main()"


class ChildProcess:
    """The child process; leaving the ``with`` statement, or ``end``, kills it. It exits by itself when its parent is gone."""

    def __init__(
        self, module: str, *, said: IO[bytes] | None = None, variables: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Start a process that imports `module` and calls its function ``main``.

        Args:
            said: file for its output and errors; None: they are dropped.
            variables: environment variables that differ from this process's.

        Raises:
            OSError: it cannot be started.
        """
        program = get_executable()
        if not program:
            raise OSError("there is no interpreter that could be started")
        here, there = socket.socketpair()
        with here, there:
            self.process = subprocess.Popen(
                [os.fsdecode(program), "-c", _COMMAND.format(module=module), *sys.path],
                stdin=there.fileno(),
                stdout=said or subprocess.DEVNULL,
                stderr=said or subprocess.DEVNULL,
                env=os.environ | variables,
                # Ctrl-C is for the parent; but priorities hold among the processes of one session.
                process_group=0,
            )
            self.connection = Connection(here.detach())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    @property
    def is_running(self) -> bool:
        """True until the process has ended."""
        return self.process.poll() is None

    def end(self) -> None:
        """Kill the process; do nothing if it has ended."""
        self.process.kill()
        self.connection.close()
        self.process.wait()

    def send(self, what: object) -> None:
        """Send an object; do nothing if the process has died."""
        with suppress(OSError):  # the death is noticed by ``receive``
            self.connection.send(what)

    def receive(self, most_s: float | None) -> Any:
        """Return the next object that it has sent, waiting up to `most_s` seconds, without limit for None; None if there is none.

        Raises:
            EOFError: the process has died, and everything that it sent was received.
        """
        try:
            return self.connection.recv() if self.connection.poll(most_s) else None
        except OSError as error:
            raise EOFError from error


def connect_to_parent() -> Connection:
    """Return the connection to the process that started this one; processes that this one starts do not inherit it."""
    connection = Connection(os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return connection


def describe_error(error: Exception) -> str:
    """Return the message of an error and the place where it was raised."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
