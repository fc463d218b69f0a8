"""A fresh interpreter that runs one function of a module, and exchanges objects with the process that started it.

It is started as ``multiprocessing`` does it with "spawn", but for one thing: the caller's main module is not imported there
again, so that a script which plans needs no ``if __name__ == "__main__"``.
"""

import os
import socket
import subprocess
import sys
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.spawn import get_executable
from types import TracebackType
from typing import Any, Self

_COMMAND = "import sys; sys.path[:] = sys.argv[1:]; from {module} import main; main()"


class ChildProcess:
    """The process; a ``with`` statement, or ``end``, ends it. It ends by itself where the process that started it is gone."""

    def __init__(self, module: str) -> None:
        """Start a process that imports `module` and calls its function ``main``.

        Raises:
            OSError: it cannot be started.
        """
        program = get_executable()
        if not program:
            raise OSError("there is no interpreter that could be started")
        here, there = socket.socketpair()
        with here, there:
            self._process = subprocess.Popen(
                [
                    os.fsdecode(program),
                    "-c",
                    _COMMAND.format(module=module),
                    *sys.path,
                ],
                stdin=there.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Ctrl-C is for who waits for the result; but priorities hold among the processes of one session.
                process_group=0,
            )
            self._connection = Connection(here.detach())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    @property
    def is_running(self) -> bool:
        """True until it has ended or was killed."""
        return self._process.poll() is None

    def end(self) -> None:
        """Kill it. To end one that has ended does nothing."""
        self._process.kill()
        self._connection.close()
        self._process.wait()

    def send(self, what: object) -> None:
        """Send an object; where the process has died, nothing."""
        with suppress(OSError):  # the death is noticed by ``receive``
            self._connection.send(what)

    def receive(self, most_s: float) -> Any:
        """Return what it has sent, waiting for so many seconds for that; None where there is nothing.

        Raises:
            EOFError: it has died, and there is nothing left that it has sent.
        """
        try:
            return self._connection.recv() if self._connection.poll(most_s) else None
        except OSError as error:
            raise EOFError from error


def connection_to_parent() -> Connection:
    """Return the connection to the process that started this one."""
    return Connection(os.dup(0))


def description(error: Exception) -> str:
    """Return what has gone wrong, and where."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
