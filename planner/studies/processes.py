"""Calls in separate processes, isolated in memory, threads and crashes. Imports neither torch nor pandas."""

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TypeVar

from planner.graphs.errors import PlannerError
from planner.solvers.child_process import ChildProcess, connect_to_parent

Item = TypeVar("Item")

ALONE = MappingProxyType({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"})


class ProcessError(PlannerError):
    """The error that a process failed, was killed, or did not end in time."""


def iterate_results(
    function: Callable[..., Iterable[Item]],
    *arguments: object,
    variables: Mapping[str, str] = MappingProxyType({}),
    limit_s: float | None = None,
) -> Iterator[Item]:
    """Yield the results of `function`, called in a new process; the process ends with it.

    Workers of a cluster may start such a process, unlike a pool.

    Args:
        function: imported there by its name.
        arguments: its arguments, picklable like its results.
        variables: environment variables that differ from this process's.

    Raises:
        ProcessError: it failed; earlier results have been yielded.
    """
    began = time.monotonic()
    with tempfile.TemporaryFile() as said, ChildProcess(__name__, said=said, variables=variables) as child:
        child.send((function, arguments))
        try:
            while found := child.receive(None if limit_s is None else max(0.0, began + limit_s - time.monotonic())):
                yield from found
            raise ProcessError(f"not ended after {limit_s:.0f} s")
        except EOFError:
            code = child.process.wait()
        if code:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
            raise ProcessError(f"exit code {code}: {lines[-1] if lines else 'it said nothing'}")


def main() -> None:
    """Call the function that is received over the standard input, a socket, and send back each of its results."""
    connection = connect_to_parent()
    function, arguments = connection.recv()
    for item in function(*arguments):
        connection.send((item,))
